"""What torchft does when a replica is killed: time to the next committed step, steps discarded, batch kept or shrunk.

The same default GPT, a whole model in each replica, two micro-batches per replica and step, actions paced as ours;
`torchft.Manager` on gloo as its README shows it, tuned as well as its users can: lighthouse heartbeat time-out 200 ms,
manager heartbeats every 50 ms, quorum ticks every 10 ms, process group time-out a little above a step. Used by
`recovery.py`; needs the `bench` extra.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from harness import configuration
from torch import nn

from elaswave.models.layers import build_layer
from elaswave.worker.blueprint import Blueprint

HEARTBEAT_TIMEOUT_MS = 200
HEARTBEAT_S = 0.05
QUORUM_TICK_MS = 10
JOIN_TIMEOUT_MS = 100
GROUP_TIMEOUT_S = 1.0
"""Bound of a stuck collective: it has to exceed the replicas' largest difference within a step."""
MANAGER_TIMEOUT_S = 10.0
MICROBATCHES = 2
"""Of each replica in each step."""
KILL_AT_STEP = 4
STEPS_AFTER = 3
JOB_TIMEOUT_S = 120.0


def measure(num_replicas: int, kills: int, action_s: float) -> dict:
    """Kills one replica in each of some jobs.

    Args:
        num_replicas: at the beginning.
        kills: number of jobs.
        action_s: emulated seconds of a forward and a backward action together, for each replica.
    Returns:
        A row of the table.
    """
    gaps_s, discarded, after = [], [], set()
    for job in range(kills):
        gap_s, num_discarded, num_participants = run_job(num_replicas, job % num_replicas, action_s * num_replicas)
        gaps_s.append(gap_s)
        discarded.append(num_discarded)
        after.add(num_participants)
        print(f"torchft, {num_replicas} replicas: {1e3 * gap_s:.0f} ms", file=sys.stderr, flush=True)
    return {
        "replicas": num_replicas,
        "kills": kills,
        "next_commit_median_s": statistics.median(gaps_s),
        "next_commit_worst_s": max(gaps_s),
        "next_commit_s": gaps_s,
        "steps_discarded_median": statistics.median(discarded),
        "microbatches_before": MICROBATCHES * num_replicas,
        "microbatches_after": sorted(MICROBATCHES * count for count in after),
    }


def run_job(num_replicas: int, victim: int, pace_s: float) -> tuple[float, int, int]:
    """One job in which the victim kills itself in the backward pass of a step.

    Returns:
        Seconds from the kill until the slowest survivor has committed a step, steps that survivors discarded, and
        the number of replicas that took part in the next committed step.
    """
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with TemporaryDirectory(prefix="elaswave-bench-") as folder:
        try:
            lighthouse = _start(context, processes, pipes, _serve_lighthouse, (num_replicas - 1, Path(folder)))
            address = _receive(lighthouse)
            for replica in range(num_replicas):
                args = (replica, num_replicas, victim, address, Path(folder), pace_s)
                _start(context, processes, pipes, run_replica, args)
            killed_s = _receive(pipes[1 + victim])
            answers = [_receive(pipes[1 + replica]) for replica in range(num_replicas) if replica != victim]
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    committed_s = []
    for attempts in answers:
        committed_s.append(min(at_s for at_s, committed, _ in attempts if committed and at_s > killed_s))
    last = answers[0]
    discarded = sum(not committed for at_s, committed, _ in last if at_s > killed_s)
    participants = next(count for at_s, committed, count in last if committed and at_s > killed_s)
    return max(committed_s) - killed_s, discarded, participants


def _start(
    context: multiprocessing.context.ForkContext,
    processes: list[BaseProcess],
    pipes: list[Connection],
    body: Callable[..., None],
    args: tuple,
) -> Connection:
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(*args, theirs))
    process.start()
    theirs.close()
    processes.append(process)
    pipes.append(ours)
    return ours


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(JOB_TIMEOUT_S):
        raise TimeoutError(f"a torchft process said nothing for {JOB_TIMEOUT_S:g} s")
    return pipe.recv()


def _serve_lighthouse(min_replicas: int, folder: Path, pipe: Connection) -> None:
    from torchft.coordination import LighthouseServer

    _log_to(folder / "lighthouse.log")
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


def _log_to(path: Path) -> None:
    with open(path, "w") as log:
        os.dup2(log.fileno(), 2)


def run_replica(
    replica: int, num_replicas: int, victim: int, lighthouse: str, folder: Path, pace_s: float, pipe: Connection
) -> None:
    """One replica: trains until some steps after the kill, and tells when each step was committed or discarded."""
    import socket

    socket.gethostname = lambda: "127.0.0.1"  # looking a host name up may stall for seconds
    from torchft import Manager, ProcessGroupGloo

    _log_to(folder / f"replica-{replica}.log")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    config = configuration()
    run = Blueprint(config)
    source = run.open_samples(folder / f"data-{replica}")
    sampler = run.sampler(source)
    model = nn.Sequential(*(build_layer(layer, config.run.seed, index) for index, layer in enumerate(run.model.layers)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, fused=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GROUP_TIMEOUT_S)),
        load_state_dict=lambda state: None,  # equal seeds: no replica has to be healed at the start
        state_dict=dict,
        min_replica_size=num_replicas - 1,
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
    attempts: list[tuple[float, bool, int]] = []
    with contextlib.suppress(KeyboardInterrupt):
        step = stop_at = 0
        while not stop_at or step < stop_at:
            step += 1
            manager.start_quorum()
            for microbatch in range(MICROBATCHES):
                number = replica * MICROBATCHES + microbatch
                tokens, targets = source.batch(sampler.draws(step, number % config.batch.num_microbatches), "train")
                loss = run.model.loss(model(tokens), targets) / MICROBATCHES
                time.sleep(pace_s / 3)
                if replica == victim and manager.current_step() >= KILL_AT_STEP and microbatch:
                    pipe.send(time.monotonic())
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                time.sleep(pace_s * 2 / 3)
            flat = torch.cat([parameter.grad.view(-1) for parameter in parameters])
            manager.allreduce(flat).wait()
            committed = manager.should_commit()
            attempts.append((time.monotonic(), committed, manager.num_participants()))
            if committed:
                start = 0
                for parameter in parameters:
                    parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                    start += parameter.numel()
                nn.utils.clip_grad_norm_(parameters, config.optimizer.grad_clip)
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if not stop_at and manager.current_step() >= KILL_AT_STEP + STEPS_AFTER:
                stop_at = step
        pipe.send(attempts)
    wait([pipe])


def print_table(rows: list[dict]) -> None:
    """The rows for people."""
    print("torchft, tuned: milliseconds from the kill until every survivor has committed a step")
    print(f"{'replicas':>8} {'kills':>5} {'median':>7} {'worst':>7} {'discarded':>9} {'micro-batches':>13}")
    for row in rows:
        batch = f"{row['microbatches_before']} -> {', '.join(map(str, row['microbatches_after']))}"
        print(
            f"{row['replicas']:>8} {row['kills']:>5} {1e3 * row['next_commit_median_s']:>7.0f} "
            f"{1e3 * row['next_commit_worst_s']:>7.0f} {row['steps_discarded_median']:>9.0f} {batch:>13}"
        )
