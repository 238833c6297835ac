"""The ``elaswave`` command: finds the verb, and turns every way in which it can end into an exit code.

0 success, 1 failure or difference found, 2 bad input, 75 worth another try (agents), 128 + signal for signals (129
SIGHUP, 130 Ctrl-C, 138 SIGUSR1, 140 SIGUSR2, 143 SIGTERM). An error that elaswave raises on purpose is printed once on
standard error, without a traceback of this process; any other is a bug of ours and shows its traceback. With ``--json``
standard output is one JSON document also when the command fails.
"""

import contextlib
import errno
import io
import logging
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import click

from elaswave._version import __version__
from elaswave.api.environment import begin_with_fixed_hashes, use_one_thread
from elaswave.cli.groups import LazyGroup
from elaswave.config.values import path_problem
from elaswave.errors import (
    ConfigError,
    ElaswaveError,
    EndedBySignal,
    RetryError,
    StoppedBySignalError,
    UsageError,
    WorkerError,
)
from elaswave.observability.output import VisibleLines, lead_elsewhere, open_closed_streams, say_error, say_json, wrap

EXIT_SUCCESS = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h, by which launchers know that a command is worth another try."""
EXIT_SIGNAL_BASE = 128

COMMANDS = {
    "demo": "elaswave.cli.demo:demo_command",
    "train": "elaswave.cli.train:train_command",
    "run": "elaswave.cli.run:run_command",
    "agent": "elaswave.cli.agent:agent_command",
    "ctl": "elaswave.cli.ctl:ctl_group",
    "inspect": "elaswave.cli.inspect:inspect_group",
    "export": "elaswave.cli.export:export_command",
    "plan": "elaswave.cli.whatif.plan:plan_command",
    "simulate": "elaswave.cli.whatif.simulate:simulate_command",
    "compare": "elaswave.cli.whatif.compare:compare_command",
    "data": "elaswave.cli.data:data_group",
    "keys": "elaswave.cli.keys:keys_group",
    "probe": "elaswave.cli.probe:probe_command",
}
"""Where each verb stands; imported when it is asked for."""

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Tab completion, in bash: eval "$(_ELASWAVE_COMPLETE=bash_source elaswave)"; zsh_source and fish_source do '
    "the same for these shells.",
)
@click.version_option(__version__, prog_name="elaswave", message="%(prog)s %(version)s")
def cli() -> None:
    """Elastic training of PyTorch models that computes the same bits whatever happens to its machines.

    \b
    elaswave demo              kill workers of a job and see that no bit changes
    elaswave train             train a small GPT on Python's own documentation
    elaswave run SCRIPT.py     run a script that trains its own model
    elaswave COMMAND --help    what a command does, with examples
    """


def main(arguments: Sequence[str] | None = None, *, program: click.Group = cli, name: str = "elaswave") -> int:
    """Runs one command line.

    Args:
        arguments: without the program's name; the process's own if None.
        program: whose commands these are.
        name: how the program is called.
    Returns:
        The exit code.
    """
    open_closed_streams()
    own = sys.argv[1:]
    if arguments is None and program is cli and own[:1] == ["run"]:
        begin_with_fixed_hashes()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleLines())
    use_one_thread()  # before any module of a command is imported
    try:
        code = _run(own if arguments is None else list(arguments), program, name)
        if arguments is None and code > EXIT_SIGNAL_BASE:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more must not change how the command ends
        return code
    except OSError as error:
        refusal = _refusal(error)
        if refusal is None:
            raise  # a bug of ours: code that opens a file says what its errors mean
        say_error(f"error: {refusal}")
        return EXIT_FAILURE


def _refusal(error: OSError) -> str | None:
    """Makes the text that a person is told of an error of the system alone; None for any other error."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"too many files are open ({reason}): raise the limit (ulimit -n) and start again"
    if _was_printing(error):
        lead_elsewhere(sys.stdout, None)
        return f"standard output cannot be written ({reason}): make room for it, or send it elsewhere"
    return None


def _was_printing(error: OSError) -> bool:
    """Tells whether an error comes from printing a command's own output."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code is not click.echo.__code__:
        at = at.tb_next
    return at is not None


def _run(arguments: list[str], program: click.Group, name: str) -> int:
    as_json = "--json" in arguments[: _options_end(arguments)]
    try:
        _refuse_undecodable(arguments[: _options_end(arguments) + 1])
        with _signals_raise():
            result = program.main(arguments, prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else EXIT_SUCCESS
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        say_error(_wrapped(shown.getvalue().rstrip()))
        return _failed(error, error.format_message(), error.exit_code, as_json)
    except (click.Abort, KeyboardInterrupt):
        say_error("interrupted")
        return EXIT_SIGNAL_BASE + signal.SIGINT
    except SystemExit as error:
        return _exit_code(error)
    except ElaswaveError as error:
        _tell(error)
        return _failed(error, str(error), _code_of(error), as_json)


def _refuse_undecodable(arguments: Sequence[str]) -> None:
    """Refuses arguments that are no text; those of a script are its own.

    Raises:
        UsageError: names the first one.
    """
    for problem in filter(None, map(path_problem, arguments)):
        raise UsageError(problem)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """While inside, a signal that ends the process unwinds it instead, so that everything is cleaned up."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(EXIT_SIGNAL_BASE + number)

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; a caller in another one has its own.
        yield
        return
    # What is ignored stays ignored: that is how nohup works.
    previous = {number: signal.getsignal(number) for number in _ENDING_SIGNALS}
    handled = [number for number, handler in previous.items() if handler == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def _options_end(arguments: Sequence[str]) -> int:
    """Counts how many arguments may be options of ours: what follows the script of ``elaswave run`` is the script's."""
    if arguments[:1] != ["run"]:
        return len(arguments)
    scripts = (index for index, argument in enumerate(arguments) if argument.endswith(".py"))
    return next(scripts, len(arguments))


def _code_of(error: ElaswaveError) -> int:
    if isinstance(error, StoppedBySignalError):
        return EXIT_SIGNAL_BASE + error.signal_number
    if isinstance(error, RetryError):
        return EXIT_AGAIN
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return EXIT_SUCCESS
    if isinstance(error.code, int):
        return error.code
    say_error(str(error.code))
    return EXIT_FAILURE


def _tell(error: ElaswaveError) -> None:
    """Prints an error for people."""
    if isinstance(error, WorkerError) and error.traceback_text:
        say_error(error.traceback_text.rstrip())
    if isinstance(error, StoppedBySignalError):
        text = str(error)
    elif isinstance(error, ConfigError) and len(error.problems) > 1:
        text = f"error: {len(error.problems)} problems:\n" + "\n".join(f"  {problem}" for problem in error.problems)
    else:
        text = f"error: {error}"
    say_error(_wrapped(text))


def _wrapped(text: str) -> str:
    """Formats a text as standard error takes it: wrapped between words where that is a terminal."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line for paragraph in text.splitlines() for line in wrap(paragraph, width) or [""])


def _failed(error: Exception, message: str, code: int, as_json: bool) -> int:
    if as_json:
        document: dict[str, Any] = {"error": type(error).__name__, "message": message, "exit_code": code}
        if isinstance(error, ConfigError):
            document["problems"] = error.problems
        say_json(document)
    return code
