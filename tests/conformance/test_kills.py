"""Sockets only, real processes: a worker is killed in the middle of a 64 MiB transfer. No worker may hang.

Three workers stream to each other without end. One is killed by SIGKILL at a random moment; the survivors must see
PeerLostError, advance the generation, and exchange checked data among themselves. The quick suite does a few rounds;
all hundred of each kind of socket are

    python -m pytest tests/conformance/test_kills.py -m slow
"""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
from tests.conformance.worlds import KEY

from elaswave.errors import PeerLostError
from elaswave.transport.interface import Tag
from elaswave.transport.stream import StreamTransport

NUM_ELEMENTS = (64 << 20) // 8
VICTIM = 1
WORKERS = (0, 1, 2)
BOUND_S = 30.0


def work(worker: int, listen: str, pipe: Connection) -> None:
    """One worker; reports what it saw, or nothing if it is the victim."""
    torch.set_num_threads(1)
    transport = StreamTransport(worker, key=KEY, listen=listen)
    pipe.send(transport.address)
    transport.connect(pipe.recv(), BOUND_S)
    others = [peer for peer in WORKERS if peer != worker]
    values = torch.full((NUM_ELEMENTS,), worker)
    outs = {peer: torch.zeros(NUM_ELEMENTS, dtype=torch.int64) for peer in others}
    step = 0
    pipe.send("streaming")
    try:
        while True:
            handles = [transport.recv(peer, Tag(1, step, 0), outs[peer]) for peer in others]
            handles += [transport.send(peer, Tag(1, step, 0), values) for peer in others]
            transport.wait(handles, BOUND_S)
            step += 1
    except PeerLostError as error:
        lost, woke_at = error.worker, time.monotonic()
    survivors = [peer for peer in WORKERS if peer != lost]
    transport.advance_generation(1, survivors)
    # The memory of the old generation is ours again: use it at once, with the tags that were interrupted.
    values.fill_(100 + worker)
    peer = next(peer for peer in survivors if peer != worker)
    outs[peer].zero_()
    for attempt in range(3):
        handle = transport.recv(peer, Tag(1, attempt, 0), outs[peer][: 1 << 20])
        transport.wait([handle, transport.send(peer, Tag(1, attempt, 0), values[: 1 << 20])], BOUND_S)
        assert outs[peer][: 1 << 20].unique().tolist() == [100 + peer]
    assert not outs[peer][1 << 20 :].any()
    pipe.send((lost, woke_at))
    pipe.recv()  # neither leaves before the other is through
    transport.close()


def one_kill(folder: str, kind: str, delay_s: float) -> float:
    """One round; returns the seconds from the kill until the last survivor was awake."""
    listen = f"unix:{folder}" if kind == "unix" else "tcp:127.0.0.1"
    context = multiprocessing.get_context("fork")
    pipes, processes = {}, {}
    for worker in WORKERS:
        pipes[worker], theirs = context.Pipe()
        processes[worker] = context.Process(target=work, args=(worker, listen, theirs), daemon=True)
        processes[worker].start()
        theirs.close()

    def hear(worker: int) -> object:
        assert pipes[worker].poll(BOUND_S), f"worker {worker} hangs"
        return pipes[worker].recv()

    try:
        addresses = {worker: hear(worker) for worker in WORKERS}
        for worker in WORKERS:
            pipes[worker].send(addresses)
        assert {hear(worker) for worker in WORKERS} == {"streaming"}
        time.sleep(delay_s)  # so that the kill meets every phase of a transfer
        os.kill(processes[VICTIM].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        slowest_s = 0.0
        for worker in WORKERS:
            if worker != VICTIM:
                lost, woke_at = hear(worker)
                assert lost == VICTIM
                slowest_s = max(slowest_s, woke_at - killed_at)
        for worker in WORKERS:
            if worker != VICTIM:
                pipes[worker].send("done")
                processes[worker].join(BOUND_S)
                assert processes[worker].exitcode == 0
        return slowest_s
    finally:
        for worker, process in processes.items():
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            pipes[worker].close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_peer_killed_in_the_middle_of_64_mib_never_hangs_the_others(tmp_path, kind, rounds):
    rng = random.Random(rounds)
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    seconds = sorted(one_kill(str(folder), kind, rng.uniform(0.0, 0.2)) for _ in range(rounds))
    median_ms, worst_ms = seconds[rounds // 2] * 1e3, seconds[-1] * 1e3
    print(f"\n{kind}: {rounds} kills, survivors awake after {median_ms:.1f} ms (median), {worst_ms:.1f} ms (worst)")
    left = [name for name in os.listdir(folder) if not name.startswith(f"w{VICTIM}-")]
    assert left == []  # the survivors have removed their sockets
