"""Ratios of adaptive fences: the slowest gets what was asked for, the others no more than they need. Pure.

A fence's time is that of the slowest link that it crosses, in either direction, over a step: with pipelines side by
side several links carry a fence's tensors, and it has one ratio, by the slowest of them. A step is bounded by the
busiest worker, and by the slowest fence at its largest ratio. Every other fence has the smallest ratio with which it
takes no longer than that; one that takes no longer as it is, has none (1). Cuts and ratios depend on each other:
`plan_with_ratios` finds them in turns. For devices of one kind.

Of AdaTopK (FusionLLM, arXiv 2410.12707) the abstract says that it compresses most where links are slowest; the rule is
ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elaswave.fences import TopK, coded_bytes, top_k_of
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.far_apart.job import FarJob, FarPlan, allocation_of_plan
from elaswave.planning.far_apart.objective import time_plan
from elaswave.planning.programs.routes import make_routes
from elaswave.types import Layout

ROUNDS = 3
"""At most so many times a cut and its ratios are found after each other."""


def adapted_ratios(
    layout: Layout,
    largest: Mapping[int, int],
    raw_bytes: Sequence[float],
    layer_s: Sequence[Sequence[float]],
    cluster: Cluster,
    *,
    element_bytes: int,
) -> dict[int, int]:
    """Computes the ratio of each adaptive fence.

    Args:
        layout: who runs what.
        largest: ratio by position of the layer before each fence.
        raw_bytes: of the tensor behind each layer, not coded; as many as layers.
        layer_s: seconds of each layer's forward and backwards at speed 1.
        cluster: of the layout's workers; without a network nothing is known of links, and all have the largest.
        element_bytes: of the tensors.
    """
    if cluster.network is None:
        return dict(largest)
    crossings = {boundary: _seconds_per_byte(layout, boundary, cluster) for boundary in largest}

    def seconds(boundary: int, ratio: int) -> float:
        num_elements = round(raw_bytes[boundary] / element_bytes)
        codec = "none" if ratio == 1 else str(TopK(ratio))
        return crossings[boundary] * coded_bytes(codec, (num_elements,), element_bytes)

    slowest_s = {boundary: seconds(boundary, ratio) for boundary, ratio in largest.items()}
    bound_s = max([_busiest_s(layout, layer_s, cluster), *slowest_s.values()])
    found = {}
    for boundary, most in largest.items():
        if slowest_s[boundary] >= bound_s:
            found[boundary] = most
            continue
        low, high = 1, most  # the smallest that is enough: what is sent does not grow with the ratio
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if seconds(boundary, middle) <= bound_s else (middle + 1, high)
        found[boundary] = low
    return found


def plan_with_ratios(job: FarJob, plan_for: Callable[[FarJob], FarPlan]) -> tuple[FarJob, FarPlan]:
    """Makes a plan, and the job with the ratios that its cut wants: takes the best of a few rounds, each of which plans
    with the ratios of the round before. The last one, and the one after a round that changes nothing, plans without
    codes: where links are fast, a cut that counts on codes is not what is best without them.

    Args:
        job: with any codec; one that is not adaptive needs one round.
        plan_for: a planner.
    Raises:
        InfeasiblePlan: of the planner.
    """
    top_k = top_k_of(job.codec)
    if top_k is None or not top_k.is_adaptive:
        return job, plan_for(job)
    tried: list[tuple[float, FarJob, FarPlan]] = []
    begins = [job]
    while len(tried) < ROUNDS:
        if not begins or len(tried) == ROUNDS - 1:
            begins = [replace(job, ratios=dict.fromkeys(range(job.num_layers), 1))]
        plan = plan_for(begins[0])
        layout = make_routes(allocation_of_plan(job, plan), job.costs[0], job.cluster)
        largest = {fence - 1: top_k.ratio for fence in plan.fences}
        ratios = adapted_ratios(
            layout, largest, job.raw_bytes.tolist(), job.costs[0].layer_s, job.cluster, element_bytes=job.element_bytes
        )
        adapted = replace(job, ratios=ratios)
        tried.append((time_plan(adapted, plan).shared_s, adapted, plan))
        begins = [] if ratios == begins[0].ratios else [adapted]
    _, best, plan = min(tried, key=lambda each: each[0])
    return best, plan


def _seconds_per_byte(layout: Layout, boundary: int, cluster: Cluster) -> float:
    """Computes the seconds per byte of the slowest link that carries what leaves a layer, for all micro-batches that
    cross it there; returns 0 if none does."""
    assert cluster.site is not None
    loads: dict[tuple[int, int], float] = {}
    for route in layout.routes:
        for before, after in zip(route, route[1:]):
            if after.start != boundary + 1 or before.worker == after.worker:
                continue
            for source, target in ((before.worker, after.worker), (after.worker, before.worker)):
                first, second = cluster.index_of([source, target]).tolist()
                each_s = 1 / cluster.link_between(first, second).bandwidth_bytes_per_s
                link = (source, int(cluster.site[second]))
                loads[link] = loads.get(link, 0.0) + each_s
    return max(loads.values(), default=0.0)


def _busiest_s(layout: Layout, layer_s: Sequence[Sequence[float]], cluster: Cluster) -> float:
    """Computes the seconds that the busiest worker computes in a step."""
    speed = cluster.speed_of()
    busy: dict[int, float] = {}
    for route in layout.routes:
        for hop in route:
            own_s = sum(sum(layer_s[layer]) for layer in range(hop.start, hop.stop))
            busy[hop.worker] = busy.get(hop.worker, 0.0) + own_s / speed(hop.worker)
    return max(busy.values(), default=0.0)
