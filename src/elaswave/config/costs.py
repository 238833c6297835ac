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
    hidden_size = model.hidden_size
    scores = 2 * model.context_length * hidden_size
    if model.family == "llama":
        keys_and_values = 2 * hidden_size * (model.num_kv_heads or model.num_heads) * (hidden_size // model.num_heads)
        # Three matrices of hidden x intermediate size; the usual intermediate size is 8/3 of the hidden size.
        intermediate_size = model.intermediate_size or 8 * hidden_size // 3
        block = 2 * hidden_size * hidden_size + keys_and_values + 3 * hidden_size * intermediate_size + scores
    else:
        block = 12 * hidden_size * hidden_size + scores
    # A look-up moves a row; the head is one matrix.
    return (float(hidden_size), *[float(block)] * model.num_layers, float(hidden_size * vocab_size))
