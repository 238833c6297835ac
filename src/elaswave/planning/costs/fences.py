"""What a model with fences costs: fewer bytes between layers, a little more memory and time. Pure."""

from collections.abc import Mapping

import msgspec

from elaswave.fences import coded_bytes, kept_places_bytes
from elaswave.planning.costs.layers import Costs


def fenced_costs(
    costs: Costs, codecs: Mapping[int, str], *, element_bytes: int, memory_bandwidth_bytes_per_s: float | None = None
) -> Costs:
    """The costs of a model with fences.

    What leaves the layer before a fence is smaller. Its worker keeps the coded bytes of a micro-batch until its
    backward, since a step that is tried again may send them again; where gradients use the forward's places, either
    side keeps these, too. Such gradients are shorter than the activations, and are counted as if they were not. A codec
    reads and writes memory: once the tensor and
    its coded bytes, on either side and in either direction, which is the least that it can take.

    Args:
        costs: without fences.
        codecs: by position of the layer before each fence.
        element_bytes: of an activation.
        memory_bandwidth_bytes_per_s: of the device; None: the codec's time is in what is measured.
    """
    layers = list(costs.layers)
    for index, codec in codecs.items():
        raw = costs.layers[index].boundary_bytes
        num_elements = round(raw / element_bytes)
        coded = float(coded_bytes(codec, (num_elements,), element_bytes))
        if coded >= raw:
            continue
        moving_s = (raw + coded) / memory_bandwidth_bytes_per_s if memory_bandwidth_bytes_per_s else 0.0
        places = kept_places_bytes(codec, num_elements)
        before, behind = layers[index], layers[index + 1]
        layers[index] = msgspec.structs.replace(
            before,
            boundary_bytes=coded,
            activation_bytes=before.activation_bytes + coded + places,
            forward_s=before.forward_s + moving_s,
            input_gradient_s=before.input_gradient_s + moving_s,
        )
        layers[index + 1] = msgspec.structs.replace(
            behind,
            activation_bytes=behind.activation_bytes + places,
            forward_s=behind.forward_s + moving_s,
            input_gradient_s=behind.input_gradient_s + moving_s,
        )
    return msgspec.structs.replace(costs, layers=tuple(layers))
