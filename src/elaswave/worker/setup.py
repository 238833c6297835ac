"""What a worker's process is given when it starts."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from elaswave.checkpoints.format import CheckpointMeta
from elaswave.config.schema import Config
from elaswave.devices.host import HOST
from elaswave.devices.interface import Device
from elaswave.engine.checks.probe import Probe
from elaswave.training.definition import Training
from elaswave.transport.addresses import Endpoint
from elaswave.transport.handshake import Key
from elaswave.worker.site_links import SiteLinks


class WorkerSetup(NamedTuple):
    """What a worker is started with."""

    config: Config
    worker: int
    run_dir: Path
    key: Key
    """Of those who take part."""
    listen: Endpoint | str
    """Where the data plane listens."""
    checkpoint: tuple[Path, CheckpointMeta] | None
    probe: Probe
    profile: bool
    training: Training | None = None
    """What is trained; None: what the configuration describes."""
    loaders: socket.socket | None = None
    """Where the template hands over lines to loaders; None: the worker makes its micro-batches itself."""
    frozen: Mapping[str, torch.Tensor] | None = None
    """Frozen parameters that the checkpoint has otherwise than they are built; None: they are still to be compared."""
    joins: bool = False
    """Whether it joins a job that runs: it begins without state, and says `Joining` before it registers."""
    sites: SiteLinks | None = None
    """The transport's links to other sites; None: there is only one."""
    domain: str = ""
    """Where it runs, as a joiner says it, see `elaswave.blocks.domains`; empty: the coordinator knows, or nobody."""
    device: Device = HOST
    """What it computes on; `run_worker` opens the configured one."""
