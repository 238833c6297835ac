"""Figures of ``compare`` and ``simulate``, through matplotlib, which is an extra: nothing else needs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaswave.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from elaswave.sim.cluster.outcome import PolicyOutcome

SUFFIXES = (".png", ".svg")


def check_plot_path(path: Path) -> None:
    """Checks that a figure can be drawn and where it is to go, before anything is computed for it.

    Raises:
        UsageError: another kind of file, a folder that is not there, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}, which says what is drawn")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")
    _figure_class()


def _figure_class() -> "type[Figure]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'elaswave[plots]'") from error
    return Figure


def plot_policies(path: Path, title: str, entries: Sequence[Mapping[str, Any]], unit: str, reference: float) -> None:
    """Draws throughput by policy as bars.

    Args:
        path: PNG or SVG.
        title: of the figure.
        entries: with ``policy`` and ``throughput``, and ``capacity_fraction`` for the bars' labels.
        unit: of the throughput.
        reference: throughput of the capacity that is left, drawn as a line.
    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure_class()(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.bar([entry["policy"] for entry in entries], [entry["throughput"] for entry in entries], color="#4269d0")
    labels = [f"{entry['capacity_fraction']:.1%}" if entry["throughput"] else "none" for entry in entries]
    axes.bar_label(bars, labels=labels, padding=2)
    axes.axhline(reference, color="#888888", linestyle="--", linewidth=1, label="capacity left")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=9, wrap=True)
    axes.tick_params(axis="x", labelrotation=20)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Writes a figure.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        # Without the date, the same figure is the same file.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UsageError(f"--plot: cannot write {path}: {error.strerror or error}") from error


def plot_timelines(path: Path, title: str, outcomes: Sequence["PolicyOutcome"]) -> None:
    """Draws throughput over time, one line per outcome, and the workers that are there.

    Args:
        path: PNG or SVG.
        title: of the figure.
        outcomes: of `elaswave.sim.cluster.job`, all of one scenario.
    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure_class()(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    most = max(sample.num_workers for outcome in outcomes for sample in outcome.timeline)
    unit_s, unit = (86_400.0, "days") if outcomes[0].duration_s > 2 * 86_400 else (3600.0, "hours")
    for outcome in outcomes:
        times = [sample.at_s / unit_s for sample in outcome.timeline] + [outcome.duration_s / unit_s]
        rates = [sample.throughput for sample in outcome.timeline]
        label = f"{outcome.policy}: goodput {outcome.goodput:.1%}"
        axes.step(times, [*rates, rates[-1]], where="post", linewidth=1, label=label)
    times = [sample.at_s / unit_s for sample in outcomes[0].timeline] + [outcomes[0].duration_s / unit_s]
    there = [sample.num_workers / most for sample in outcomes[0].timeline]
    axes.step(times, [*there, there[-1]], where="post", color="#888888", linestyle="--", linewidth=1, label="workers")
    axes.set_xlabel(unit)
    axes.set_ylabel("relative to the fault-free job")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    save(figure, path)
