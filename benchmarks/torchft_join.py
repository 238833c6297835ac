"""What torchft's survivors and a new replica go through when the replica joins: times to its first committed step.

As `torchft_recovery.py` sets it up, with state that is copied: `torchft.Manager` on gloo, HTTP transport of the state
as by default. Used by `join.py`; needs the `bench` extra.
"""

import contextlib
import logging
import multiprocessing
import statistics
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from harness import configuration
from torch import nn
from torchft_recovery import (
    GROUP_TIMEOUT_S,
    HEARTBEAT_S,
    MANAGER_TIMEOUT_S,
    MICROBATCHES,
    _log_to,
    _receive,
    _serve_lighthouse,
    _start,
)

from elaswave.models.layers import build_layer
from elaswave.worker.blueprint import Blueprint

JOIN_AT_STEP = 8
STEPS_AFTER = 6
"""Of the joiner, before all end."""


def measure(num_replicas: int, joins: int, pace_s: float, settings: tuple[str, ...]) -> dict:
    """One replica joins, in each of some jobs.

    Args:
        num_replicas: before it.
        joins: number of jobs.
        pace_s: of a micro-batch, beside its computation.
        settings: of the model and the data.
    """
    rows = []
    for number in range(joins):
        rows.append(run_job(num_replicas, pace_s, settings))
        print(f"torchft, join {number + 1}: {rows[-1]['first_commit_s']:.2f} s", file=sys.stderr, flush=True)
    return {
        "replicas": num_replicas,
        "joins": joins,
        **{name: statistics.median(row[name] for row in rows) for name in rows[0]},
    }


def run_job(num_replicas: int, pace_s: float, settings: tuple[str, ...]) -> dict[str, float]:
    """One job in which a replica is forked once the others have made some steps."""
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with TemporaryDirectory(prefix="elaswave-bench-") as folder:
        try:
            lighthouse = _start(context, processes, pipes, _serve_lighthouse, (num_replicas, Path(folder)))
            address = _receive(lighthouse)
            for replica in range(num_replicas):
                args = (replica, num_replicas, address, Path(folder), pace_s, settings)
                _start(context, processes, pipes, run_replica, args)
            for replica in range(num_replicas):
                _receive(pipes[1 + replica])  # it has come to the step
            forked_s = time.monotonic()
            args = (num_replicas, num_replicas, address, Path(folder), pace_s, settings)
            _start(context, processes, pipes, run_replica, args)
            _receive(pipes[-1])
            theirs = [_receive(pipes[-1])]
            while sum(committed for _, committed in theirs) < STEPS_AFTER:
                theirs.append(_receive(pipes[-1]))
            others = [_arrived(pipe) for pipe in pipes[1:-1]]
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    first_s = min(at_s for at_s, committed in theirs if committed)
    normal_s = statistics.median(each for rows in others for each in _durations(rows, 0.0, forked_s)[2:])
    meanwhile = [each for rows in others for each in _durations(rows, forked_s, first_s)]
    return {
        "first_commit_s": first_s - forked_s,
        "normal_s": normal_s,
        "longest_s": max(meanwhile),
        "longest": max(meanwhile) / normal_s,
        "discarded": sum(not committed for at_s, committed in others[0] if forked_s < at_s <= first_s),
    }


def _arrived(pipe: Connection) -> list[tuple[float, bool]]:
    """What a replica has told of its attempts so far."""
    found = []
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll():
            found.append(pipe.recv())
    return found


def _durations(attempts: list[tuple[float, bool]], from_s: float, until_s: float) -> list[float]:
    """From commit to commit, of those that end in a span of time."""
    ends_s = [at_s for at_s, committed in attempts if committed]
    return [end - begin for begin, end in zip(ends_s, ends_s[1:]) if from_s < end <= until_s + 1e-9]


def run_replica(
    replica: int,
    num_replicas: int,
    lighthouse: str,
    folder: Path,
    pace_s: float,
    settings: tuple[str, ...],
    pipe: Connection,
) -> None:
    """One replica, until it is killed; tells when it has come to the step of the join (a joiner: at once), and then
    when each of its attempts has ended."""
    import socket

    socket.gethostname = lambda: "127.0.0.1"  # looking a host name up may stall for seconds
    from torchft import Manager, ProcessGroupGloo

    _log_to(folder / f"replica-{replica}.log")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    config = configuration(*settings)
    run = Blueprint(config)
    source = run.open_samples(folder / f"data-{replica}")
    sampler = run.sampler(source)
    model = nn.Sequential(*(build_layer(layer, config.run.seed, index) for index, layer in enumerate(run.model.layers)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, fused=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GROUP_TIMEOUT_S)),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=num_replicas,
        use_async_quorum=True,
        timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
        quorum_timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
        connect_timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
        init_sync=False,
    )
    attempts: list[tuple[float, bool]] = []  # that are not told yet
    is_joiner = replica == num_replicas
    has_said = is_joiner
    if is_joiner:
        pipe.send("here")
    with contextlib.suppress(KeyboardInterrupt):
        step = 0
        while True:
            step += 1
            manager.start_quorum()
            for microbatch in range(MICROBATCHES):
                number = replica * MICROBATCHES + microbatch
                tokens, targets = source.batch(sampler.draws(step, number % config.batch.num_microbatches), "train")
                loss = run.model.loss(model(tokens), targets) / MICROBATCHES
                time.sleep(pace_s / 3)
                loss.backward()
                time.sleep(pace_s * 2 / 3)
            flat = torch.cat([parameter.grad.view(-1) for parameter in parameters])
            manager.allreduce(flat).wait()
            committed = manager.should_commit()
            attempts.append((time.monotonic(), committed))
            if committed:
                start = 0
                for parameter in parameters:
                    parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                    start += parameter.numel()
                nn.utils.clip_grad_norm_(parameters, config.optimizer.grad_clip)
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if not has_said and manager.current_step() >= JOIN_AT_STEP:
                pipe.send("here")
                has_said = True
            if has_said:
                for attempt in attempts:
                    pipe.send(attempt)
                attempts.clear()
