"""The generators that draws without a generator of their own come from, each at its device.

Nothing outside of this folder seeds them by itself: a draw on a device comes from the device's generator, and one that
is keyed by the processor's alone would depend on what was drawn there before.
"""

import torch


def seed_host(key: int) -> None:
    """Seeds the processor's.

    Args:
        key: in [0, 2**64); torch's generator uses only the low 32 bits.
    """
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


def seed_at(place: torch.device, key: int) -> None:
    """Seeds the one that draws at a place come from.

    Args:
        place: where the drawn tensor is to lie.
        key: in [0, 2**64).
    """
    if place.type == "cpu":
        seed_host(key)
        return
    module = torch.get_device_module(place.type)
    generators = getattr(module, "default_generators", ())
    if generators:
        generators[place.index or 0].manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    else:
        module.manual_seed_all(key & 0xFFFFFFFF)
