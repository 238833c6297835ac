"""torchft replicas for the benchmarks: processes, the lighthouse, a replica's training step by step.

Tuned as well as torchft's users can. Used by `torchft_recovery.py` and `torchft_join.py`; needs the `bench` extra.
"""

import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import configuration
from torch import nn

from elaswave.engine.blueprint import Blueprint
from elaswave.models.layers import build_layer

HEARTBEAT_TIMEOUT_MS = 200
HEARTBEAT_S = 0.05
QUORUM_TICK_MS = 10
JOIN_TIMEOUT_MS = 100
GROUP_TIMEOUT_S = 1.0
"""Bound of a stuck collective: it has to exceed the replicas' largest difference within a step."""
MANAGER_TIMEOUT_S = 10.0
MICROBATCHES = 2
"""Of each replica in each step."""
JOB_TIMEOUT_S = 120.0


class Processes(NamedTuple):
    """Those of one job."""

    context: multiprocessing.context.ForkContext
    started: list[BaseProcess]
    pipes: list[Connection]
    """To each of them; the first one is the lighthouse."""
    folder: Path

    def start(self, body: Callable[..., None], *args: Any) -> Connection:
        """Forks a process that runs a body with these arguments and the other end of the returned pipe."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=body, args=(*args, theirs))
        process.start()
        theirs.close()
        self.started.append(process)
        self.pipes.append(ours)
        return ours


@contextlib.contextmanager
def job() -> Iterator[Processes]:
    """The processes of a job, at whose end all are killed."""
    with TemporaryDirectory(prefix="elaswave-bench-") as folder:
        processes = Processes(multiprocessing.get_context("fork"), [], [], Path(folder))
        try:
            yield processes
        finally:
            for process in processes.started:
                process.kill()
                process.join()
            for pipe in processes.pipes:
                pipe.close()


def receive(pipe: Connection) -> Any:
    """What a process says next.

    Raises:
        TimeoutError: it says nothing.
    """
    if not pipe.poll(JOB_TIMEOUT_S):
        raise TimeoutError(f"a torchft process said nothing for {JOB_TIMEOUT_S:g} s")
    return pipe.recv()


def serve_lighthouse(min_replicas: int, folder: Path, pipe: Connection) -> None:
    """The body of torchft's lighthouse; tells its address, and serves until it is killed."""
    from torchft.coordination import LighthouseServer

    log_to(folder / "lighthouse.log")
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    port = lighthouse.address().rpartition(":")[2]
    pipe.send(f"http://127.0.0.1:{port}")
    wait([pipe])


def log_to(path: Path) -> None:
    """Sends what a process says on its standard error to a file."""
    with open(path, "w") as log:
        os.dup2(log.fileno(), 2)


class Replica:
    """One replica of the model, in its process.

    Args:
        replica: its number.
        min_replicas: that take part in a step.
        lighthouse: address.
        folder: of the job.
        pace_s: of a micro-batch, beside its computation.
        settings: of the model and the data.
        copies_state: whether the state travels to a replica that joins; else all begin with the same.
    """

    def __init__(
        self,
        replica: int,
        min_replicas: int,
        lighthouse: str,
        folder: Path,
        pace_s: float,
        settings: tuple[str, ...] = (),
        *,
        copies_state: bool = False,
    ) -> None:
        import socket

        socket.gethostname = lambda: "127.0.0.1"  # looking a host name up may stall for seconds
        from torchft import Manager, ProcessGroupGloo

        log_to(folder / f"replica-{replica}.log")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        self._replica, self._pace_s = replica, pace_s
        self._config = config = configuration(*settings)
        self._run = run = Blueprint(config)
        self._source = run.open_samples(folder / f"data-{replica}")
        self._sampler = run.sampler(self._source)
        layers = (build_layer(layer, config.run.seed, index) for index, layer in enumerate(run.model.layers))
        self._model = nn.Sequential(*layers)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=config.optimizer.lr, fused=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=GROUP_TIMEOUT_S)),
            load_state_dict=self._load if copies_state else lambda state: None,
            state_dict=self._state if copies_state else dict,
            min_replica_size=min_replicas,
            use_async_quorum=True,
            timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
            quorum_timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
            connect_timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{replica}",
            hostname="127.0.0.1",
            heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
            init_sync=False,
        )

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def run_attempt(self, step: int, before_backward: Callable[[int], None] = lambda microbatch: None) -> bool:
        """Tries one step.

        Args:
            step: decides the samples.
            before_backward: called with each micro-batch, counted from 0.
        Returns:
            Whether it was committed.
        """
        self.manager.start_quorum()
        for microbatch in range(MICROBATCHES):
            number = (self._replica * MICROBATCHES + microbatch) % self._config.batch.num_microbatches
            tokens, targets = self._source.batch(self._sampler.draws(step, number), "train")
            loss = self._run.model.loss(self._model(tokens), targets) / MICROBATCHES
            time.sleep(self._pace_s / 3)
            before_backward(microbatch)
            loss.backward()
            time.sleep(self._pace_s * 2 / 3)
        flat = torch.cat([parameter.grad.view(-1) for parameter in self._parameters])
        self.manager.allreduce(flat).wait()
        committed = self.manager.should_commit()
        self.at_s = time.monotonic()
        if committed:
            start = 0
            for parameter in self._parameters:
                parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
            nn.utils.clip_grad_norm_(self._parameters, self._config.optimizer.grad_clip)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return committed
