"""Which losses a placement survives. Pure: no torch, no IO."""

from collections.abc import Collection
from math import comb

import msgspec

from elaswave.state.placement import Placement

_SETS = {2: "pairs", 3: "sets of three"}


class Survival(msgspec.Struct, frozen=True, kw_only=True):
    """What workers can be lost at one instant without any block losing its last copy."""

    num_workers: int
    """All that train or hold blocks."""
    num_copies: int
    """Copies of the blocks that have the fewest: fewer workers than this can always be lost."""
    num_fatal: int
    """Of the sets of so many workers those that hold all copies of some block."""

    @property
    def share(self) -> float:
        """Of the sets of `num_copies` workers those whose loss is survived."""
        return 1 - self.num_fatal / comb(self.num_workers, self.num_copies)

    def describe(self) -> str:
        """For people."""
        copies = self.num_copies
        if copies == 1:
            return f"survives no loss of {self.num_fatal} of {self.num_workers} workers: these hold some block alone"
        any_loss = "any worker" if copies == 2 else f"any {copies - 1} workers"
        if copies >= self.num_workers:
            return f"survives the loss of {any_loss}; there are {self.num_workers}"
        sets = _SETS.get(copies, f"sets of {copies}")
        return (
            f"survives the loss of {any_loss}, and at one instant of {100 * self.share:.1f} % of the {sets} "
            f"({self.num_fatal} of {comb(self.num_workers, copies)} hold all copies of some block)"
        )


def survival_of(placement: Placement, workers: Collection[int]) -> Survival | None:
    """Which losses a placement survives; None for one without blocks.

    Args:
        placement: of a job.
        workers: of the job, also those that hold nothing.
    """
    holders = set(zip(placement.owner, placement.followers, strict=True))  # few, of many blocks
    sets = {frozenset((owner, *followers)) for owner, followers in holders}
    if not sets:
        return None
    copies = min(map(len, sets))
    return Survival(
        num_workers=len(set(workers).union(*sets)), num_copies=copies, num_fatal=sum(len(s) == copies for s in sets)
    )
