"""Hosts for tests: namespaces of the kernel, joined by a switch. Needs root, and util-linux and iproute2.

A host has its own network, its own process table and its own monotonic clock, which shows another time than every other
host's. Ending its first process ends all of them at once. A cable that is pulled is silence: nobody is told anything.
Nothing of it has a name outside, so nothing of it outlives the processes that hold it.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

CLOCK_STEP_S = 100_000
"""Between the monotonic clocks of two hosts."""
_START_S = 10.0


def lacking() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces: needs root"
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"hosts are namespaces: needs {', '.join(missing)} (util-linux, iproute2)"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--time", "--monotonic", "1", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"hosts are namespaces, which are refused here: {trial.stderr.strip()}" if trial.returncode else ""


class _Namespaces:
    """A process that holds namespaces, as the first of its process table."""

    def __init__(self, *kinds: str) -> None:
        command = ["unshare", *kinds, "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        self._holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline_s = time.monotonic() + _START_S
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        while not (found := children.read_text().split()) or not _is_sleep(int(found[0])):
            assert time.monotonic() < deadline_s and self._holder.poll() is None, "the namespaces were not made"
            time.sleep(0.005)
        self.first = int(found[0])

    def enter(self, *kinds: str) -> list[str]:
        """Words before a command that is to run inside."""
        return ["nsenter", "-t", str(self.first), *kinds, "--"]

    def end(self) -> None:
        """Kills all processes inside."""
        if self._holder.poll() is None:
            self._holder.kill()
        self._holder.wait()


class Host:
    """A host on the switch.

    Args:
        number: from 1; its address is 10.77.0.<number>.
        switch: the switch's namespaces.
    """

    def __init__(self, number: int, switch: _Namespaces) -> None:
        self.address = f"10.77.0.{number}"
        self._switch = switch
        self._port = f"port{number}"
        clock = ("--time", "--monotonic", str(number * CLOCK_STEP_S))
        self._namespaces = _Namespaces("--net", "--mount", *clock)
        first = str(self._namespaces.first)
        link = ["type", "veth", "peer", "name", self._port, "netns", str(switch.first)]
        _run("ip", "link", "add", "eth0", "netns", first, *link)
        self._inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "link", "set", "eth0", "up")
        self._at_switch("ip", "link", "set", self._port, "master", "br0", "up")

    def enter(self) -> list[str]:
        """Words before a command that is to run on the host."""
        return self._namespaces.enter("-n", "-m", "-p", "-T")

    def kill(self) -> None:
        """All of its processes, in one instant; its kernel lives, and closes their connections."""
        self._namespaces.end()

    def cut(self) -> None:
        """Pulls its cable: nothing goes in or out any more, and nobody is told."""
        self._at_switch("ip", "link", "set", self._port, "down")

    def heal(self) -> None:
        """Puts its cable back."""
        self._at_switch("ip", "link", "set", self._port, "up")

    def _inside(self, *command: str) -> None:
        _run(*self._namespaces.enter("-n"), *command)

    def _at_switch(self, *command: str) -> None:
        _run(*self._switch.enter("-n"), *command)


class World:
    """Hosts on one switch; use as a context.

    Args:
        num_hosts: how many.
    """

    def __init__(self, num_hosts: int) -> None:
        self._switch = _Namespaces("--net")
        self.hosts: list[Host] = []
        try:
            _run(*self._switch.enter("-n"), "ip", "link", "add", "br0", "type", "bridge")
            _run(*self._switch.enter("-n"), "ip", "link", "set", "br0", "up")
            for number in range(1, num_hosts + 1):
                self.hosts.append(Host(number, self._switch))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> list[Host]:
        return self.hosts

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        for host in self.hosts:
            host.kill()
        self._switch.end()


def children_of(pid: int) -> Iterable[int]:
    """The processes that a process has started."""
    return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _is_sleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
