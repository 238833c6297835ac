"""Layers made up for tests of sums, stores and votes: only sizes, no modules."""

from collections.abc import Sequence

from elaswave.blocks.shapes import LayerShape, TensorSlot, align


def make_shape(
    sizes: Sequence[tuple[int, ...]], *, layer: int = 0, first_id: int = 0, decays: Sequence[bool] | None = None
) -> LayerShape:
    """A layer with tensors of the given shapes, called ``layer<layer>.t0``, ``.t1``, ..."""
    slots: list[TensorSlot] = []
    offset = 0
    for index, size in enumerate(sizes):
        numel = 1
        for length in size:
            numel *= length
        decay = decays[index] if decays is not None else len(size) >= 2
        slots.append(TensorSlot(first_id + index, f"layer{layer}.t{index}", layer, size, offset, numel, decay))
        offset = align(slots[-1].stop)
    return LayerShape(layer, tuple(slots), offset)
