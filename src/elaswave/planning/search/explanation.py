"""What a plan says of itself: what each axis brought, and one line of why. Pure."""

from collections.abc import Collection, Mapping

from elaswave.planning.search.candidates import Candidate
from elaswave.planning.search.options import AXES

NOTHING_MOVED = (
    "draws keyed by (run seed, step, micro-batch, layer, purpose), samples by (data seed, step, micro-batch): "
    "nothing to move"
)
"""Of the randomness axis, for which no plan moves anything. Other systems must carry generator states along when a
micro-batch or a layer changes its worker, or lose them with it. Here a draw is keyed by what it is for
(`elaswave.hashing`, `elaswave.training.random_state`), and the samples of a micro-batch by its number
(`elaswave.data.sampler`), so every plan leaves the draws as they are, for nothing."""


def contributions_of(
    axes: Collection[str], tuned: Candidate, best: Candidate, staying: Candidate | None, even_s: float | None
) -> Mapping[str, str]:
    """Axis -> what it brought, or "off".

    Args:
        axes: that a plan may use.
        tuned: the candidate that was chosen, at the levels that were chosen.
        best: the same at the levels of before.
        staying: all workers where they are; None if that is impossible.
        even_s: seconds of a step of `staying` in closed form if micro-batches were not dealt by speed; None without it.
    """
    brought: dict[str, str] = dict.fromkeys(sorted(AXES), "off")
    if "randomness" in axes:
        brought["randomness"] = NOTHING_MOVED
    if staying is None or even_s is None:
        forced = "rerouting alone does not fit into memory"
        brought["dataflow"] = forced if "dataflow" in axes else "off"
        brought["graph"] = f"{best.origin}: {forced}" if "graph" in axes else "off"
    else:
        if "dataflow" in axes:
            brought["dataflow"] = f"micro-batches by speed: {_change(even_s, staying.found.step_s)}"
        if "graph" in axes:
            brought["graph"] = f"{best.origin}: {_change(staying.step_s, best.step_s)}"
    if "frequency" in axes:
        power = f", {tuned.found.power_w:.0f} W instead of {best.found.power_w:.0f} W"
        same = tuned is best or not best.found.power_w
        brought["frequency"] = f"{_change(best.step_s, tuned.step_s)}{'' if same else power}"
    return brought


def reason_of(tuned: Candidate, staying: Candidate | None) -> str:
    """One line; arguments as of `contributions_of`."""
    found = tuned.found
    share = found.pace_s / tuned.step_s if tuned.step_s else 1.0
    compared = "rerouting alone does not fit" if staying is None else (
        f"rerouting alone: {_shown(staying.step_s)}"
    )  # fmt: skip
    return (
        f"{tuned.origin}, {tuned.allocation.schedule}: {_shown(tuned.step_s)} per step ({compared}); worker "
        f"{found.bottleneck_worker} of stage {found.bottleneck_stage} computes for {100 * share:.0f} % of it"
    )


def _change(before_s: float, after_s: float) -> str:
    if abs(before_s - after_s) <= 1e-9 * before_s:
        return "nothing to gain"
    return f"{_shown(before_s)} to {_shown(after_s)} per step ({100 * (after_s / before_s - 1):+.1f} %)"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
