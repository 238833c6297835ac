"""What each worker holds under a layout and a placement, for the log. Pure."""

from collections import Counter

from elaswave.blocks.placement import Placement
from elaswave.job.plan import RunPlan
from elaswave.observability.events import Holdings
from elaswave.types import Layout


def holdings_of(plan: RunPlan, layout: Layout, placement: Placement) -> dict[int, Holdings]:
    """By worker id; idle workers too.

    Args:
        plan: of the run.
        layout, placement: in force.
    """
    owners, followers = placement.owner, placement.followers
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for block in plan.blocks:  # there are many, but few kinds of holders
        alike.setdefault((owners[block.id], followers[block.id]), []).append(block.num_elements)
    owned, owned_elements = Counter[int](), Counter[int]()
    followed, followed_elements = Counter[int](), Counter[int]()
    for (owner, others), elements in alike.items():
        num_elements = sum(elements)
        owned[owner] += len(elements)
        owned_elements[owner] += num_elements
        for follower in others:
            followed[follower] += len(elements)
            followed_elements[follower] += num_elements
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
