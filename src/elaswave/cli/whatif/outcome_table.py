"""What ``elaswave simulate`` prints: a table of policies, or one policy in detail; the same as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from elaswave.cli.tables import format_bytes, format_seconds, render_table
from elaswave.observability.output import wrap
from elaswave.sim.cluster.failures import DAY_S
from elaswave.sim.cluster.outcome import ROLLBACK_CAUSES, PolicyOutcome
from elaswave.sim.cluster.summary import Interval, summarize_outcomes


@dataclass(frozen=True, kw_only=True)
class Results:
    """What policies made of the same scenarios."""

    title: str
    costs: str
    """Where the costs are from."""
    tokens_per_step: int
    """Of the fault-free job."""
    outcomes: Sequence[Sequence[PolicyOutcome]]
    """By policy, of every scenario."""
    copies: str | None = None
    """Of elaswave's state, and what that survives; None without it."""

    @property
    def undisturbed_tokens_per_s(self) -> float:
        """Of the fault-free job."""
        return self.tokens_per_step / self.outcomes[0][0].undisturbed_step_s


def document_of(results: Results) -> dict[str, Any]:
    """Describes policies' outcomes as JSON: means and intervals, and every scenario. One policy's stand beside the
    setting."""
    head = {
        "setting": results.title,
        "costs": results.costs,
        "copies": results.copies,
        "undisturbed_tokens_per_s": results.undisturbed_tokens_per_s,
        "undisturbed_step_s": results.outcomes[0][0].undisturbed_step_s,
    }
    policies = [_entry(results, outcomes) for outcomes in results.outcomes]
    return head | (policies[0] if len(policies) == 1 else {"policies": policies})


def _entry(results: Results, outcomes: Sequence[PolicyOutcome]) -> dict[str, Any]:
    summary = summarize_outcomes(outcomes)
    return {
        "policy": summary.policy,
        "tokens_per_s": summary.goodput.mean * results.undisturbed_tokens_per_s,
        "summary": msgspec.to_builtins(summary),
        "scenarios": [msgspec.to_builtins(outcome) for outcome in outcomes],
    }


def render_policies(results: Results, width: int) -> list[str]:
    """Describes all policies, one line each."""
    summaries = [summarize_outcomes(outcomes) for outcomes in results.outcomes]
    lines = _heading(results, width)
    lines += wrap(
        f"fault-free: {results.undisturbed_tokens_per_s:,.0f} tokens/s; workers that were there: "
        f"{_percent(summaries[0].availability)}",
        width,
    )
    header = [
        "policy",
        "goodput",
        "ETTR",
        "of capacity",
        "went back",
        "no copies",
        "no workers",
        "lost work",
        "pauses",
        "waiting",
        "slower",
    ]
    rows = [
        [
            summary.policy,
            _percent(summary.goodput),
            _percent(summary.ettr),
            _percent(summary.of_capacity),
            f"{summary.num_rollbacks.mean:g} x",
            *(f"{summary.rollbacks[cause].mean:g} x" for cause in ROLLBACK_CAUSES[:2]),
            _duration(summary.lost_work_s.mean),
            _duration(sum(interval.mean for interval in summary.pauses_s.values())),
            _duration(summary.waiting_s.mean),
            _duration(summary.slower_s.mean),
        ]
        for summary in summaries
    ]
    return [*lines, "", *render_table(header, rows, width)]


def render_policy(results: Results, width: int) -> list[str]:
    """Describes one policy: where its time went."""
    (outcomes,) = results.outcomes
    summary = summarize_outcomes(outcomes)
    duration_s = outcomes[0].duration_s
    lines = _heading(results, width)
    lines += [
        "",
        *wrap(
            f"{summary.policy}: goodput {_percent(summary.goodput)} of the fault-free job's "
            f"{results.undisturbed_tokens_per_s:,.0f} tokens/s, {_percent(summary.of_capacity)} of the workers that "
            f"were there ({_percent(summary.availability)}); effective training time (ETTR) {_percent(summary.ettr)}",
            width,
        ),
        "",
    ]
    rows = [["useful", _part(summary.goodput.mean * duration_s, duration_s)]]
    rows += [[f"pause: {cause}", _part(interval.mean, duration_s)] for cause, interval in summary.pauses_s.items()]
    for name, seconds in (
        ("lost work", summary.lost_work_s.mean),
        ("waiting for workers", summary.waiting_s.mean),
        ("slower than undisturbed", summary.slower_s.mean),
    ):
        rows.append([name, _part(seconds, duration_s)])
    lines += render_table(["where the time went", "share of it"], rows, width)
    causes = ", ".join(
        f"{summary.rollbacks[cause].mean:g} for want of {cause}" for cause in ROLLBACK_CAUSES if cause != "policy"
    )
    times = f"{summary.num_rollbacks.mean:g} times ({causes})"
    moved, energy_mwh = format_bytes(round(summary.migrated_bytes.mean)), summary.energy_j.mean / 3.6e9
    text = f"went back to a checkpoint {times}; state moved {moved}, energy {energy_mwh:,.2f} MWh"
    lines += ["", *wrap(text, width)]
    return lines


def _heading(results: Results, width: int) -> list[str]:
    first = results.outcomes[0]
    events = ", ".join(f"{number:,} {kind}" for kind, number in first[0].num_events.items()) or "none"
    several = f" (the first of {len(first)} scenarios)" if len(first) > 1 else ""
    copies = [] if results.copies is None else wrap(f"elaswave's copies: {results.copies}", width)
    return [*wrap(results.title, width), *wrap(f"events{several}: {events}", width), *copies]


def _percent(interval: Interval) -> str:
    text = f"{interval.mean:.2%}"
    return f"{text} +- {interval.half_width:.2%}" if interval.half_width else text


def _part(seconds: float, whole_s: float) -> str:
    return f"{seconds / whole_s:.3%} ({_duration(seconds)})" if whole_s else "-"


def _duration(seconds: float) -> str:
    if seconds < 0:
        return f"-{_duration(-seconds)}"
    for unit_s, unit in ((2 * DAY_S, "days"), (2 * 3600.0, "h"), (600.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / {'days': DAY_S, 'h': 3600.0, 'min': 60.0}[unit]:.1f} {unit}"
    return format_seconds(seconds)
