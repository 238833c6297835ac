"""The template in a fresh interpreter, for a script's process that has threads or a GPU's state and must not fork.

What a fork would have inherited is sent: the training by cloudpickle (functions and classes of the script itself by
value, all else by the name of its module), where modules are looked for, and torch's settings that change results.
"""

import contextlib
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from elaswave.control.death_watch import DeathWatch
from elaswave.control.forking import Child, leave_signals_to_launcher, redirect_output
from elaswave.control.job_folder import refused
from elaswave.control.parent_death import end_with_parent
from elaswave.control.read_files import open_descriptors, read_files
from elaswave.control.template import TemplateSetup, run_template
from elaswave.control.template_messages import Unprepared, framed, pack, read_framed
from elaswave.errors import LaunchError, UsageError
from elaswave.training.raised import said

_LINK_FD = 3


class _Handed(NamedTuple):
    """What the interpreter gets."""

    setup: TemplateSetup
    """Without the watch for deaths, whose memory it makes itself: it forks all that share it."""
    settings: dict[str, Any]
    classes: dict[str, Any]
    """The script's own named tuples, by name."""


def pickled_setup(setup: TemplateSetup) -> bytes:
    """What a fresh template is started with, as it lies in its socket.

    Args:
        setup: its `deaths` are left out.
    Raises:
        UsageError: a part of the training cannot be pickled; says which.
    """
    from elaswave.control.by_value import dumps  # late: a launcher that forks its template needs no cloudpickle

    sent = _Handed(setup._replace(deaths=None, commits=None), _torch_settings(), _named_tuples_of_script())
    try:
        return framed(dumps(sent))
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
        environment: of the process.
    Raises:
        LaunchError: there is no interpreter to start, or the system refuses a process.
    """
    if not sys.executable:
        raise LaunchError("this process does not know which Python runs it (sys.executable is empty): set it")
    code = (
        f"import sys; sys.path[:] = {_module_folders()!r}; "
        f"from elaswave.control.fresh_template import main; sys.exit(main({os.getpid()}, {str(log)!r}))"
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_DUP2, link.fileno(), _LINK_FD),
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        return Child(os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment, file_actions=actions))
    except OSError as error:
        raise refused(
            error,
            f"a Python for the template ({sys.executable}) cannot be started",
            "raise the limit of processes (ulimit -u, or the container's), or free memory",
        ) from error


def main(parent: int, log: str) -> int:
    """The whole life of the interpreter.

    Args:
        parent: process id of the launcher.
        log: path of the file that takes the output.
    Returns:
        Exit status.
    """
    end_with_parent(parent)
    leave_signals_to_launcher()
    redirect_output(Path(log))
    link = socket.socket(fileno=_LINK_FD)
    try:
        ours = open_descriptors()
        sent: _Handed = pickle.loads(read_framed(link))
        _apply_torch_settings(sent.settings)
        vars(sys.modules["__main__"]).update(sent.classes)
        opened = read_files(ours)
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            link.sendall(pack(Unprepared(text=f"what the script trains cannot be loaded: {said(error)}")))
        return 1
    deaths = DeathWatch()
    return run_template(sent.setup._replace(deaths=deaths, read_files=opened), link)


def _module_folders() -> list[str]:
    """Where this process looks for modules, from any working directory; elaswave's own place in any case."""
    folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    own = str(Path(__file__).resolve().parents[2])
    return folders if own in folders else [*folders, own]


def _named_tuples_of_script() -> dict[str, Any]:
    """The classes of named tuples at the top of the script or notebook. Its layers bring them by value, but a value
    that travels names them (`elaswave.worker.values`): so the same objects must stand in the other interpreter's
    ``__main__`` as well."""
    from elaswave.control.by_value import dumps

    found = {}
    for name, kind in vars(sys.modules["__main__"]).items():
        is_named_tuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
        if is_named_tuple and (kind.__module__, kind.__qualname__) == ("__main__", name):
            with contextlib.suppress(Exception):  # one that no layer uses does no harm; else the layer is named
                dumps(kind)
                found[name] = kind
    return found


def _torch_settings() -> dict[str, Any]:
    """What a script may have set in torch and a fork would inherit, as far as it changes results."""
    import torch  # a script's process has loaded it

    return {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def _apply_torch_settings(settings: Mapping[str, Any]) -> None:
    import torch

    torch.set_default_dtype(settings["default_dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["deterministic_warn_only"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.backends.mkldnn.enabled = settings["mkldnn"]


def _culprit(training: Any) -> str:
    """The part of a training that cannot be pickled, as a person knows it."""
    from elaswave.control.by_value import dumps

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
