"""What a coordinator's process is started with."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from elaswave.checkpoints.format import CheckpointMeta
from elaswave.data.sampler import Sampler
from elaswave.faults.injection import Fault
from elaswave.job.plan import RunPlan
from elaswave.protocol import events
from elaswave.store.opening import Claimed
from elaswave.system.death_watch import DeathWatch
from elaswave.transport.handshake import Secrets
from elaswave.transport.tls import Tls


class CoordinatorSetup(NamedTuple):
    """What a coordinator is started with."""

    plan: RunPlan
    sampler: Sampler
    run_dir: Path
    control_dir: Path
    """Private folder of the job: journal and socket."""
    listen: str
    keys: Secrets
    """The job's: one, unless it was changed."""
    checkpoint: tuple[Path, CheckpointMeta] | None
    started_s: float
    deaths: DeathWatch
    faults: tuple[Fault, ...]
    """Those of the coordinator are carried out here."""
    coordinator_ends_s: tuple[float, ...]
    """Monotonic times at which earlier coordinators of the job have ended."""
    before_effect: Callable[[events.CoordinatorEffect], None]
    """Called before each effect is carried out (fault injection and tests)."""
    home: int = 0
    """Incarnation of the agent of this host; see `elaswave.protocol.membership.hosts`."""
    job: str = ""
    """The job's name; empty: no other hosts take part."""
    job_generation: int = 0
    """Of the job that this agent takes part in, see `elaswave.protocol.leadership.store_position.StorePosition`."""
    lost_s: float | None = None
    """In a job of several hosts: monotonic time since when the coordinator before this one is missed; None: it is the
    first. Of a candidate that waits: at which its agent's last coordinator has ended."""
    claimed: Claimed | None = None
    """What it holds, if it has waited for that as a candidate."""
    profile: bool = False
    """Whether workers write traces."""
    num_loaders: int = 0
    """Of each worker."""
    tls: Tls | None = None
    """Certificate files of the control connections."""
