"""The first micro-batch, made and computed beside the job: once in a process that is forked as workers are, once in the
script's own. What they find must be the same bits, or the workers would train something else than the script means.

Both use the workers' own path (`BatchMaker`, `Compute`), so two processes that see the same values get equal bits. The
script's process repeats only what the other one has done without harm: code that hangs, raises or ends its process does
not reach it.

Deliberately absent: a backward, which would start autograd's threads in the script's process.
"""

import contextlib
import ctypes
import io
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from elaswave.data.fingerprint import FIRST_LOSS, Finding
from elaswave.devices.interface import generators_kept
from elaswave.engine.batches import BatchMaker, BatchName, Microbatches
from elaswave.engine.blueprint import Blueprint, all_layers
from elaswave.engine.checks.values import flatten
from elaswave.engine.compute import Compute, ComputeRules, LayerError
from elaswave.errors import SIGNALS, DataError, StoppedBySignalError, UsageError
from elaswave.models.foreign.connection import close_all
from elaswave.training.dataset import UserDataError, hash_batch
from elaswave.training.definition import Samples
from elaswave.training.raised import said

NUM_HASHES = 32
"""Samples that are hashed."""
HASHES_S_MAX = 1.0
"""How long the script's process hashes samples."""
MEMORY_SHARE = 8
"""Of the memory, the largest part that a model, or what a dataset loads, may take: it is there once more then."""
FIRST_BATCH, AGAIN = "the first micro-batch", "the first micro-batch, made again"
_FIRST = BatchName("train", 1, 0)
_BLAS_THREADS = [
    (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
    for prefix in ("", "scipy_")
    for suffix in ("", "64_", "_64")  # "_64_" is for Fortran, and takes addresses
]


class Rehearsal:
    """The first micro-batch of a run, in this process.

    Args:
        blueprint: of the run.
        samples: a script's.
        memory_bytes: that there are; None: not known.
    """

    def __init__(self, blueprint: Blueprint, samples: Samples, memory_bytes: int | None) -> None:
        self._blueprint, self._samples, self._memory_bytes = blueprint, samples, memory_bytes
        self._pair: tuple[Any, Any] | None = None

    def data(self) -> Iterator[Finding]:
        """Draws the first micro-batch, then the samples by whose hashes a resumed run knows its data, and then the
        micro-batch once more, which must not depend on what was drawn before."""
        with contextlib.suppress(DataError, UserDataError), interruptible():  # a worker meets them too, and says so
            before = _own_memory_bytes()
            maker = BatchMaker(self._blueprint.config, self._samples, self._blueprint.sampler(self._samples))
            self._pair = pair = maker.make(_FIRST)
            large = self._too_large("what the dataset loads", _own_memory_bytes() - before)
            yield Finding(what=FIRST_BATCH, value="" if large else hash_batch(pair), text=large or _text_of(pair))
        for each in self._samples.hashes(NUM_HASHES):
            yield Finding(what=f"sample {each.sample}", value=each.hash, sample=each.sample)
        if self._pair is not None:
            with contextlib.suppress(DataError, UserDataError), interruptible():
                again = maker.make(_FIRST)
                yield Finding(what=AGAIN, value=hash_batch(again), text=_text_of(again))

    def loss(self) -> Finding | None:
        """Computes the loss of the micro-batch that `data` has drawn, from the initial values; None where there is
        none, or it is no matter of the processor alone."""
        blueprint, layers = self._blueprint, self._blueprint.model.layers
        is_here = blueprint.config.device.kind == "cpu" and not blueprint.config.model.foreign
        if self._pair is None or not is_here or any(layer.compile for layer in layers):
            return None
        size = sum(shape.size for shape in blueprint.shapes) * blueprint.dtype.itemsize
        large = self._too_large("the model", size)
        if large:
            return Finding(what=FIRST_LOSS, value="", text=large)
        loss = _loss_of(blueprint, self._pair)
        return Finding(what=FIRST_LOSS, value=loss.hex(), text=repr(loss))

    def _too_large(self, what: str, num_bytes: int) -> str:
        """Tells why something must not be in memory once more; "" if it may."""
        if self._memory_bytes is None or num_bytes * MEMORY_SHARE <= self._memory_bytes:
            return ""
        return (
            f"{what} has {num_bytes / 2**30:.1f} GiB, more than 1/{MEMORY_SHARE} of the memory of "
            f"{self._memory_bytes / 2**30:.1f} GiB"
        )


def _loss_of(blueprint: Blueprint, pair: tuple[Any, Any]) -> float:
    microbatches = Microbatches(lambda *_: pair, lambda *_: pair)
    compute = Compute(
        ComputeRules(
            blueprint.model,
            blueprint.config.run.seed,
            recompute=blueprint.config.model.recompute,
            lowest_trained=blueprint.state.lowest_trained,
        ),
        all_layers(blueprint, None),
        {},
        inputs=microbatches.inputs,
    )
    compute.begin(_FIRST.step, ())
    inputs, targets = microbatches.get(_FIRST.step, _FIRST.microbatch, train=True)
    compute.forward(range(compute.num_layers), _FIRST.microbatch, inputs, targets, keeps=False)
    return compute.losses[_FIRST.microbatch]


def _own_memory_bytes() -> int:
    """Reads how much memory this process has, without what are pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def _text_of(pair: tuple[Any, Any]) -> str:
    """Describes type, shape and mean of some tensors."""
    leaves = [leaf for value in pair for leaf in flatten(value)[1] if not leaf.is_complex()]
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)} of mean {leaf.double().mean().item():.9g}"
        for leaf in leaves[:4]
    )


# ------------------------------------------------------------------------------------------- in the script's process


def repeat(rehearsal: Rehearsal, there: Sequence[Finding], not_taken: Sequence[str]) -> str:
    """Repeats in the script's process what a process of the job has found, in its order and no further.

    Args:
        rehearsal: of this process.
        there: what the other one has found.
        not_taken: values that a fresh forkserver could not take over, for the message.
    Returns:
        What could not be compared, and why; "" if all was.
    Raises:
        UsageError: something differs; with both values.
    """
    _check_made_again(there)
    skipped = [finding for finding in there if finding.what in (FIRST_BATCH, FIRST_LOSS) and not finding.value]
    if not any(finding.what == FIRST_BATCH for finding in skipped):
        try:
            _repeat_all(rehearsal, there, not_taken)
        except UsageError:
            if len(os.listdir("/proc/self/task")) == 1:
                raise
            _repeat_all(rehearsal, there, not_taken)  # another thread may have drawn from the same generators
        except StoppedBySignalError:
            raise
        except Exception as error:  # of code that runs in the other process, but not here
            text = str(error) if isinstance(error, LayerError | UserDataError) else said(error)
            return f"what this process computes could not be compared with the job's processes: {text}"
    return "; ".join(
        f"{finding.what} was not compared between this process and the job's: {finding.text}" for finding in skipped
    )


def _repeat_all(rehearsal: Rehearsal, there: Sequence[Finding], not_taken: Sequence[str]) -> None:
    until_s = time.monotonic() + HASHES_S_MAX
    samples = [finding for finding in there if finding.what not in (AGAIN, FIRST_LOSS)]
    losses = [finding for finding in there if finding.what == FIRST_LOSS and finding.value]
    with as_in_a_worker(), _silent(), interruptible():
        for expected, here in zip(samples, rehearsal.data(), strict=False):
            _check_equal(expected, here, not_taken)
            if time.monotonic() > until_s:
                break
        for expected in losses:
            _check_equal(expected, rehearsal.loss() or expected, not_taken)


def _check_made_again(there: Sequence[Finding]) -> None:
    """Refuses samples that depend on which were made before: each worker makes others.

    Raises:
        UsageError: with both values.
    """
    first, again = (next((each for each in there if each.what == what), None) for what in (FIRST_BATCH, AGAIN))
    if first is None or again is None or first.value in ("", again.value):
        return
    raise UsageError(
        f"{FIRST_BATCH} is {first.text} ({first.value}) at first and {again.text} ({again.value}) when it is made "
        "again in the same process. A sample must be the same whichever were made before, since any worker may make "
        "it, at any time: the dataset, or collate, depends on a generator of its own, a count of calls or the time. "
        "Draw from torch's, numpy's or Python's generator, which are seeded before each sample, or make a generator "
        "from them in __getitem__"
    )


def _check_equal(there: Finding, here: Finding, not_taken: Sequence[str]) -> None:
    """Refuses what differs.

    Raises:
        UsageError: with both values.
    """
    if (there.what, there.value) == (here.what, here.value):
        return
    suspects = f"; these values could not be taken over from it: {', '.join(not_taken[:5])}" if not_taken else ""
    seen = [f"{each.text} ({each.value})" if each.text else each.value for each in (here, there)]
    raise UsageError(
        f"{there.what} is {seen[0]} in the script's process and {seen[1]} in the job's processes{suspects}. The "
        "dataset, a layer or the loss depends on something that is not the same in both: a setting that was changed in "
        "a module or a library, the number of the process, a generator of its own, the time. Give it to what uses it "
        "as an argument, or have it read from a file or from the environment"
    )


@contextlib.contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Sets one thread, as in every worker; leaves the script's generators as they were, and no server of a foreign
    part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with generators_kept(), _blas_of_one_thread():
            yield
    finally:
        torch.set_num_threads(threads)
        close_all()


@contextlib.contextmanager
def _blas_of_one_thread() -> Iterator[None]:
    """numpy's library of matrices has threads of its own, and may add in another order with them."""
    with contextlib.ExitStack() as stack:
        for library, get, set_ in _libraries_of_matrices():
            stack.callback(getattr(library, set_), getattr(library, get)())
            getattr(library, set_)(1)
        yield


def _libraries_of_matrices() -> list[tuple[ctypes.CDLL, str, str]]:
    """Finds OpenBLAS, as often as it is loaded, with the names of what gets and sets its number of threads."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if "openblas" in line and "/" in line})
    return [
        (library, get, set_)
        for library in map(ctypes.CDLL, filter(os.path.exists, paths))
        for get, set_ in _BLAS_THREADS
        if hasattr(library, get) and hasattr(library, set_)
    ]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What the script's code prints and warns of stands in the other process's log already."""
    nothing = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A signal that ends the script, which may come while a layer or the dataset runs, ends it as itself."""
    try:
        yield
    except (LayerError, UserDataError) as error:
        if isinstance(error.__cause__, SIGNALS):
            raise error.__cause__ from None
        raise
