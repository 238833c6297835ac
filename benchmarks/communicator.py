"""How long until the survivors can communicate again after one of 8, 16 or 32 workers was killed.

    python benchmarks/communicator.py [--workers 8 16 32] [--rounds 5] [--json]

Ours (the links are there, who takes part is a value: an edit in place) against gloo's destroy_process_group +
init_process_group of the survivors, gloo's new_group of the survivors, and, where it is installed, torchft's
reconfigurable process group. Every round forks a fresh job of warm workers, links them up, lets them all-reduce once,
kills one with SIGKILL, and lets the survivors repair what they have and all-reduce again. See README.md beside this
file.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from harness import machine, print_header

from elaswave.engine.activity import Activity
from elaswave.protocol.step.ballot import add_words
from elaswave.protocol.step.engine import FrameKind
from elaswave.protocol.step.execution import Execution
from elaswave.transport.stream import StreamTransport
from elaswave.worker.links import TransportLinks

TIMEOUT_S = 120.0
TIMEOUT = timedelta(seconds=TIMEOUT_S)
NEEDED = {"gloo destroy + init": 100.0, "gloo new_group": 10.0}
"""How many times longer than ours each takes at least, at `NEEDED_AT` workers."""
NEEDED_AT = 32
ELEMENTS = 128
"""Of the all-reduce, in int64: 1 KiB, the size of a vote."""


class Place(NamedTuple):
    """What a worker knows of its job."""

    worker: int
    num_workers: int
    folder: str
    key: bytes
    store_port: int
    """A store that outlives every worker serves all who need one: none of them has to start it in the round."""
    exchange: Callable[[str], dict[int, str]]
    """Tells all workers an address and returns theirs; each worker calls it once."""


class Communicator(Protocol):
    """What lets workers compute together, as one of them sees it. Making one links all of them up."""

    def repair(self, survivors: Sequence[int]) -> None:
        """One worker is dead: makes the others able to communicate. This is what is timed."""
        ...

    def all_reduce(self, tensor: torch.Tensor, *, step: int) -> None:
        """Sums over all that take part, in place."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


class _Voters(Execution[Any]):
    """One of some workers that do nothing but the all-reduce of their protocol: making one costs no network."""

    def __init__(self, transport: StreamTransport, workers: Sequence[int]) -> None:
        self.worker = transport.worker
        self.links = TransportLinks(transport.worker, (), transport, Activity(), transport.poll)
        self.layout = SimpleNamespace(workers=tuple(workers))  # type: ignore[assignment]
        self.attempt = 1


class Ours:
    """A mesh of links, edited in place; who takes part is a value."""

    def __init__(self, place: Place) -> None:
        self._transport = StreamTransport(place.worker, key=place.key, listen=f"unix:{place.folder}")
        self._transport.connect(place.exchange(self._transport.address), TIMEOUT_S)
        self._voters = _Voters(self._transport, range(place.num_workers))

    def repair(self, survivors: Sequence[int]) -> None:
        """See `Communicator.repair`."""
        self._transport.advance_generation(1, survivors)
        self._voters = _Voters(self._transport, survivors)

    def all_reduce(self, tensor: torch.Tensor, *, step: int) -> None:
        """See `Communicator.all_reduce`."""
        self._voters.step = step
        life = self._voters.all_reduce(FrameKind.VOTE, tensor.tolist(), add_words)
        while True:
            try:
                self._voters.links.wait(next(life))  # type: ignore[attr-defined]
            except StopIteration as end:
                tensor.copy_(torch.tensor(end.value))
                return

    def close(self) -> None:
        """See `Communicator.close`."""
        self._transport.close()


class _Gloo:
    """torch.distributed on gloo; the store is there already."""

    def __init__(self, place: Place) -> None:
        self._worker = place.worker
        place.exchange("")
        self._store = dist.TCPStore("127.0.0.1", place.store_port, timeout=TIMEOUT)
        self._init("before", range(place.num_workers))
        self._group: dist.ProcessGroup | None = None

    def _init(self, prefix: str, workers: Sequence[int]) -> None:
        store = dist.PrefixStore(prefix, self._store)
        rank = workers.index(self._worker)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(workers), timeout=TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor, *, step: int) -> None:
        """See `Communicator.all_reduce`."""
        dist.all_reduce(tensor, group=self._group)

    def close(self) -> None:
        """See `Communicator.close`."""
        dist.destroy_process_group()


class GlooRebuilt(_Gloo):
    """Everything is destroyed and made again."""

    def repair(self, survivors: Sequence[int]) -> None:
        """See `Communicator.repair`."""
        dist.destroy_process_group()
        self._init("after", survivors)


class GlooNewGroup(_Gloo):
    """A new group beside the old one, which stays; only its members take part (the dead one cannot)."""

    def repair(self, survivors: Sequence[int]) -> None:
        """See `Communicator.repair`."""
        self._group = dist.new_group(list(survivors), timeout=TIMEOUT, use_local_synchronization=True)


class Torchft:
    """torchft's process group, which a manager reconfigures whenever its quorum changes."""

    def __init__(self, place: Place) -> None:
        from torchft.process_group import ProcessGroupGloo

        self._worker = place.worker
        place.exchange("")
        self._address = f"127.0.0.1:{place.store_port}"
        self._group = ProcessGroupGloo(timeout=TIMEOUT)
        self._configure("before", range(place.num_workers))

    def _configure(self, prefix: str, workers: Sequence[int]) -> None:
        if hasattr(self._group, "configure"):  # releases before the autumn of 2026
            address, rank = f"{self._address}/{prefix}", workers.index(self._worker)
            self._group.configure(address, str(self._worker), rank, len(workers))
            return
        from torchft.process_group import ReconfigureOptions

        # What the lighthouse would tell all workers, but by address (looking a host name up may stall for seconds).
        self._group._reconfigure_id = str(self._worker)
        options = ReconfigureOptions()
        options.uuid = len(workers)
        options.handles = [
            json.dumps({"id": str(worker), "store": self._address, "global_rank": None}) for worker in workers
        ]
        options.timeout = TIMEOUT
        self._group.reconfigure(options).wait()

    def repair(self, survivors: Sequence[int]) -> None:
        """See `Communicator.repair`."""
        self._configure("after", survivors)

    def all_reduce(self, tensor: torch.Tensor, *, step: int) -> None:
        """See `Communicator.all_reduce`."""
        self._group.allreduce([tensor], dist.ReduceOp.SUM).wait()

    def close(self) -> None:
        """See `Communicator.close`."""
        self._group.shutdown()


OURS = "elaswave"
TORCHFT = "torchft configure"
COMMUNICATORS: dict[str, Callable[[Place], Communicator]] = {
    OURS: Ours,
    "gloo destroy + init": GlooRebuilt,
    "gloo new_group": GlooNewGroup,
    TORCHFT: Torchft,
}


class Times(NamedTuple):
    """One round."""

    repair_s: float
    """Of the slowest survivor, its own seconds until its repair has returned."""
    ready_s: float
    """The same until its first all-reduce with all other survivors is done."""


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind and size, in turns")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    where = machine()
    skipped = {} if importlib.util.find_spec("torchft") else {TORCHFT: "not installed (the `bench` extra has it)"}
    if not skipped:
        import torchft  # noqa: F401  once, before workers are forked
    where["torchft"] = None if skipped else _torchft_version()
    names = [name for name in COMMUNICATORS if name not in skipped]
    rows = [row for num_workers in options.workers for row in measure(num_workers, names, options.rounds)]
    if options.json:
        print(json.dumps({"machine": where, "rounds": options.rounds, "skipped": skipped, "rows": rows}, indent=2))
    else:
        print_table(rows, where, options.rounds, skipped)
    return 1 if any(row["needed"] is not None and row["times_ours"] < row["needed"] for row in rows) else 0


def _torchft_version() -> str:
    for name in ("torchft-nightly", "torchft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "unknown"


def measure(num_workers: int, names: Sequence[str], rounds: int) -> list[dict]:
    """All kinds in turns; one row for each."""
    times: dict[str, list[Times]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else names[::-1]:
            times[name].append(run_job(COMMUNICATORS[name], num_workers))
    rows = []
    for name in names:
        pairs = list(zip(times[name], times[OURS], strict=True))
        rows.append(
            {
                "workers": num_workers,
                "communicator": name,
                "repair_s": statistics.median(one.repair_s for one in times[name]),
                "ready_s": statistics.median(one.ready_s for one in times[name]),
                "times_ours": statistics.median(one.repair_s / ours.repair_s for one, ours in pairs),
                "times_ours_ready": statistics.median(one.ready_s / ours.ready_s for one, ours in pairs),
                "needed": NEEDED.get(name) if num_workers == NEEDED_AT else None,
            }
        )
    return rows


def run_job(make: Callable[[Place], Communicator], num_workers: int) -> Times:
    """Forks a job, kills the worker in its middle, and times the others."""
    key = secrets.token_bytes(32)
    context = multiprocessing.get_context("fork")
    with _store() as store_port, _folder() as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for worker in range(num_workers):
                ours, theirs = context.Pipe()
                args = (make, worker, num_workers, folder, key, store_port, theirs)
                processes.append(context.Process(target=run_worker, args=args))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            addresses = {worker: _receive(pipe) for worker, pipe in enumerate(pipes)}
            for pipe in pipes:
                pipe.send(addresses)
            for pipe in pipes:
                _receive(pipe)  # linked up, and warm
            lost = num_workers // 2
            os.kill(processes[lost].pid or 0, signal.SIGKILL)
            processes[lost].join(TIMEOUT_S)
            survivors = [worker for worker in range(num_workers) if worker != lost]
            for worker in survivors:
                pipes[worker].send(survivors)
            times = [_receive(pipes[worker]) for worker in survivors]
            for worker in survivors:
                pipes[worker].send("all are done")
            for process in processes:
                process.join(TIMEOUT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return Times(max(one.repair_s for one in times), max(one.ready_s for one in times))


def run_worker(
    make: Callable[[Place], Communicator],
    worker: int,
    num_workers: int,
    folder: str,
    key: bytes,
    store_port: int,
    pipe: Connection,
) -> None:
    """The life of a worker."""
    torch.set_num_threads(1)

    def exchange(address: str) -> dict[int, str]:
        pipe.send(address)
        return _receive(pipe)

    place = Place(worker, num_workers, folder, key, store_port, exchange)
    communicator = make(place)
    tensor = torch.ones(ELEMENTS, dtype=torch.int64)
    communicator.all_reduce(tensor, step=1)
    pipe.send("linked")
    survivors = _receive(pipe)
    tensor.fill_(1)
    begin_s = time.perf_counter()
    communicator.repair(survivors)
    repaired_s = time.perf_counter()
    communicator.all_reduce(tensor, step=2)
    ready_s = time.perf_counter()
    assert torch.equal(tensor, torch.full_like(tensor, len(survivors))), "the survivors' sum is wrong"
    pipe.send(Times(repaired_s - begin_s, ready_s - begin_s))
    _receive(pipe)
    communicator.close()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"nothing was heard for {TIMEOUT_S:g} s")
    return pipe.recv()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="elaswave-bench-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """A key-value store in a process of its own; yields its port."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_store, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield _receive(ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.poll(None)  # killed, or the other end is gone


def print_table(rows: list[dict], where: dict, rounds: int, skipped: dict[str, str]) -> None:
    """The rows for people."""
    print_header(where)
    print(f"one of the workers was killed; the slowest survivor's milliseconds, medians of {rounds} rounds")
    print(
        f"{'workers':>7} {'communicator':<20} {'repair ms':>10} {'x ours':>8} {'needed':>7} "
        f"{'with first all-reduce ms':>25} {'x ours':>8}"
    )
    for row in rows:
        needed = "-" if row["needed"] is None else f"{row['needed']:.0f}"
        print(
            f"{row['workers']:>7} {row['communicator']:<20} {row['repair_s'] * 1e3:>10.3f} {row['times_ours']:>8.1f} "
            f"{needed:>7} {row['ready_s'] * 1e3:>25.2f} {row['times_ours_ready']:>8.1f}"
        )
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
