"""Jobs of several hosts for tests: agents as processes of their own, each with its own temporary folder and session."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.children import with_parent
from tests.signals import hear_signals

from elaswave.job.keys import KeyRole, write_role_key
from elaswave.observability.processes import facts_of

OF_TORCH = ("torchinductor_", "torchelastic_")
"""Folders that torch's compiler, and torchrun, leave."""
WAIT_S = 200.0
"""Bound of every wait; on an idle machine nothing takes a tenth of it."""


class AgentProcess:
    """`elaswave agent` of one host.

    Args:
        folder: for its output and its temporary files.
        command: the whole command line.
        environment: of the process.
    """

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._output = folder / "output.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(self._temporary)},
                start_new_session=True,
                preexec_fn=hear_signals,
            )

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self._output.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """To the agent alone, and none of its processes."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._agent_pid(), number)

    def _agent_pid(self) -> int:
        """Of the agent itself: nsenter, which puts it on its host, waits for it and passes no signal on."""
        pid = self.process.pid
        while Path(f"/proc/{pid}/comm").read_text().strip() == "nsenter":
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not children:
                break
            pid = int(children[0])
        return pid

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Waits for its end; returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent goes on:\n{self.text}") from None

    def left(self) -> list[str]:
        """Processes that are left of it once it has ended, and files, unless it was killed."""
        session = [name for name in os.listdir("/proc") if name.isdecimal() and _session_of(int(name)) == self.pid]
        files = [name for name in os.listdir(self._temporary) if not name.startswith(OF_TORCH)]
        return session + (files if self.process.returncode != -signal.SIGKILL else [])

    @property
    def pid(self) -> int:
        """Its process id, which is its session's too."""
        return self.process.pid


class Agents:
    """The agents of one job; use as a context: at its end none of them is left.

    Args:
        folder: for everything; the run folder, which all hosts share, is in it.
        settings: of the configuration, by dotted key; given to agents that are not told to find them out.
        coordinator: ``HOST:PORT``.
        run_dir: that of an earlier job; None: a new one.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], coordinator: str, run_dir: Path | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.run_dir = run_dir or folder / "run"
        self._folder = folder
        self._settings = [word for key, value in settings.items() for word in ("--set", f"{key}={_toml(value)}")]
        self._coordinator = coordinator
        self._started: list[AgentProcess] = []
        key = folder / "job.key"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write("5a" * 32)
        write_role_key(folder, KeyRole.JOINING)
        self._environment = dict(os.environ)

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self._started:
            agent.signal(signal.SIGKILL)
            agent.process.send_signal(signal.SIGCONT)  # nsenter stops itself with its child
            agent.process.wait()
        deadline_s = time.monotonic() + 20.0
        while (left := [agent.left() for agent in self._started if agent.left()]) and time.monotonic() < deadline_s:
            time.sleep(0.05)  # processes of one that was killed end with it, but not in the same instant
        if exception[0] is not None:
            for agent in self._started:
                print(agent.text)
        assert not left, f"left behind: {left}"

    def start(
        self,
        node: str,
        *options: str,
        creates_job: bool = False,
        before: Sequence[str] = (),
        launcher: Sequence[str] = (sys.executable, "-m", "elaswave", "agent"),
        coordinator: str | None = None,
        joins: bool = False,
    ) -> AgentProcess:
        """Starts the agent of a host.

        Args:
            node: its name.
            options: of the command.
            creates: give it the configuration and the run folder.
            before: words before the command, that put it on its host.
            launcher: the command's first words.
            coordinator: as of the class.
        """
        command = [*before, *launcher, "--job", "test", "--node-name", node]
        command += ["--coordinator", coordinator or self._coordinator, *options]
        if creates_job:
            command += ["--run-dir", str(self.run_dir), *self._settings]
        folder = self._folder / f"{node}-{len(self._started)}"
        key = self._folder / ("joining.key" if joins else "job.key")
        agent = AgentProcess(folder, command, {**self._environment, "ELASWAVE_KEY_FILE": str(key)})
        self._started.append(agent)
        return agent

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind of the run, as they stand in its log."""
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["kind"] == kind]

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is committed."""
        self.wait_for(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}")

    def wait_for(self, what: Callable[[], Any], name: str) -> Any:
        """Waits until something is true; returns it."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            found = what()
            if found:
                return found
            ended = [agent for agent in self._started if agent.process.poll() not in (None, 0, 75, -signal.SIGKILL)]
            assert not ended, f"an agent has ended while {name} was waited for"
            time.sleep(0.05)
        raise AssertionError(f"{name} never came")


def free_port() -> int:
    """A port that nobody has, and the system will not soon give to anybody."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _session_of(pid: int) -> int:
    """The session of a process; -1 if it has ended. On a host of tests nobody reaps an orphan."""
    facts = facts_of(pid)
    try:
        return -1 if facts is None or facts.state == "Z" else os.getsid(pid)
    except OSError:
        return -1


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
