"""Scripts as processes of their own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.signals import hear_signals

ROOT = Path(__file__).resolve().parents[2]
RUN = (sys.executable, "-c", "import sys; from elaswave.cli.main import main; sys.exit(main())", "run")


@contextlib.contextmanager
def script(tmp_path: Path, text: str) -> Iterator[Path]:
    path = tmp_path / "train.py"
    path.write_text(text)
    yield path


VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def as_a_person_has_it() -> dict[str, str]:
    """The environment without what the tests export, and without a seed of hashes."""
    ours = (*VARIABLES, "PYTHONHASHSEED")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONPATH": str(ROOT / "src")}


def run(
    tmp_path: Path, *command: str, threads: int = 1, timeout_s: float = 120.0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder; what it starts must have ended with it."""
    if environment is None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **dict.fromkeys(VARIABLES, str(threads))}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=hear_signals,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=timeout_s)
    finally:
        left = members(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not left, f"left behind: {left}\n{errors}"
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(path.parent.name))
    return found
