"""What the processes of a job on one host are started with: its network, and how the host's agent takes part.

All that can be wrong with addresses and certificates is found here, in the launcher, before a process is started.

`control.json` in the run folder says where a running job is talked to, and where its key stands. The key itself is in
no file of the run's folder, which may be copied or shared; whoever can read the files that are named there can do with
the job what its owner can. The launcher writes the file when the job begins and removes it when the job ends. A
launcher that is killed leaves it behind; all processes of the job end with the launcher, so that a file whose launcher
is gone is known to be stale.
"""

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from elaswave.config.rules import LOOPBACK, exposed_problem, is_exposed, ports_of
from elaswave.config.schema import Config, NetConfig
from elaswave.errors import ConfigError, ControlError, LaunchError, RunFolderError
from elaswave.faults.injection import Fault
from elaswave.job.keys import tls_of
from elaswave.observability.processes import RunProcess, lives, process_entry
from elaswave.observability.run_folder import CONTROL_FILE, is_run
from elaswave.protocol.events import CoordinatorEffect
from elaswave.system.processes import DeathWatch
from elaswave.transport.addresses import Endpoint, reserve, tcp_address
from elaswave.transport.tls import Tls
from elaswave.untrusted import read_json, reason

CONTROL_SOCKET = "control.sock"
_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""

IPV6_TABLE = Path("/proc/net/if_inet6")
"""Of the kernel: one line for each IPv6 address of an interface."""


class JobNetwork(NamedTuple):
    """The addresses of one job."""

    listen: str
    """Where the coordinator listens, and its successors will."""
    dial: str
    """What reaches it from anywhere."""
    launcher_dials: str
    """What reaches it from this machine."""
    links: Endpoint
    """Where workers listen."""
    host: str = ""
    """With TLS: what certificates must name."""
    others: tuple[tuple[str, str], ...] = ()
    """Addresses, and hosts as above, at which other candidates may have a coordinator."""

    @property
    def launcher_targets(self) -> list[tuple[str, str]]:
        """What this machine dials, and what certificates must name there."""
        return [(self.launcher_dials, self.host), *self.others]

    @property
    def tls(self) -> Tls | None:
        """Certificate files; None: no TLS."""
        return self.links.tls


def network_in(folder: Path) -> JobNetwork:
    """Describes the sockets of a job in its private folder."""
    address = f"unix:{folder / CONTROL_SOCKET}"
    return JobNetwork(address, address, address, Endpoint(f"unix:{folder}"))


def ports_beside(net: NetConfig, port: int, num_workers: int) -> tuple[int, ...]:
    """Lists the ports at which a host's workers may listen; none: the system chooses.

    Args:
        net: the configuration's section.
        port: the coordinator's.
        num_workers: that may run on this host at once.
    Raises:
        ConfigError: they are too few.
    """
    ports = tuple(other for other in ports_of(net.ports) if other != port)
    if net.ports is not None and len(ports) < num_workers:
        raise ConfigError(
            [
                f"net.ports: {net.ports} has {len(ports)} beside the coordinator's, but {num_workers} workers may run "
                f"on this host; give {num_workers} or more"
            ]
        )
    return ports


def open_network(net: NetConfig, folder: Path, num_workers: int) -> tuple[JobNetwork, socket.socket | None]:
    """Opens the network of a job, as configured.

    Args:
        net: the configuration's section.
        folder: the job's private one.
        num_workers: with which it begins.
    Returns:
        The network, and a socket that keeps the coordinator's port as long as it is open.
    Raises:
        ConfigError: an interface, address, certificate or range of ports that cannot be used.
        LaunchError: no port can be had.
    """
    if net.transport == "unix":
        return network_in(folder), None
    bind = net.bind or (LOOPBACK if net.interface is None else address_of(net.interface))
    host = net.advertise or bind
    if net.tls == "off" and not net.trusted and is_exposed(bind):
        raise ConfigError([exposed_problem(f"net.interface = {net.interface} ({bind})")])
    tls = None
    if net.tls == "required":
        assert net.keys is not None
        tls = tls_of(Path(net.keys))
        tls.check(host)
    ports = ports_of(net.ports)
    try:
        kept = reserve(bind, ports)
    except OSError as error:
        raise LaunchError(
            f"no port for the coordinator can be had at {bind}: {error.strerror}; set net.bind to an address of this "
            "machine, or widen net.ports"
        ) from error
    port = kept.getsockname()[1]
    try:
        beside = ports_beside(net, port, num_workers)
    except ConfigError:
        kept.close()
        raise
    links = Endpoint(tcp_address(bind, 0), advertise="" if host == bind else host, ports=beside, tls=tls)
    near = bind
    if ipaddress.ip_address(bind).is_unspecified:
        near = "::1" if ":" in bind else LOOPBACK
    network = JobNetwork(
        listen=tcp_address(bind, port),
        dial=tcp_address(host, port),
        launcher_dials=tcp_address(near, port),
        links=links,
        host=host,
    )
    return network, kept


def address_of(interface: str) -> str:
    """Finds the first address of a network interface, IPv4 before IPv6.

    Raises:
        ConfigError: there is no such interface, or it has no address that others could dial.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError([f"net.interface: there is no {interface} here; there are {', '.join(names)}"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            return socket.inet_ntoa(answer[20:24])
        except OSError:  # it has none
            pass
    for address in _ipv6_addresses(interface):
        return address
    raise ConfigError([f"net.interface: {interface} has no address yet; bring it up, or set net.bind"])


def _ipv6_addresses(interface: str) -> Iterator[str]:
    """Yields those IPv6 addresses of a network interface that other machines can dial without naming an interface of
    theirs."""
    for line in IPV6_TABLE.read_text().splitlines() if IPV6_TABLE.exists() else ():
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if name == interface and not address.is_link_local:
            yield str(address)


class ControlFile(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `control.json`."""

    address: str
    """Where the coordinator is dialled."""
    key_file: str
    """Path of the job's key."""
    key_is_temporary: bool = False
    """Whether that file goes with the job, which was given its key in none."""
    host: str
    """Where the job runs."""
    launcher: RunProcess
    tls: Tls | None = None
    """Certificate files; None: no TLS."""
    tls_host: str = ""
    """With TLS: what the coordinator's certificate must name."""


def write_control_file(run_dir: Path, network: JobNetwork, key_file: Path, *, is_temporary: bool = False) -> None:
    """Writes it for a job that this process launches. What an earlier one has left is replaced.

    Args:
        run_dir: the run's folder.
        network: of the job.
        key_file: of the job's key.
        is_temporary: whether that file goes with the job.
    Raises:
        OSError: the folder takes no file; a job can do without.
    """
    content = ControlFile(
        address=network.launcher_dials,
        key_file=str(key_file),
        key_is_temporary=is_temporary,
        host=socket.gethostname(),
        launcher=process_entry("launcher", 0, os.getpid()),
        tls=network.tls,
        tls_host=network.host,
    )
    temporary = run_dir / f".{CONTROL_FILE}.{os.getpid()}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        # The mode holds from the very first instant: nobody else can ever have opened it.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(content) + b"\n")
        os.replace(temporary, run_dir / CONTROL_FILE)
    except OSError:
        for path in (temporary, run_dir / CONTROL_FILE):  # an earlier job's must not stand there for this one's
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def remove_control_file(run_dir: Path) -> None:
    """Removes it: the job is over."""
    with contextlib.suppress(OSError):
        (run_dir / CONTROL_FILE).unlink(missing_ok=True)


def read_control_file(run_dir: Path) -> ControlFile:
    """Reads how the job that runs in a folder is talked to.

    Raises:
        RunFolderError: the folder holds no run.
        ControlError: no job runs there, it runs on another machine, or this user may not talk to it.
    """
    path = run_dir / CONTROL_FILE
    try:
        content: ControlFile = read_json(path, ControlFile)
    except (FileNotFoundError, NotADirectoryError):
        if not is_run(run_dir):
            raise RunFolderError(f"{run_dir} holds no run; give the folder of a run that is going on") from None
        raise ControlError(
            f"no job runs in {run_dir}: there is no {CONTROL_FILE}, which a job keeps from its start to its end; "
            f"`elaswave inspect {run_dir}` shows what became of it"
        ) from None
    except OSError as error:
        raise ControlError(
            f"{path} cannot be read ({reason(error)}): only the user who has started the job can talk to it"
        ) from error
    except ValueError as error:
        raise ControlError(f"{path} is damaged ({error}): it is written by the job's launcher alone") from None
    if content.host != socket.gethostname():
        raise ControlError(
            f"the job in {run_dir} runs on {content.host}, and is talked to from that machine, where its key stands: "
            "give the command there"
        )
    if not lives(content.launcher):
        raise ControlError(
            f"no job runs in {run_dir}: {CONTROL_FILE} is stale, its launcher (process {content.launcher.pid}) was "
            "killed, and all processes of a job end with their launcher; the next run in the folder replaces the file"
        )
    return content


_INCARNATION_BITS = 30


class AgentRole(NamedTuple):
    """The part of one agent."""

    node: str
    """Its host's name."""
    incarnation: int
    """Tells it apart from other agents that were, or will be, started there."""
    slots: int = 0
    """Workers that may run here; 0: as many as are asked for."""
    creates_job: bool = True
    """Whether it starts the job's coordinators."""
    job: str = ""
    """The job's name; empty: it has no other hosts."""
    job_generation: int = 0
    """Which job generation it takes part in, see `elaswave.protocol.leadership.store_position.StorePosition`; 0: it
    creates it."""
    keys: tuple[bytes, ...] = ()
    """Secrets of those who take part that it was told; none: they are made of the key that it was given."""
    network: JobNetwork | None = None
    """Where everybody listens and is dialled; None: as configured for a job of one host."""
    kept_port: socket.socket | None = None
    """Keeps the coordinator's port as long as it is open."""
    is_candidate: bool = False
    """Whether it starts a coordinator when those of other hosts are gone; what they have decided is in the store."""
    leave_s: float | None = None
    """Seconds within which its workers leave after a notice; None: a notice ends the job."""

    @property
    def starts_coordinators(self) -> bool:
        """Whether it starts coordinators, now or once those of other hosts are gone."""
        return self.creates_job or self.is_candidate

    @property
    def name(self) -> str:
        """By which its coordinators hold the job."""
        return f"{self.node}/{self.incarnation}"

    @property
    def suffix(self) -> str:
        """Of files that every host has its own one of in a shared folder; empty where the job was created."""
        return "" if self.creates_job else f"-{self.node}"


def new_incarnation() -> int:
    """Draws an incarnation that no other agent of the job has, as good as certain."""
    return secrets.randbits(_INCARNATION_BITS)


def own_role() -> AgentRole:
    """Makes the role of the launcher of a job on one machine."""
    return AgentRole(socket.gethostname(), new_incarnation())


class JobSetup(NamedTuple):
    """What all processes of a job on this host know of it; made once, by the launcher."""

    config: Config
    """With its layout resolved."""
    run_dir: Path
    control_dir: Path
    """Private folder of the job: journal, sockets."""
    network: JobNetwork
    """Where coordinator and workers listen and are dialled."""
    name: str
    """The job's; empty: no other hosts take part."""
    job_generation: int
    """Of the job that this host takes part in, see `elaswave.protocol.leadership.store_position.StorePosition`."""
    home: int
    """Incarnation of this host's agent; see `elaswave.protocol.membership.hosts`."""
    started_s: float
    """Monotonic time at which the command began."""
    faults: tuple[Fault, ...]
    """Each is carried out in the process that it is of."""
    before_effect: Callable[[CoordinatorEffect], None]
    """Called in the coordinator before each effect of the protocol's core (fault injection and tests)."""
    deaths: DeathWatch | None
    """None only on the way to a fresh interpreter, which makes its own."""
    profile: bool
    """Whether workers write traces."""
    num_loaders: int
    """Beside each worker."""
