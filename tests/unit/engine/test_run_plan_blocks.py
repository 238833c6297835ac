"""How large blocks are, and how much of them is copied in a step."""

from elaswave.config.load import load_config
from elaswave.engine.blueprint import Blueprint


def plan(*settings: str) -> Blueprint:
    return Blueprint(load_config(None, list(settings)))


def test_a_block_may_be_larger_than_what_is_copied_in_a_step() -> None:
    """Else one owner of all would send one block in a step, since some block must always go."""
    blueprint = plan("elastic.block_size=4096", "elastic.refill_bytes_per_step=1000")
    assert max(block.num_elements for block in blueprint.blocks) == 4096
    assert blueprint.refill_elements == blueprint.move_elements == 4096
    assert blueprint.move_bounds[0] >= 4096
    fixed = plan("elastic.block_size=4096", "elastic.copy_bytes_per_step=1000")
    assert fixed.move_bounds == (4096, 4096) and fixed.move_elements == 4096
    assert fixed.refill_elements == (4 << 20) // 12, "as configured: more than a block"
