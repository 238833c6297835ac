"""What each worker holds under a layout and a placement, for the log. Pure."""

from collections import Counter

from elaswave.observability.events import Holdings
from elaswave.state.placement import Placement
from elaswave.types import Layout
from elaswave.worker.run_plan import RunPlan


def holdings_of(plan: RunPlan, layout: Layout, placement: Placement) -> dict[int, Holdings]:
    """By worker id; idle workers too.

    Args:
        plan: of the run.
        layout, placement: in force.
    """
    owned, owned_elements = Counter[int](), Counter[int]()
    followed, followed_elements = Counter[int](), Counter[int]()
    for block in plan.blocks:
        owner = placement.owner[block.id]
        owned[owner] += 1
        owned_elements[owner] += block.num_elements
        for follower in placement.followers[block.id]:
            followed[follower] += 1
            followed_elements[follower] += block.num_elements
    sizes = [sum(slot.numel for slot in shape.tensors if not slot.is_buffer) for shape in plan.state.layers]
    found = {}
    for worker in layout.workers:
        layers = layout.layers_of(worker)
        found[worker] = Holdings(
            num_parameters=sum(sizes[unit] for unit in (*layers, *layout.shared_units(layers))),
            num_owned_blocks=owned[worker],
            num_owned_parameters=owned_elements[worker],
            num_followed_blocks=followed[worker],
            num_followed_parameters=followed_elements[worker],
        )
    return found
