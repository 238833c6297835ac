"""When a job has made all its steps: the coordinator's part of rule W10. A pure function."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class MemberEnd(NamedTuple):
    """A worker has said that it has made its last step."""

    epoch: int
    """In which it said so."""
    step: int
    """The last one."""


def all_have_ended(members: Iterable[int], epoch: int, ends: Mapping[int, MemberEnd], published: int) -> bool:
    """Whether no worker is needed any more.

    Args:
        members: of the present epoch.
        epoch: the present one. Only in it does a member know its roles, so an end of an older one does not count.
        ends: worker -> its end.
        published: the newest step whose loss is known: until its last one is, another member may have to tell of it.
    """
    return all(worker in ends and ends[worker].epoch == epoch and ends[worker].step <= published for worker in members)
