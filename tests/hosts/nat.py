"""A host behind another one that forwards ports to it, as home routers and clouds do. Needs nft, and its NAT."""

import shutil
import subprocess
from collections.abc import Mapping

from tests.hosts.world import CLOCK_STEP_S, Host, Namespaces, run

NETWORK = "192.168.9"
"""Of those behind a router, which nobody else can reach."""


def lacking_nat() -> str:
    """Why there can be no NAT here; empty if there can."""
    if shutil.which("nft") is None:
        return "needs nft (Debian: nftables)"
    rules = "add table ip t; add chain ip t c { type nat hook postrouting priority 100; }; add rule ip t c masquerade"
    done = subprocess.run(["unshare", "--net", "nft", rules], capture_output=True, text=True, check=False)
    return f"the kernel has no NAT: {done.stderr.strip()}" if done.returncode else ""


class HiddenHost:
    """A host whose connections leave by a router, and that is reached by the ports alone that are forwarded.

    Args:
        router: a host on the network, which forwards.
        forwarded: port of the router -> port of this host.
    """

    def __init__(self, router: Host, forwarded: Mapping[int, int]) -> None:
        self._namespaces = Namespaces("--net", "--mount", "--time", "--monotonic", str(50 * CLOCK_STEP_S))
        inside, outside = self._namespaces.enter("-n"), ["nsenter", "-t", str(router.pid), "-n", "--"]
        pid = str(self._namespaces.first)
        run(*outside, "ip", "link", "add", "behind", "type", "veth", "peer", "name", "net0", "netns", pid)
        run(*outside, "ip", "address", "add", f"{NETWORK}.1/24", "dev", "behind")
        run(*outside, "ip", "link", "set", "behind", "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{NETWORK}.2/24", "dev", "net0"),
            ("link", "set", "net0", "up"),
            ("route", "add", "default", "via", f"{NETWORK}.1"),
        ):
            run(*inside, "ip", *command)
        run(*outside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        rules = ["add table ip nat", "add chain ip nat in { type nat hook prerouting priority -100; }"]
        rules += ["add chain ip nat out { type nat hook postrouting priority 100; }"]
        rules += ['add rule ip nat out oifname "net0" masquerade']
        rules += [
            f'add rule ip nat in iifname "net0" tcp dport {port} dnat to {NETWORK}.2:{own}'
            for port, own in forwarded.items()
        ]
        run(*outside, "nft", "; ".join(rules))

    def __enter__(self) -> "HiddenHost":
        return self

    def __exit__(self, *exception: object) -> None:
        self._namespaces.end()

    def enter(self) -> list[str]:
        """Words before a command that is to run on the host."""
        return self._namespaces.enter("-n", "-m", "-p", "-T")
