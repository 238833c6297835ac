"""Plain PyTorch programs that train the same model on the same batches: what elaswave is compared with.

Both use the model of a `tasks.Task`, our data and sampler, and torch for everything else, each part in the fastest form
that torch offers (measured, see README.md): fused AdamW, gradients in one flat tensor where they are sent, one
all-reduce for clipping and loss together. Every step's loss is written to a file. One thread per process.
"""

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
import torch.distributed as dist
from harness import Body, Gate, fork_workers, with_steps, write_loss
from tasks import Task
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from elaswave.config.schema import Config
from elaswave.engine.blueprint import Blueprint
from elaswave.training.optimizer import learning_rate
from elaswave.worker.process import tune_allocator

TIMEOUT = timedelta(seconds=600)
HOST = torch.device("cpu")


def plain_loop(
    config: Config,
    task: Task,
    *,
    tuned: bool,
    place: torch.device = HOST,
    prepare: Callable[[], None] = lambda: None,
) -> Body:
    """One process: ordinary autograd accumulation, clip_grad_norm_, fused AdamW.

    In bfloat16 parameters, gradients and activations are bfloat16; AdamW updates float32 masters.

    Args:
        task: the model and its data.
        tuned: with our workers' settings of the allocator, which an ordinary program does not have.
        place: where it computes.
        prepare: called first in its process.
    """

    def body(gate: Gate, folder: Path, num_steps: int) -> None:
        _prepare_process(tuned)
        prepare()
        options = with_steps(config, num_steps)
        run = Blueprint(options, task.training(options))
        source = run.open_samples(folder)
        sampler = run.sampler(source)
        num_microbatches = config.batch.num_microbatches
        model = task.part(run, range(len(run.model.layers))).to(place)
        masters = _Masters(model, run.dtype)
        optimizer = torch.optim.AdamW(_decay_groups(run, masters.parameters), **_adamw(config), fused=True)
        with open(folder / "loss.log", "w", buffering=1) as log:
            for step in range(1, num_steps + 1):
                gate.before_step(0)
                total = torch.zeros((), device=place)
                for microbatch in range(num_microbatches):
                    tokens, targets = _brought(source.batch(sampler.draws(step, microbatch), "train"), place)
                    loss = task.loss(run, model(tokens), targets) / num_microbatches
                    loss.backward()
                    total += loss.detach()
                masters.take_gradients()
                norm = nn.utils.clip_grad_norm_(masters.parameters, config.optimizer.grad_clip)
                _set_learning_rate(optimizer, run.config, step)
                optimizer.step()
                masters.give()
                _report(log, step, float(total), float(norm))
            write_loss(folder, float(total))

    return body


class _Masters:
    """What the optimizer updates: float32 masters of a model, which computes in another type; or its own parameters.

    Args:
        model: with float32 parameters; those get the other type. Buffers stay as they are, as in the product.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._parameters = list(model.parameters())
        self.parameters = self._parameters
        if dtype is not torch.float32:
            self.parameters = [nn.Parameter(parameter.detach().clone()) for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.data = parameter.data.to(dtype)

    def take_gradients(self) -> None:
        """Makes a step's gradients the masters'."""
        if self.parameters is self._parameters:
            return
        for master, parameter in zip(self.parameters, self._parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None

    def give(self) -> None:
        """Makes the masters' values the model's, and forgets gradients."""
        if self.parameters is not self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self.parameters)
        for parameter in self.parameters:
            parameter.grad = None


def _brought(batch: tuple[torch.Tensor, torch.Tensor], place: torch.device) -> Sequence[torch.Tensor]:
    if place.type == "cpu":
        return batch
    return [values.pin_memory().to(place, non_blocking=True) for values in batch]


def torch_pipeline(config: Config, task: Task, *, tuned: bool) -> Body:
    """Stages x replicas: Schedule1F1B, gradient all-reduce and ZeRO-1 inside each stage, on gloo.

    Args:
        task: the model and its data.
        tuned: see `plain_loop`.
    """

    def body(gate: Gate, folder: Path, num_steps: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        widths = config.widths
        assert len(set(widths)) == 1, "torch's pipeline has as many replicas in every stage"
        job = _PipelineJob(config, task, gate, folder, num_steps, len(widths), widths[0], port, tuned)
        fork_workers(sum(widths), job.worker)

    return body


class _PipelineJob(NamedTuple):
    config: Config
    task: Task
    gate: Gate
    folder: Path
    num_steps: int
    num_stages: int
    num_replicas: int
    port: int
    tuned: bool

    def worker(self, rank: int) -> None:
        """One process of the job; ranks are stage-major, as our workers are."""
        _prepare_process(self.tuned)
        config, num_replicas = self.config, self.num_replicas
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{self.port}",
            rank=rank,
            world_size=self.num_stages * num_replicas,
            timeout=TIMEOUT,
        )
        stage_index, replica = divmod(rank, num_replicas)
        ranks = range(self.num_stages * num_replicas)
        pipelines = [dist.new_group(list(ranks[first::num_replicas])) for first in range(num_replicas)]
        replicas = [dist.new_group(list(ranks[first : first + num_replicas])) for first in ranks[::num_replicas]]
        pipeline_group, replica_group = pipelines[replica], replicas[stage_index]

        options = with_steps(config, self.num_steps)
        run = Blueprint(options, self.task.training(options))
        source = run.open_samples(self.folder / f"data-{rank}")
        sampler = run.sampler(source)
        total_microbatches = config.batch.num_microbatches
        own_microbatches = range(replica, total_microbatches, num_replicas)
        stops = list(itertools.accumulate(config.layers_per_stage))
        own_layers = range(stops[stage_index] - config.layers_per_stage[stage_index], stops[stage_index])
        module = self.task.part(run, own_layers)
        parameters = list(module.parameters())
        gradients = _flat_gradients(parameters)
        optimizer = ZeroRedundancyOptimizer(
            _decay_groups(run, list(module.parameters())),
            torch.optim.AdamW,
            process_group=replica_group,
            parameters_as_bucket_view=True,
            fused=True,
            **_adamw(config),
        )

        def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.task.loss(run, output, targets) / total_microbatches

        stage = PipelineStage(module, stage_index, self.num_stages, torch.device("cpu"), group=pipeline_group)
        schedule = Schedule1F1B(stage, len(own_microbatches), loss_fn=loss_fn, scale_grads=False)
        is_first, is_last = stage_index == 0, stage_index == self.num_stages - 1
        with open(self.folder / f"loss-{rank}.log", "w", buffering=1) as log:
            for step in range(1, self.num_steps + 1):
                self.gate.before_step(rank)
                losses: list[torch.Tensor] = []
                draws = [draw for m in own_microbatches for draw in sampler.draws(step, m)]
                tokens, targets = source.batch(draws, "train") if is_first or is_last else (None, None)
                gradients.zero_()
                schedule.step(
                    *([tokens] if is_first else []),
                    **({"target": targets, "losses": losses} if is_last else {}),
                    return_outputs=False,
                )
                dist.all_reduce(gradients, group=replica_group)
                # The same on all replicas of a stage, so that the world's sum counts it once per replica.
                squares = torch.dot(gradients, gradients) / num_replicas
                sums = torch.stack([squares, torch.stack(losses).detach().sum() if losses else squares.new_zeros(())])
                dist.all_reduce(sums)
                norm, loss = float(sums[0]) ** 0.5, float(sums[1])
                if norm > config.optimizer.grad_clip > 0:
                    gradients.mul_(config.optimizer.grad_clip / (norm + 1e-6))
                _set_learning_rate(optimizer, run.config, step)
                optimizer.step()
                _report(log, step, loss, norm)
        if rank == 0:
            write_loss(self.folder, loss)
        dist.destroy_process_group()


def _prepare_process(tuned: bool) -> None:
    torch.set_num_threads(1)
    if tuned:
        tune_allocator()


def _adamw(config: Config) -> dict:
    return {"lr": config.optimizer.lr, "betas": config.optimizer.betas, "eps": config.optimizer.eps}


def _decay_groups(run: Blueprint, parameters: Sequence[nn.Parameter]) -> list[dict]:
    """Parameter groups with and without weight decay, by the usual rule."""
    groups = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.dim() >= 2].append(parameter)
    decay = run.config.optimizer.weight_decay
    return [{"params": params, "weight_decay": decay if decays else 0.0} for decays, params in groups.items() if params]


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Makes every parameter's gradient a view into one tensor, which one all-reduce sums."""
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def _set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config.optimizer, step, config.run.steps)


def _report(log: TextIO, step: int, loss: float, norm: float) -> None:
    log.write(f"step {step} loss {loss:.6f} norm {norm:.4f}\n")
