"""The randomness axis: nothing is ever moved for it, and this says why. Pure.

Other systems must carry generator states along when a micro-batch or a layer changes its worker, or lose them with it.
Here a draw is keyed by what it is for (`elaswave.hashing`, `elaswave.training.random_state`), and the samples of a
micro-batch by its number (`elaswave.data.sampler`), so every plan leaves the draws as they are, for nothing.
"""

import msgspec


class RandomKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What random draws and samples of a step depend on; the same for every plan."""

    draws: tuple[str, ...] = ("run seed", "step", "micro-batch", "layer", "purpose")
    samples: tuple[str, ...] = ("data seed", "step", "micro-batch")
    moved_bytes: int = 0
    """State of generators that a plan moves."""

    def describe(self) -> str:
        """One line for a plan's contributions."""
        return f"draws keyed by ({', '.join(self.draws)}), samples by ({', '.join(self.samples)}): nothing to move"


KEYS = RandomKeys()
"""The keys of every plan."""
