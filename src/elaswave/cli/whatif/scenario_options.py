"""Options of ``simulate`` that say what happens to the machines: rates to draw from, or a trace.

What ``simulate`` asks about copies of the state and checkpoints; defaults are the engine's configuration.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import click
import msgspec

from elaswave.blocks.placement import MOVE_BYTES_MAX, SLOWDOWN_MAX
from elaswave.cli.tables import Waiting
from elaswave.cli.whatif.cluster_options import NOT_NEGATIVE, POSITIVE, SHARE
from elaswave.config.schema import ElasticConfig, RunConfig
from elaswave.errors import DataError, UsageError
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.state_moves.placed_blocks import Placing
from elaswave.planning.state_moves.target_placement import DEFAULT_SCATTER_WIDTH
from elaswave.sim.cluster.failures import CHANGES_MAX, DAY_S, RATES, Rates, Scenario, draw, rates_named
from elaswave.sim.cluster.traces import FORMATS, read_trace
from elaswave.sim.cluster.traces.formats import read_rates
from elaswave.untrusted import open_binary, open_text, reason

DEFAULT_DAYS = 7.0
DEFAULT_RATE = "llama3"
LINE_CHARACTERS_MAX = 1 << 20
"""Of a trace."""
BETWEEN_LOSSES_S_MIN = 1.0
"""Mean time between losses of any worker: where they come faster, no step is done, and there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """As given; None where nothing was."""

    days: float | None
    rate: str | None
    weibull_shape: float | None
    rack_losses: float | None
    repair_hours: float | None
    stragglers: float | None
    trace: Path | None
    trace_format: str | None
    workers_per_node: int | None
    nodes_per_rack: int | None


def scenario_options(command: Any) -> Any:
    """Adds the options that say what happens to the machines."""
    for option in reversed(
        (
            click.option(
                "--days", type=POSITIVE, metavar="F", help=f"Length of the scenario.  [default: {DEFAULT_DAYS:g}]"
            ),
            click.option(
                "--rate",
                metavar="NAME|NUMBER|FILE",
                help=f"Losses: public rates ({', '.join(RATES)}), a number per worker and day, or Acme's trace of "
                f"jobs.  [default: {DEFAULT_RATE}]",
            ),
            click.option(
                "--weibull-shape",
                type=POSITIVE,
                metavar="F",
                help="Of the time to a worker's loss: below 1, newcomers fail more often.  [default: 1]",
            ),
            click.option(
                "--rack-losses",
                type=NOT_NEGATIVE,
                metavar="F",
                help="Losses of each whole rack a day, besides; needs --nodes-per-rack.  [default: 0]",
            ),
            click.option(
                "--repair-hours",
                type=POSITIVE,
                metavar="F",
                help="Mean time until what was lost is back.  [default: 4]",
            ),
            click.option(
                "--stragglers", type=NOT_NEGATIVE, metavar="F", help="Slow-downs per worker and day.  [default: 0]"
            ),
            click.option(
                "--trace",
                type=click.Path(path_type=Path),
                help="A file of machines that come and go, instead of rates; its form is seen from its first line.",
            ),
            click.option("--trace-format", metavar="NAME", help=f"Its form: {', '.join(FORMATS)}."),
            click.option(
                "--workers-per-node",
                type=click.IntRange(min=1),
                help="Workers that come and go with a machine.  [default: the device's, with --trace 1]",
            ),
            click.option(
                "--nodes-per-rack",
                type=click.IntRange(min=1),
                help="Machines that share a rack; elaswave keeps copies apart over racks then.  [default: 1]",
            ),
        )
    ):
        command = option(command)
    return command


def read_scenarios(
    options: ScenarioOptions, *, seeds: Sequence[int], num_workers: int | None, default_workers: int,
    devices_per_node: int,
) -> tuple[Scenario, ...]:  # fmt: skip
    """Reads the scenarios that options describe.

    Args:
        options: as given.
        seeds: of the scenarios.
        num_workers: that were asked for.
        default_workers: where none were.
        devices_per_node: workers of a machine, where nothing else is said.
    Raises:
        UsageError: options that contradict each other, or figures that cannot be.
        DataError: a trace that is damaged; names the line.
    """
    if options.trace is not None:
        return _of_trace(options.trace, options, seeds, num_workers)
    if options.trace_format is not None:
        raise UsageError(f"--trace-format {options.trace_format}: there is no --trace that it could be the form of")
    days = DEFAULT_DAYS if options.days is None else options.days
    rates = _rates(options)
    per_node, per_rack = options.workers_per_node or devices_per_node, options.nodes_per_rack or 1
    number = num_workers or default_workers
    num_racks = -(-number // (per_node * per_rack))
    _check_rates(rates, options.rate or DEFAULT_RATE, number, num_racks)
    expected = rates.expected_changes(number, days * DAY_S, num_racks) * len(seeds)
    if expected > CHANGES_MAX:
        raise UsageError(
            f"{expected:.3g} losses, repairs and slow-downs are expected, and {CHANGES_MAX:,} are the most that "
            "are simulated: give fewer --days, --workers or --seeds, or a lower --rate or --stragglers"
        )
    waiting = Waiting(f"drawing {days:g} days of failures")
    try:
        return tuple(
            draw(
                rates,
                num_workers=number,
                duration_s=days * DAY_S,
                seed=seed,
                workers_per_node=per_node,
                nodes_per_rack=per_rack,
                progress=lambda done, before=index: waiting.at((before + done) / len(seeds)),  # type: ignore[misc]
            )
            for index, seed in enumerate(seeds)
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    finally:
        waiting.close()


def _check_rates(rates: Rates, asked: str, num_workers: int, num_racks: int) -> None:
    per_day = rates.losses_per_worker_day * num_workers + rates.rack_losses_per_day * num_racks
    if per_day * BETWEEN_LOSSES_S_MIN > DAY_S:
        raise UsageError(
            f"--rate {asked}: {num_workers:,} workers would meet a loss every {DAY_S / per_day:.2g} s, and no step "
            f"would be done; needed is {BETWEEN_LOSSES_S_MIN:g} s between losses, at most "
            f"{DAY_S / BETWEEN_LOSSES_S_MIN / num_workers:.3g} per worker and day"
        )


def _rates(options: ScenarioOptions) -> Rates:
    rates = _base_rates(options.rate or DEFAULT_RATE)
    changes: dict[str, Any] = {}
    if options.repair_hours is not None:
        changes["repair_s"] = options.repair_hours * 3600
    if options.stragglers is not None:
        changes["stragglers_per_worker_day"] = options.stragglers
    if options.weibull_shape is not None:
        changes["weibull_shape"] = options.weibull_shape
    if options.rack_losses is not None:
        if options.nodes_per_rack is None:
            raise UsageError("--rack-losses needs --nodes-per-rack: how many machines a rack has")
        changes["rack_losses_per_day"] = options.rack_losses
    return _checked(msgspec.structs.replace, rates, **changes)


def _base_rates(rate: str) -> Rates:
    try:
        number = float(rate)
    except ValueError:
        if rate not in RATES and Path(rate).is_file():
            try:
                with open_text(rate, errors="replace", newline="") as lines:
                    return read_rates(_bounded(lines, rate), name=rate)
            except OSError as error:
                raise DataError(f"cannot read the trace {rate}: {reason(error)}") from error
            except csv.Error as error:
                raise DataError(f"the trace {rate} is no table: {error}") from error
        return rates_named(rate)
    if not 0 <= number < float("inf"):
        raise UsageError(f"--rate {rate}: losses per worker and day are a number of at least 0, or a name: "
                         f"{', '.join(RATES)}")  # fmt: skip
    return _checked(Rates, name=f"{rate} losses per worker and day", losses_per_worker_day=number)


def _checked(make: Any, *args: Any, **values: Any) -> Rates:
    try:
        rates: Rates = make(*args, **values)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return rates


def _bounded(lines: TextIO, name: object) -> Iterator[str]:
    """Yields the lines of a text, none of which fills the memory.

    Raises:
        DataError: one is too long.
    """
    number = 0
    while line := lines.readline(LINE_CHARACTERS_MAX):
        number += 1
        if len(line) == LINE_CHARACTERS_MAX:
            raise DataError(f"trace {name}, line {number} is longer than {LINE_CHARACTERS_MAX:,} characters")
        yield line


NOT_WITH_TRACE = ("days", "rate", "weibull_shape", "rack_losses", "repair_hours", "stragglers")


def _of_trace(
    path: Path, options: ScenarioOptions, seeds: Sequence[int], num_workers: int | None
) -> tuple[Scenario, ...]:
    given = [f"--{name.replace('_', '-')}" for name in NOT_WITH_TRACE if getattr(options, name) is not None]
    given += ["--workers"] if num_workers is not None else []
    if given:
        raise UsageError(f"--trace says what happens, when and to how many; leave out {', '.join(given)}")
    scenarios = tuple(_read(path, options, seed) for seed in seeds)
    if len(scenarios) > 1 and scenarios[0] == scenarios[1]:
        raise UsageError(f"--trace is one scenario, in which nothing is drawn; leave out --seeds {len(seeds)}")
    return scenarios


def _read(path: Path, options: ScenarioOptions, seed: int) -> Scenario:
    given = {
        "name": str(path),
        "trace_format": options.trace_format,
        "workers_per_node": options.workers_per_node or 1,
        "nodes_per_rack": options.nodes_per_rack or 1,
        "seed": seed,
    }
    try:
        with open_text(path) as lines:
            return read_trace(_bounded(lines, path), **given)  # type: ignore[arg-type]
    except OSError as error:
        raise DataError(f"cannot read the trace {path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        with open_binary(path) as raw:
            begins = raw.read(4)
        if begins == b"PAR1":  # Parquet, which some traces are published as: the reader says why not
            return read_trace(["PAR1"], **given)  # type: ignore[arg-type]
        needed = f"needed are lines of one of the forms {', '.join(FORMATS)}"
        raise DataError(f"the trace {path} is no text: {error}; {needed}") from error


_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Followers(click.IntRange):
    """A number, or auto."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == AUTO:
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number of at least 0 nor {AUTO}.", param, ctx)


AUTO: Literal["auto"] = "auto"

_OPTIONS = (
    click.option(
        "--followers",
        type=_Followers(),
        metavar="N|auto",
        default=AUTO,
        show_default=True,
        help="Live copies of every block of state beside its owner's, under elaswave; auto: all of the stage where "
        "they fit, else as many as do.",
    ),
    click.option(
        "--copies-memory",
        type=SHARE,
        metavar="F",
        default=ElasticConfig().copies_memory,
        show_default=True,
        help="Share of a worker's memory that they may take, of which auto makes their number.",
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
        help="The most that a worker sends, and receives, in a step to make lost copies again and to fill up new ones."
        f"  [default: what makes a step at most {SLOWDOWN_MAX - 1:.0%} longer, up to {MOVE_BYTES_MAX}]",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RedundancyOptions:
    """As given."""

    followers: int | Literal["auto"]
    copies_memory: float
    scatter_width: int
    checkpoint_interval: float | None
    refill_bytes_per_step: int | None

    @property
    def placing(self) -> Placing:
        """How blocks are copied."""
        return Placing(
            followers=self.followers,
            copies_memory=self.copies_memory,
            scatter_width=self.scatter_width,
            refill_bytes_per_step=self.refill_bytes_per_step,
        )

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
