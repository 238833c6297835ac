"""The micro-batches of a run by (step, micro-batch), from the data to the engine of a worker.

A worker makes them itself (`BatchMaker`), or has loaders, processes beside it that do (`LoaderSupply`): the same ones,
since nothing in them depends on who makes them, and when. Those in use are fetched once, and kept for their backward if
a layer asks for them (`Microbatches`).

A worker asks its loaders ahead for the micro-batches that its routes give it. A loader that ends or hangs is replaced
by the forkserver, and what it was asked for is asked of another. Every wait is bounded: a micro-batch at which several
loaders end, or at which they hang, is the data's fault, and is reported as such. A loader holds no state but the data,
and ends when its worker does.

Between the two a micro-batch lies in anonymous memory that a descriptor stands for, without a name that could stay. It
lives as long as someone holds its descriptor or a tensor in it, whoever is killed in between. It holds the length of a
pickle, the pickle, and behind it the tensors, each at a multiple of 64 bytes; in the pickle a place stands for each.
"""

import contextlib
import io
import itertools
import os
import pickle
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from elaswave.config.schema import Config
from elaswave.data.samples import Sampler, Split
from elaswave.devices.interface import HOST, Device, generators_kept
from elaswave.engine.activity import Activity
from elaswave.engine.checks.values import flatten, unflatten
from elaswave.errors import DataError, UsageError, WaitTimeoutError
from elaswave.observability.processes import family_cpu_s
from elaswave.planning.programs.layout import evaluation_layout
from elaswave.protocol.step.activity import DATA, FIRST_S
from elaswave.training.dataset import UserDataError
from elaswave.training.definition import Samples, evaluation_draws
from elaswave.training.raised import readable, said, traceback_of
from elaswave.types import Layout


class BatchName(NamedTuple):
    """Which micro-batch."""

    split: Split
    step: int
    """From 1; 0 for validation, whose micro-batches are the same at every step."""
    microbatch: int

    def __str__(self) -> str:
        if self.split == "validation":
            return f"micro-batch {self.microbatch} of the evaluation"
        return f"step {self.step}, micro-batch {self.microbatch}"


class BatchError(Exception):
    """A micro-batch cannot be made.

    Args:
        name: which one.
        kind: type of the exception behind it, or a word for what has happened.
        summary: one line.
        traceback_text: of the exception behind it, or "".
    """

    def __init__(self, name: BatchName, kind: str, summary: str, traceback_text: str = "") -> None:
        self.name = name
        self.kind = kind
        self.summary = summary
        self.traceback_text = traceback_text
        super().__init__(f"{summary} (at {name})")


class Supply(Protocol):
    """Where a worker's micro-batches come from."""

    def get(self, name: BatchName) -> tuple[Any, Any]:
        """Inputs and targets of one micro-batch.

        Raises:
            BatchError: it cannot be made.
        """
        ...

    def begin(self, step: int) -> None:
        """A step is begun, perhaps again: its micro-batches will be asked for next."""
        ...

    def use_layout(self, layout: Layout) -> None:
        """Notes who runs what from now on, and so which micro-batches will be asked for."""
        ...


class BatchMaker:
    """Makes micro-batches in this process.

    Args:
        config: of the run.
        samples: its data.
        sampler: which samples make up which micro-batch.
    """

    def __init__(self, config: Config, samples: Samples, sampler: Sampler) -> None:
        self._size = config.batch.microbatch_size
        self._samples = samples
        self._sampler = sampler

    def make(self, name: BatchName) -> tuple[Any, Any]:
        """Makes one micro-batch; raises whatever the data raise."""
        if name.split == "train":
            return self._samples.batch(self._sampler.draws(name.step, name.microbatch), "train")
        num_samples = self._samples.num_samples("validation")
        return self._samples.batch(evaluation_draws(name.microbatch, self._size, num_samples), "validation")

    def get(self, name: BatchName) -> tuple[Any, Any]:
        """See `Supply.get`."""
        try:
            return self.make(name)
        except (UserDataError, DataError) as error:
            raise failure_of(name, error) from error

    def begin(self, step: int) -> None:
        """See `Supply.begin`: nothing is made before it is needed."""

    def use_layout(self, layout: Layout) -> None:
        """See `Supply.use_layout`."""


class Batches:
    """The micro-batches of one worker, as its engine asks for them.

    Args:
        supply: where they come from.
        activity: told that the worker is at its data, which may take as long as it likes, unlike computing.
        on_waited: told the seconds that each micro-batch of training took to come.
    """

    def __init__(self, supply: Supply, activity: Activity, on_waited: Callable[[float], None]) -> None:
        self._supply = supply
        self._activity = activity
        self._on_waited = on_waited
        self.use_layout = supply.use_layout
        self.begin = supply.begin

    def training(self, step: int, microbatch: int) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch of training."""
        begin_s = time.monotonic()
        pair = self._get(BatchName("train", step, microbatch))
        self._on_waited(time.monotonic() - begin_s)
        return pair

    def evaluation(self, step: int, microbatch: int) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch of evaluation, the same after every step."""
        return self._get(BatchName("validation", 0, microbatch))

    def _get(self, name: BatchName) -> tuple[Any, Any]:
        before = self._activity.doing
        self._activity.compute(DATA)
        pair = self._supply.get(name)
        self._activity.has_run()
        # Its clock begins anew: the time at the data is not held against the action.
        if before.computing:
            self._activity.compute(before.label)
        return pair


def failure_of(name: BatchName, error: Exception) -> BatchError:
    """Makes what a person is told of an exception from the data."""
    cause = error.__cause__ if isinstance(error, UserDataError) and error.__cause__ is not None else error
    summary = readable(str(error)) if isinstance(error, UserDataError) else said(error)
    return BatchError(name, type(cause).__name__, summary, traceback_of(cause))


Fetch = Callable[[int, int], tuple[Any, Any]]
"""(step, micro-batch) -> inputs and targets."""


class Microbatches:
    """What `elaswave.batch` answers with, and what the first layer and the loss are given.

    Args:
        training, evaluation: where micro-batches come from.
        device: where they are to be.
    """

    def __init__(self, training: Fetch, evaluation: Fetch, device: Device = HOST) -> None:
        self._device = device
        self._fetch = {True: training, False: evaluation}
        self._here: dict[tuple[int, int, bool], tuple[Any, Any]] = {}
        self._versions: dict[tuple[int, int, bool], list[int]] = {}
        """Of those that a layer has asked for: the versions of the inputs when they came."""

    def get(self, step: int, microbatch: int, *, train: bool) -> tuple[Any, Any]:
        """Inputs and targets; the same ones again until `release` or `clear`."""
        key = (step, microbatch, train)
        if key not in self._here:
            inputs, targets = self._fetch[train](step, microbatch)
            self._here[key] = (self._brought(inputs), self._brought(targets))
        return self._here[key]

    def _brought(self, value: Any) -> Any:
        if self._device.is_host:
            return value
        structure, leaves = flatten(value)
        return unflatten(structure, list(map(self._device.bring, leaves)))

    def inputs(self, step: int, microbatch: int, *, train: bool) -> Any:
        """Gets the inputs, for a layer that asks for them. It may draw afterwards: a dataset that has to be asked draws
        from the same generators, which must not show.

        Raises:
            UsageError: a layer has written to them.
        """
        key = (step, microbatch, train)
        with contextlib.nullcontext() if key in self._here else generators_kept():
            inputs, _ = self.get(step, microbatch, train=train)
        versions = [leaf._version for leaf in flatten(inputs)[1]]
        if self._versions.setdefault(key, versions) != versions:
            raise UsageError(
                "a layer has written to what batch() returned, which others are given too: write to a copy"
            )
        return inputs

    def release(self, step: int, microbatch: int, *, train: bool, is_over: bool) -> None:
        """An action of a micro-batch has ended.

        Args:
            is_over: nothing more of it will run here; else it stays if a layer has asked for it.
        """
        key = (step, microbatch, train)
        if is_over or key not in self._versions:
            self._here.pop(key, None)
            self._versions.pop(key, None)

    def clear(self) -> None:
        """A new attempt begins."""
        self._here.clear()
        self._versions.clear()


_ALIGN = 64
_LENGTH = struct.Struct("<Q")


class _Place(NamedTuple):
    """Where a tensor lies."""

    offset: int
    """Behind the pickle."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Puts aside the tensors of a value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._offset = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        place = _Place(self._offset, value.dtype, tuple(value.shape))
        self.tensors.append(value)
        self._offset += _aligned(value.nbytes)
        return tuple(place)


class _Unpickler(pickle.Unpickler):
    """Finds the tensors of a value in mapped memory."""

    def __init__(self, pickled: bytes, memory: torch.UntypedStorage) -> None:
        super().__init__(io.BytesIO(pickled))
        self._memory = memory
        self._begin = _aligned(_LENGTH.size + len(pickled))

    def persistent_load(self, pid: Any) -> torch.Tensor:
        place = _Place(*pid)
        offset, count = (self._begin + place.offset) // place.dtype.itemsize, torch.Size(place.shape).numel()
        flat = torch.empty(0, dtype=place.dtype).set_(self._memory, offset, torch.Size([count]), torch.Size([1]))
        return flat.reshape(place.shape)


def to_memory(value: Any) -> int:
    """Puts a value into anonymous memory.

    Args:
        value: can be pickled; its tensors are dense and on the CPU.
    Returns:
        The memory's descriptor, to be closed by the caller.
    Raises:
        Exception: it cannot be pickled, or there is no memory.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    head = _LENGTH.pack(pickled.tell()) + pickled.getvalue()
    descriptor = os.memfd_create("elaswave-batch", os.MFD_CLOEXEC)
    try:
        offset = _aligned(len(head))
        os.ftruncate(descriptor, max(1, offset + sum(_aligned(tensor.nbytes) for tensor in pickler.tensors)))
        _write(descriptor, memoryview(head), 0)
        for tensor in pickler.tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                _write(descriptor, flat.view(torch.uint8).numpy().data, offset)
            offset += _aligned(tensor.nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def from_memory(descriptor: int) -> Any:
    """Reads the value that `to_memory` has put there; its tensors lie in the memory itself.

    Args:
        descriptor: of the memory; may be closed afterwards.
    """
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    pickled = os.pread(descriptor, length, _LENGTH.size)
    # Unlike Python's mmap, this holds no descriptor as long as the memory is mapped: there may be many at a time.
    name, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    memory = torch.UntypedStorage.from_file(name, True, size)
    assert isinstance(memory, torch.UntypedStorage)
    return _Unpickler(pickled, memory).load()


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


MESSAGE_BYTES_MAX = 1 << 17


def loader_log(worker: int) -> str:
    """Returns the name of the log of a worker's loaders."""
    return f"loader-{worker}.log"


class BatchMade(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch; its memory's descriptor comes along."""

    name: BatchName
    seconds: float
    """That it took to make."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A loader's first word: which process it is."""

    pid: int


class NotMade(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch cannot be made; see `BatchError`."""

    name: BatchName
    kind: str
    summary: str
    traceback_text: str


def say_who(line: socket.socket) -> None:
    """Tells the worker which process this is, before the data are opened: it looks whether that computes."""
    with contextlib.suppress(ConnectionError):  # it has ended
        line.send(msgspec.msgpack.encode(Begun(os.getpid())))


def serve_batches(maker: BatchMaker, line: socket.socket) -> int:
    """Makes micro-batches until the worker is gone.

    Args:
        maker: makes them.
        line: to the worker; keeps messages apart.
    Returns:
        Exit status.
    """
    try:
        while request := line.recv(MESSAGE_BYTES_MAX):
            _answer(maker, line, msgspec.msgpack.decode(request, type=BatchName))
    except ConnectionError:
        pass  # the worker has ended, or wants another loader
    return 0


def _answer(maker: BatchMaker, line: socket.socket, name: BatchName) -> None:
    begin_s = time.monotonic()
    try:
        memory = to_memory(maker.make(name))
    except Exception as error:
        failure = failure_of(name, error)
        line.send(msgspec.msgpack.encode(NotMade(name, failure.kind, failure.summary, failure.traceback_text)))
        return
    try:
        socket.send_fds(line, [msgspec.msgpack.encode(BatchMade(name, time.monotonic() - begin_s))], [memory])
    finally:
        # The worker has a descriptor of its own by now; this one would keep the memory.
        os.close(memory)


AHEAD = 2
"""Micro-batches that are asked for ahead, per loader."""
LOOK_S = 1.0
"""Between two looks at how much processor time a loader has used."""
TURN_S = 0.01
"""How long a wait lasts before bytes of other transfers move again."""
ENDS_MAX = 3
"""Loaders that may end over one micro-batch."""
HANGS_MAX = 2
"""Loaders that may hang over one micro-batch; the second may take twice as long as the first."""
HANG_S = 50.0
"""How long a loader may be at one micro-batch until `LEARNED` have been made, without using a processor."""
HANG_FLOOR_S = 40.0
HANG_FACTOR = 4.0
"""Afterwards: this many times as long as the longest has taken, and no less than the floor. Less than what the
coordinator grants a worker that is at its data (`elaswave.protocol.detection.detector`), and with what the second
loader may take as much: a file system that stands still is waited for as long with loaders as without."""
LEARNED = 4
REPLACE_S = 60.0
"""How long the forkserver may take to fork a loader."""


class _Loader:
    """One loader, as its worker sees it.

    Args:
        index: among the loaders of the worker.
        line: to its process.
    """

    def __init__(self, index: int, line: socket.socket) -> None:
        self.index = index
        self.line = line
        self.asked: deque[BatchName] = deque()
        """In the order in which it will answer; it is at the first one."""
        self.since_s = 0.0
        """When it began with the first one, at the latest."""
        self.pid = 0
        """Its process; 0 if that is not known."""
        self._cpu_s = self._looked_s = self._stirred_s = 0.0

    def still_s(self, now_s: float) -> float:
        """Tells for how long it has not been seen to use a processor while it was at that one; it is looked at now and
        then."""
        # Not at each turn of a wait: a look reads files of all processes of the loader.
        if self.pid and now_s - self._looked_s >= LOOK_S:
            self._looked_s, before_s = now_s, self._cpu_s
            self._cpu_s = family_cpu_s(self.pid)
            if self._cpu_s != before_s:
                self._stirred_s = now_s
        return now_s - max(self.since_s, self._stirred_s)


class LoaderSupply:
    """The micro-batches of one worker, from its loaders; see `elaswave.engine.batches.Supply`.

    Args:
        worker: its id.
        line: to the forkserver, which hands over a line to each loader, and forks another one when it is asked.
        num_loaders: of this worker.
        num_steps: of the run.
        eval_microbatches: of an evaluation.
        check: called while it waits; moves bytes, and raises InterruptedWaitError if the generation is over.
        activity: told when another loader is given its chance.
        log: of the loaders, for messages.
    """

    def __init__(
        self,
        worker: int,
        line: socket.socket,
        *,
        num_loaders: int,
        num_steps: int,
        eval_microbatches: int,
        check: Callable[[], None],
        activity: Activity,
        log: Path,
    ) -> None:
        line.setblocking(False)
        self._worker = worker
        self._forkserver = line
        self._num_loaders = num_loaders
        self._num_steps = num_steps
        self._eval_microbatches = eval_microbatches
        self._check = check
        self._activity = activity
        self._log = log
        self._loaders: dict[int, _Loader] = {}
        self._ready: dict[BatchName, Any] = {}
        """Pairs, and `NotMade`, that nobody has asked for yet."""
        self._training: tuple[int, ...] = ()
        """Micro-batches of a step that are expected to be asked for, ascending."""
        self._evaluation: tuple[int, ...] = ()
        self._ends: Counter[BatchName] = Counter()
        self._hangs: Counter[BatchName] = Counter()
        self._longest_s = 0.0
        self._num_made = 0

    # ---------------------------------------------------------------------------------------------------- as a supply

    def use_layout(self, layout: Layout) -> None:
        """See `Supply.use_layout`."""
        self._training = _at_the_ends(layout, self._worker)
        evaluation = evaluation_layout(layout, self._eval_microbatches) if self._eval_microbatches else None
        self._evaluation = () if evaluation is None else _at_the_ends(evaluation, self._worker)

    def begin(self, step: int) -> None:
        """See `Supply.begin`."""
        # Those of the step itself stay: it may be begun again.
        for name in [name for name in self._ready if name.split == "validation" or name.step < step]:
            del self._ready[name]
        self._take_what_came()
        self._ask_ahead(BatchName("train", step, -1))

    def get(self, name: BatchName) -> tuple[Any, Any]:
        """See `Supply.get`.

        Raises:
            BatchError: the data have raised an exception, or loaders have ended or hung.
            WaitTimeoutError: the forkserver forks no loader.
            InterruptedWaitError: the generation is over.
        """
        self._take_what_came()
        begin_s = time.monotonic()
        while name not in self._ready:
            self._check()
            self._require_hope(name)
            self._ensure_asked(name)
            self._ask_ahead(name)
            self._wait()
            self._take_what_came()
            self._look_for_hung(name)
            # The forkserver is waited for only while no loader is left.
            if self._loaders:
                begin_s = time.monotonic()
            elif time.monotonic() - begin_s > REPLACE_S:
                raise WaitTimeoutError(f"the forkserver has forked no loader for {REPLACE_S:.0f} s; see forkserver.log")
        found = self._ready.pop(name)
        self._ask_ahead(name)
        if isinstance(found, NotMade):
            raise BatchError(name, found.kind, found.summary, found.traceback_text)
        pair: tuple[Any, Any] = found
        return pair

    # -------------------------------------------------------------------------------------------------------- asking

    def _ask_ahead(self, name: BatchName) -> None:
        """Asks for what comes next, as far as loaders look ahead."""
        asked = self._asked()
        for following in itertools.islice(self._after(name), AHEAD * self._num_loaders):
            # What has ended several loaders fails when it is needed; asked for ahead it would end more of them.
            if following not in asked and following not in self._ready and not self._is_given_up(following):
                self._ask(following)

    def _after(self, name: BatchName) -> Iterator[BatchName]:
        """Lists what will be asked for after a micro-batch, in order."""
        if name.split == "validation":
            yield from (BatchName("validation", 0, index) for index in self._evaluation if index > name.microbatch)
            return
        yield from (BatchName("train", name.step, index) for index in self._training if index > name.microbatch)
        for step in range(name.step + 1, self._num_steps + 1) if self._training else ():
            yield from (BatchName("train", step, index) for index in self._training)

    def _asked(self) -> set[BatchName]:
        return {name for loader in self._loaders.values() for name in loader.asked}

    def _ensure_asked(self, name: BatchName) -> None:
        if name not in self._asked():
            self._ask(name)

    def _ask(self, name: BatchName) -> None:
        """Asks the loader that has least to do; none, if there is none."""
        for loader in sorted(self._loaders.values(), key=lambda loader: (len(loader.asked), loader.index)):
            try:
                loader.line.send(msgspec.msgpack.encode(name))
            except BlockingIOError:
                continue  # stopped, with a full line
            except OSError:
                continue  # it has ended; that is met when what it has answered has been taken
            if not loader.asked:
                loader.since_s = time.monotonic()
            loader.asked.append(name)
            return

    # ------------------------------------------------------------------------------------------------------ answers

    def _wait(self) -> None:
        """Waits until something has come, but not for long."""
        poll = select.poll()
        poll.register(self._forkserver, select.POLLIN)
        for loader in self._loaders.values():
            poll.register(loader.line, select.POLLIN)
        poll.poll(TURN_S * 1e3)

    def _take_what_came(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message, fds, _, _ = socket.recv_fds(self._forkserver, 64, 1)
                if not message:
                    break  # the forkserver is gone, and this process is about to be
                line = socket.socket(fileno=fds[0])
                line.setblocking(False)
                index = msgspec.msgpack.decode(message, type=int)
                self._loaders[index] = _Loader(index, line)
        for loader in list(self._loaders.values()):
            try:
                while self._take_from(loader):
                    pass
            except BlockingIOError:
                pass
            except OSError:
                self._replace(loader, self._ends)

    def _take_from(self, loader: _Loader) -> bool:
        """Takes one answer; False after the last one.

        Raises:
            BlockingIOError: none has come.
            OSError: the loader has ended.
        """
        try:
            message, fds, _, _ = socket.recv_fds(loader.line, MESSAGE_BYTES_MAX, 1)
        except ConnectionResetError:  # it has ended with something unread: told once, before its last answers
            message, fds, _, _ = socket.recv_fds(loader.line, MESSAGE_BYTES_MAX, 1)
        if not message:
            self._replace(loader, self._ends)
            return False
        answer = msgspec.msgpack.decode(message, type=Begun | BatchMade | NotMade)
        if isinstance(answer, Begun):
            loader.pid = answer.pid
            return True
        loader.asked.remove(answer.name)
        loader.since_s = time.monotonic()
        if isinstance(answer, NotMade):
            self._ready[answer.name] = answer
            return True
        try:
            self._ready[answer.name] = from_memory(fds[0])
        finally:
            os.close(fds[0])
        self._num_made += 1
        self._longest_s = max(self._longest_s, answer.seconds)
        return True

    # --------------------------------------------------------------------------------------------------- end and hang

    def _replace(self, loader: _Loader, why: Counter[BatchName]) -> None:
        """Lets a loader go, and asks the forkserver for another one. What it was at is what it ended at, or hung at."""
        del self._loaders[loader.index]
        loader.line.close()
        if loader.asked:
            why[loader.asked[0]] += 1
        with contextlib.suppress(OSError):
            self._forkserver.send(msgspec.msgpack.encode(loader.index))

    def _is_given_up(self, name: BatchName) -> bool:
        return self._ends[name] >= ENDS_MAX or self._hangs[name] >= HANGS_MAX

    def _require_hope(self, name: BatchName) -> None:
        """Ends the wait for a micro-batch that no loader will make."""
        if self._ends[name] >= ENDS_MAX:
            raise BatchError(
                name,
                "LoaderEnded",
                f"{ENDS_MAX} loaders, one after the other, have ended while they made it: the data's code ends its "
                f"process, or needs more memory than there is; see {self._log}",
            )
        if self._hangs[name] >= HANGS_MAX:
            raise BatchError(
                name,
                "LoaderHung",
                f"{HANGS_MAX} loaders, one after the other, have not made it, the last one within "
                # Half: the bound has doubled once more with the last hang.
                f"{self.hang_bound_s(name) / 2:.1f} s: the data's code waits for something; see {self._log}",
            )

    def hang_bound_s(self, name: BatchName) -> float:
        """Computes how long a loader may be at a micro-batch."""
        bound_s = HANG_S
        if self._num_made >= LEARNED:
            bound_s = max(HANG_FLOOR_S, HANG_FACTOR * self._longest_s)
        return bound_s * 2 ** self._hangs[name]

    def _look_for_hung(self, name: BatchName) -> None:
        """Replaces a loader that is at one micro-batch for too long, if what is waited for is behind it."""
        now_s = time.monotonic()
        # A loader that is only asked ahead may take its time: nobody waits for it yet.
        for loader in [loader for loader in self._loaders.values() if name in loader.asked]:
            at = loader.asked[0]
            if self._is_hung(loader, self.hang_bound_s(at), now_s):
                self._replace(loader, self._hangs)
                self._activity.compute(DATA)  # the coordinator grants the next one its time as well

    def _is_hung(self, loader: _Loader, bound_s: float, now_s: float) -> bool:
        """Before it is known how long micro-batches take, one may be made for any time, but not stand still."""
        age_s = now_s - loader.since_s
        if self._num_made < LEARNED and age_s <= FIRST_S:
            return loader.still_s(now_s) > bound_s
        return age_s > bound_s


def _at_the_ends(layout: Layout, worker: int) -> tuple[int, ...]:
    """Lists the micro-batches whose first layer, or last one, a worker runs: it needs their inputs or targets."""
    return tuple(
        microbatch for microbatch, route in enumerate(layout.routes) if worker in (route[0].worker, route[-1].worker)
    )
