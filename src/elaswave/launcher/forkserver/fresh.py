"""The forkserver in a fresh interpreter, for a script's process that has threads or a GPU's state and must not fork.

What a fork would have inherited is sent: where modules are looked for, what the script has set in modules
(`elaswave.launcher.forkserver.module_state`), settings of the interpreter, of torch and of the processor that change
results, and then the training by cloudpickle (functions and classes of the script itself by value, all else by the name
of its module).

Objects of a script as bytes, functions and classes by value, with the names of the files that they stand in.

cloudpickle leaves those names out from 3.1.3 on, and a traceback could then show no line of the script. absl's flags
refuse to be pickled: here `FLAGS` is the one of the other side, whose flags `elaswave.launcher.forkserver.module_state`
sets.
"""

import contextlib
import copyreg
import decimal
import io
import locale
import os
import pickle
import socket
import sys
import traceback
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import cloudpickle
import numpy

from elaswave.errors import LaunchError, UsageError
from elaswave.job.script import open_descriptors, read_files
from elaswave.launcher.forkserver.messages import ForkServerSetup, Unprepared, framed, pack_message, read_framed
from elaswave.launcher.forkserver.module_state import ModuleState, TakenOver, states_of_modules
from elaswave.launcher.forkserver.server import run_forkserver
from elaswave.system.processes import (
    Child,
    DeathWatch,
    end_with_parent,
    leave_signals_to_launcher,
    redirect_output,
    refused,
)
from elaswave.training.raised import said

_LINK_FD = 3
_HASH_SEED = "PYTHONHASHSEED"
_HASHED = "elaswave"
"""A text whose hash tells whether two processes order sets of texts alike."""
_OTHER_HASHES = (
    "a new Python has other hashes than this process, though PYTHONHASHSEED is set, so sets of texts would have "
    "another order in the workers: start this process with PYTHONHASHSEED=0, and without Python's option -R"
)


class _Ground(NamedTuple):
    """What the interpreter gets before it reads the training, whose classes may look at it."""

    arguments: list[str]
    settings: dict[str, Any]
    modules: dict[str, ModuleState]


class _Handed(NamedTuple):
    """What the interpreter gets then."""

    setup: ForkServerSetup
    """Without the watch for deaths, whose memory it makes itself: it forks all that share it."""
    classes: dict[str, Any]
    """The script's own named tuples, by name."""


def pickled_setup(setup: ForkServerSetup) -> bytes:
    """Pickles what a fresh forkserver is started with, as it lies in its socket.

    Args:
        setup: the job's `deaths` are left out.
    Raises:
        UsageError: a part of the training cannot be pickled; says which.
    """

    ground = _Ground(list(sys.argv), current_settings(), states_of_modules())
    sent = _Handed(setup._replace(job=setup.job._replace(deaths=None), commits=None), _named_tuples_of_script())
    try:
        return framed(pickle.dumps(ground)) + framed(dumps(sent))
    except Exception as error:
        raise UsageError(
            f"{_culprit(setup.training)} cannot be sent to the processes of the job: {said(error)}. "
            "This process has more than one thread, or a GPU's state, so it cannot be forked and what is trained is "
            "pickled: leave locks, generators and connections out of it, or make them when they are first used"
        ) from error


def spawn(log: Path, link: socket.socket, environment: Mapping[str, str]) -> Child:
    """Starts the interpreter. It waits for `pickled_setup` on its end of the link.

    Args:
        log: takes its output.
        link: its end.
        environment: of the process. Where it gives the seed of Python's hashes, the process must have this one's.
    Raises:
        LaunchError: there is no interpreter to start, or the system refuses a process.
    """
    if not sys.executable:
        raise LaunchError("this process does not know which Python runs it (sys.executable is empty): set it")
    is_seeded = environment.get(_HASH_SEED, "random") != "random"
    probe = hash(_HASHED) if is_seeded else None
    # One that was drawn at random is no other process's: then workers of one script have one order at least.
    environment = environment if is_seeded else {**environment, _HASH_SEED: "0"}
    code = (
        f"import sys; sys.path[:] = {_module_folders()!r}; "
        "from elaswave.launcher.forkserver.fresh import serve_parent; "
        f"sys.exit(serve_parent({os.getpid()}, {str(log)!r}, {probe}))"
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_DUP2, link.fileno(), _LINK_FD),
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        command = [sys.executable, *["-O"] * sys.flags.optimize, "-c", code]  # without its assertions, as here
        return Child(os.posix_spawn(sys.executable, command, environment, file_actions=actions))
    except OSError as error:
        raise refused(
            error,
            f"a Python for the forkserver ({sys.executable}) cannot be started",
            "raise the limit of processes (ulimit -u, or the container's), or free memory",
        ) from error


def serve_parent(parent: int, log: str, probe: int | None) -> int:
    """Runs the whole life of the interpreter.

    Args:
        parent: process id of the launcher.
        log: path of the file that takes the output.
        probe: the hash that a text must have; None: any.
    Returns:
        Exit status.
    """
    end_with_parent(parent)
    leave_signals_to_launcher()
    redirect_output(Path(log))
    link = socket.socket(fileno=_LINK_FD)
    if probe not in (None, hash(_HASHED)):
        link.sendall(pack_message(Unprepared(text=_OTHER_HASHES, is_usage=True)))
        return 1
    try:
        ours = open_descriptors()
        ground: _Ground = pickle.loads(read_framed(link))
        sys.argv[:] = ground.arguments
        apply_settings(ground.settings)
        taken = TakenOver(ground.modules)
        taken.install()
        sent: _Handed = pickle.loads(read_framed(link))
        vars(sys.modules["__main__"]).update(sent.classes)
        opened = read_files(ours)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            link.sendall(pack_message(Unprepared(text=f"what the script trains cannot be loaded: {said(error)}")))
        return 1
    setup = sent.setup._replace(job=sent.setup.job._replace(deaths=DeathWatch()))
    return run_forkserver(setup._replace(read_files=opened, not_taken=taken.left), link)


def _module_folders() -> list[str]:
    """Lists where this process looks for modules, from any working directory; elaswave's own place in any case."""
    folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    own = str(Path(__file__).resolve().parents[2])
    return folders if own in folders else [*folders, own]


def _named_tuples_of_script() -> dict[str, Any]:
    """Finds the classes of named tuples at the top of the script or notebook. Its layers bring them by value, but a
    value that travels names them (`elaswave.engine.checks.values`): so the same objects must stand in the other
    interpreter's ``__main__`` as well."""

    found = {}
    for name, kind in vars(sys.modules["__main__"]).items():
        is_named_tuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
        if is_named_tuple and (kind.__module__, kind.__qualname__) == ("__main__", name):
            with contextlib.suppress(Exception):  # one that no layer uses does no harm; else the layer is named
                dumps(kind)
                found[name] = kind
    return found


class _Setting(NamedTuple):
    """One setting that a fork would inherit and that may change results."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def _of(label: str, holder: Any, *names: str) -> dict[str, _Setting]:
    """Settings that are attributes."""
    return {
        f"{label}.{name}": _Setting(partial(getattr, holder, name), partial(setattr, holder, name)) for name in names
    }


def _settings() -> dict[str, _Setting]:
    """Lists the settings in the order in which they are set: torch's newer names say the same as older ones, once more
    finely."""
    import torch  # a script's process has loaded it

    backends, cuda = torch.backends, torch.backends.cuda
    are_deterministic = torch.are_deterministic_algorithms_enabled
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled
    return {
        "recursion": _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
        "locale": _Setting(partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
        "decimal": _Setting(lambda: decimal.getcontext().copy(), decimal.setcontext),
        "numpy errors": _Setting(numpy.geterr, lambda value: numpy.seterr(**value)),
        "denormals": _Setting(flushes_denormals, torch.set_flush_denormal),
        "type": _Setting(torch.get_default_dtype, torch.set_default_dtype),
        "device": _Setting(torch.get_default_device, torch.set_default_device),
        "deterministic": _Setting(
            lambda: (are_deterministic(), warns_only()),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        **_of("deterministic", torch.utils.deterministic, "fill_uninitialized_memory"),
        "anomalies": _Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        "autocast": _Setting(
            lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")), _set_autocast
        ),
        "autocast cache": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "matmul_precision": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        **_of("mkldnn", backends.mkldnn, "enabled", "deterministic", "fp32_precision"),
        **_of("mkldnn.matmul", backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
        **_of("mkldnn.conv", backends.mkldnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
        **_of("mkldnn.rnn", backends.mkldnn.rnn, "fp32_precision"),  # type: ignore[attr-defined]
        **_of("cudnn", backends.cudnn, "enabled", "benchmark", "deterministic", "allow_tf32"),
        **_of(
            "cuda",
            cuda.matmul,
            "allow_tf32",
            *(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
        ),
        **_of("einsum", backends.opt_einsum, "enabled", "strategy"),
        "attention, fast": _Setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
        "attention, flash": _Setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "attention, efficient": _Setting(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "attention, plain": _Setting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }


def flushes_denormals() -> bool:
    """Tells whether this thread's processor takes results that are too small for zeros: torch can set that, but not
    tell. Threads and processes begin with the state of the one that has started them."""
    return sys.float_info.min * float("0.5") == 0.0  # not known when this is compiled


def _set_autocast(value: tuple[bool, Any]) -> None:
    import torch

    torch.set_autocast_enabled("cpu", value[0])
    torch.set_autocast_dtype("cpu", value[1])


def current_settings() -> dict[str, Any]:
    """Reads what this thread and process have set, by name; None of what cannot be told."""
    return {name: _told(setting) for name, setting in _settings().items()}


def _told(setting: _Setting) -> Any:
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # of old and new names of a setting that contradict each other; torch may raise
        return setting.get()


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Sets what is not so already.

    Args:
        settings: of `current_settings`, elsewhere.
    """
    for name, setting in _settings().items():
        if settings[name] is not None and _told(setting) != settings[name]:
            setting.set(settings[name])


def _culprit(training: Any) -> str:
    """Finds the part of a training that cannot be pickled, as a person knows it."""

    for name, part in _parts(training):
        try:
            dumps(part)
        except Exception:
            return name
    return "what the script trains"


def _parts(training: Any) -> Iterator[tuple[str, Any]]:
    for layer in training.model.layers:
        yield f"layer {layer.name}", layer
    yield "the loss", training.model.loss
    yield "the dataset (or collate)", training.open_samples
    yield "the optimizer", training.make_optimizer


def dumps(value: Any) -> bytes:
    """Does the same as `cloudpickle.dumps`; the result is to be read by `pickle.loads`.

    Raises:
        Exception: what cloudpickle raises for something that cannot be pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _code_reduced(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    make, arguments = _REDUCE(code)
    return _code_of_file, (code.co_filename, make, arguments)


def _code_of_file(name: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


_REDUCE = cast(
    Callable[[types.CodeType], tuple[Callable[..., types.CodeType], tuple[Any, ...]]],
    cloudpickle.Pickler.dispatch_table[types.CodeType],
)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _absl_reduced(value) or _bits_reduced(value) or super().reducer_override(value)

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _code_reduced}, cloudpickle.Pickler.dispatch_table)


def _absl_reduced(value: Any) -> Any:
    """Tells how one of absl's flags travels; None of anything else."""
    absl = sys.modules.get("absl.flags")
    if absl is None:
        return None
    if value is absl.FLAGS:
        return getattr, (absl, "FLAGS")
    if issubclass(type(value), absl.Flag | absl.FlagHolder):
        return copyreg.__newobj__, (type(value),), dict(vars(value))  # type: ignore[attr-defined]
    return None


def _bits_reduced(value: Any) -> Any:
    """Tells how a tensor of eight-bit floating point travels: torch's own way of pickling it cannot be read back.
    Returns None of anything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or value.layout is not torch.strided:
        return None
    if not value.dtype.is_floating_point or value.dtype.itemsize > 1:
        return None
    return _of_bits, (value.detach().view(torch.uint8), str(value.dtype).removeprefix("torch."), value.requires_grad)


def _of_bits(bits: Any, dtype: str, requires_grad: bool) -> Any:
    import torch  # where there are such tensors, it is there

    return bits.view(getattr(torch, dtype)).requires_grad_(requires_grad)
