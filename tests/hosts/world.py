"""Hosts for tests: namespaces of the kernel, and a network between them. Needs root, util-linux and iproute2.

A host has its own network, its own process table, its own view of folders and its own monotonic clock, which shows
another time than every other host's. Ending its first process ends all of them at once. The network is a relay
(`tests.hosts.relay`): what is cut is silent, and nobody is told anything. Nothing of it has a name outside, so nothing
of it outlives the processes that hold it.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.children import with_parent
from tests.hosts.relay import MTU_BYTES, Relay, Wire, open_tun

CLOCK_STEP_S = 100_000
"""Between the monotonic clocks of two hosts."""
_START_S = 10.0


def lacking() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces: needs root"
    missing = [name for name in ("unshare", "nsenter", "setpriv", "ip", "mount") if shutil.which(name) is None]
    if missing:
        return f"hosts are namespaces: needs {', '.join(missing)} (util-linux, iproute2)"
    if not Path("/dev/net/tun").exists():
        return "hosts are joined by TUN devices: needs /dev/net/tun"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--time", "--monotonic", "1", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"hosts are namespaces, which are refused here: {trial.stderr.strip()}" if trial.returncode else ""


class Namespaces:
    """A process that holds namespaces, as the first of its process table."""

    def __init__(self, *kinds: str) -> None:
        command = ["unshare", *kinds, "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        self._holder = subprocess.Popen(with_parent(command), stdin=subprocess.DEVNULL, start_new_session=True)
        deadline_s = time.monotonic() + _START_S
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        while not (found := children.read_text().split()) or not _is_sleep(int(found[0])):
            assert time.monotonic() < deadline_s and self._holder.poll() is None, "the namespaces were not made"
            time.sleep(0.005)
        self.first = int(found[0])

    def enter(self, *kinds: str) -> list[str]:
        """Words before a command that is to run inside."""
        return ["nsenter", "-t", str(self.first), *kinds, "--"]

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._holder.poll() is None

    def end(self) -> None:
        """Kills all processes inside."""
        if self._holder.poll() is None:
            self._holder.kill()
        self._holder.wait()


class Host:
    """A host on the network.

    Args:
        number: from 1; its address is 10.77.0.<number>, and fd77::<number>.
        relay: the network.
        mtu_bytes: of its device.
    """

    def __init__(self, number: int, relay: Relay, mtu_bytes: int = MTU_BYTES) -> None:
        self.number = number
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number}"
        self._relay = relay
        clock = ("--time", "--monotonic", str(number * CLOCK_STEP_S))
        self._namespaces = Namespaces("--net", "--mount", *clock)
        relay.attach(number, open_tun(self._namespaces.first, "net0"))
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "link", "set", "net0", "mtu", str(mtu_bytes), "up")
        self.take_address(self.address)

    def take_address(self, address: str) -> None:
        """Has this address from now on instead of its IPv4 address, as a machine that comes back may."""
        self._inside("ip", "address", "flush", "dev", "net0", "scope", "global")
        self._inside("ip", "address", "add", f"{address}/24", "dev", "net0")
        self._inside("ip", "address", "add", f"{self.address6}/64", "dev", "net0", "nodad")
        self.address = address
        self._relay.give(self.number, address, self.address6)

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._namespaces.first

    def enter(self) -> list[str]:
        """Words before a command that is to run on the host."""
        return self._namespaces.enter("-n", "-m", "-p", "-T")

    @property
    def is_alive(self) -> bool:
        """Whether it has not been killed."""
        return self._namespaces.is_alive

    def processes(self) -> dict[int, int]:
        """Its processes but the first one: their ids on the host -> their ids here."""
        namespace, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if int(name) != self.pid and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    status = Path(f"/proc/{name}/status").read_text()
                    ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                    found[int(ids.split()[-1])] = int(name)
        return found

    def mount(self, folder: Path, seen_as: Path) -> None:
        """On this host a path shows another folder; both are there."""
        run(*self._namespaces.enter("-m"), "mount", "--bind", str(folder), str(seen_as))

    def kill(self) -> None:
        """All of its processes, in one instant; its kernel lives, and closes their connections."""
        self._namespaces.end()

    def _inside(self, *command: str) -> None:
        run(*self._namespaces.enter("-n"), *command)


class World:
    """Hosts on one network; use as a context.

    Args:
        num_hosts: how many.
        delay_s: of every wire.
        mtu_bytes: of every host's device. Small packets cost this relay much, and wait little on a slow wire.
    """

    def __init__(self, num_hosts: int, *, delay_s: float = 0.0, mtu_bytes: int = MTU_BYTES) -> None:
        self._relay = Relay()
        self.hosts: list[Host] = []
        try:
            for number in range(1, num_hosts + 1):
                self.hosts.append(Host(number, self._relay, mtu_bytes))
        except BaseException:
            self._end()
            raise
        for wire in self.wires(self.hosts, self.hosts):
            wire.delay_s = delay_s
        self._mtu_bytes = mtu_bytes

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def boot(self, host: Host) -> Host:
        """Starts a host again that was killed: it has its address, another first process, and nothing runs on it."""
        again = Host(host.number, self._relay, self._mtu_bytes)
        self.hosts[self.hosts.index(host)] = again
        return again

    def wires(self, sources: Iterable[Host], targets: Collection[Host]) -> list[Wire]:
        """All wires from some hosts to some others."""
        return [
            self._relay.wire(source.number, target.number)
            for source in sources
            for target in targets
            if source is not target
        ]

    def beside(self, *hosts: Host) -> list[Host]:
        """All other hosts."""
        return [host for host in self.hosts if host not in hosts]

    def around(self, *hosts: Host) -> list[Wire]:
        """All wires between some hosts and the others, in both directions."""
        others = self.beside(*hosts)
        return self.wires(hosts, others) + self.wires(others, hosts)

    def cut(self, *hosts: Host) -> None:
        """Some hosts are on a network of their own: nothing goes between them and the others, and nobody is told."""
        for wire in self.around(*hosts):
            wire.is_cut = True

    def heal(self) -> None:
        """All wires carry again."""
        for wire in self.wires(self.hosts, self.hosts):
            wire.is_cut, wire.loss = False, 0.0

    def _end(self) -> None:
        for host in self.hosts:
            host.kill()
        self._relay.end()


def _is_sleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"


def run(*command: str) -> None:
    """Runs a command that must not fail."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
