"""The estimate by which layers are dealt to stages when the configuration does not say.

Only ratios count, and only for speed: the split does not show in the result. A planner with measured times does
better; this one needs nothing but the sizes, so that every worker and every machine gets the same answer.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaswave.config.schema import ModelConfig


def layer_costs(model: "ModelConfig", vocab_size: int) -> tuple[float, ...]:
    """Work of each layer per token, embedding first and head last.

    Args:
        model: the sizes.
        vocab_size: number of different tokens.
    Returns:
        Multiplications of a forward pass for one token, ``num_layers + 2`` of them.
    """
    width = model.width
    scores = 2 * model.context_length * width
    if model.family == "llama":
        keys_and_values = 2 * width * (model.num_kv_heads or model.num_heads) * (width // model.num_heads)
        # Three matrices of width x hidden; the usual hidden size is 8/3 of the width.
        hidden = model.hidden_size or 8 * width // 3
        block = 2 * width * width + keys_and_values + 3 * width * hidden + scores
    else:
        block = 12 * width * width + scores
    # A look-up moves a row; the head is one matrix.
    return (float(width), *[float(block)] * model.num_layers, float(width * vocab_size))
