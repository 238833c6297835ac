"""What ``simulate`` asks about copies of the state and checkpoints; defaults are the engine's configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import msgspec

from elaswave.cli.whatif.cluster_options import POSITIVE
from elaswave.config.schema import ElasticConfig, RunConfig
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.state_moves.placed_blocks import Placing
from elaswave.planning.state_moves.scatter_width import DEFAULT_SCATTER_WIDTH
from elaswave.sim.cluster.failures import Scenario

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--followers",
        type=click.IntRange(min=0),
        default=ElasticConfig().num_followers,
        show_default=True,
        help="Live copies of every block of state beside its owner's, under elaswave.",
    ),
    click.option(
        "--scatter-width",
        type=click.IntRange(min=1),
        default=DEFAULT_SCATTER_WIDTH,
        show_default=True,
        help="Replica peers of a worker, among which the first followers of its blocks are.",
    ),
    click.option(
        "--checkpoint-interval",
        type=POSITIVE,
        metavar="SECONDS",
        help="Between durable checkpoints, for all policies.  [default: full_restart as is best for the failures that "
        f"come, the others {RunConfig().checkpoint_every_s:g}]",
    ),
    click.option(
        "--refill-bytes-per-step",
        type=click.IntRange(min=1),
        metavar="BYTES",
        help="The most that a worker sends in a step to make lost copies again; a job's default is "
        f"{ElasticConfig().refill_bytes_per_step}.  [default: what its link carries]",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RedundancyOptions:
    """As given."""

    followers: int
    scatter_width: int
    checkpoint_interval: float | None
    refill_bytes_per_step: int | None

    @property
    def placing(self) -> Placing:
        """How blocks are copied."""
        return Placing(followers=self.followers, scatter_width=self.scatter_width)

    def pauses(self, scenario: Scenario) -> RecoveryTimes:
        """Times of recovery, for the failures of a scenario."""
        times = RecoveryTimes()
        if 0 < scenario.mtbf_s < float("inf"):
            times = times.for_mtbf(scenario.mtbf_s)
        if self.checkpoint_interval is None:
            return times
        return msgspec.structs.replace(
            times, checkpoint_interval_s=self.checkpoint_interval, backup_interval_s=self.checkpoint_interval
        )


def redundancy_options(command: _Command) -> _Command:
    """Adds the options; the command gets them as ``redundancy: RedundancyOptions``."""

    def gathering(*args: Any, **values: Any) -> Any:
        given = {name: values.pop(name) for name in RedundancyOptions.__dataclass_fields__}
        return command(*args, redundancy=RedundancyOptions(**given), **values)

    gathering.__name__, gathering.__doc__ = command.__name__, command.__doc__
    gathering.__dict__.update(vars(command))
    for option in reversed(_OPTIONS):
        gathering = option(gathering)
    return gathering  # type: ignore[return-value]
