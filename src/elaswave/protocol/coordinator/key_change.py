"""When the keys of a running job are exchanged for a new one. No IO, no secrets read: keys are compared, and no more.

Every participant has a ring: keys that it accepts, of which it prefers the first. Two of them meet if one
accepts the first key of the other (`elaswave.transport.handshake`). A change has two phases, and between any two lines
of them somebody may end, come, or be told late:

K1  Offer: a new key is added behind those that all accept, so that everybody goes on preferring what everybody accepts.
K2  Retire: the new key alone remains, once every participant has said that it accepts it. Who was told already proves
    the new key, which all others accept; who was not prefers an old one, and is answered by the new one.
K3  Every participant is waited for: members, joiners that are started, and hosts that are not given up, also those
    that are not connected just now. Who is lost is waited for no more; who comes, or comes again, is told the ring
    before all else, and has to say so anew: another process may bear its id.
K4  A coordinator goes by what was said to it. Its successor begins with the ring of the process that starts it, which
    is a participant: before anybody may have retired a key, that ring has the new one.

Each request means the same when it comes twice, or to a successor: a key that is there is not added, and one that
stands alone is not retired again. So nothing of it is in the journal.
"""

from collections.abc import Iterable

KEYS_MAX = 4
"""That are accepted at a time: changes that were begun and never ended add up."""
RETIRED_MAX = 8
"""Of which holders are told that they were changed."""


class KeyChange:
    """The ring of a job, as one coordinator has it.

    Args:
        accepted: its keys, the preferred one first.
        retired: those that were changed.
    """

    def __init__(self, accepted: tuple[bytes, ...], retired: tuple[bytes, ...] = ()) -> None:
        self.accepted = accepted
        self.retired = retired
        self._sent: set[int] = set()
        """Participants that have said that they have this ring."""

    @property
    def was_begun(self) -> bool:
        """Whether participants may have, or need, another ring than the one that they were started with."""
        return len(self.accepted) > 1 or bool(self.retired)

    def offer(self, key: bytes) -> str:
        """All are to accept a new key too (K1).

        Returns:
            Why they are not; empty: they are, or do already.
        """
        if key in self.retired:
            return "this key of the job was changed for another one already: make a new one"
        if key in self.accepted:
            return ""
        if len(self.accepted) == KEYS_MAX:
            return (
                f"{KEYS_MAX} keys of the job are good already, of changes that were begun and not ended: end the last "
                "one first"
            )
        self._hold((*self.accepted, key), self.retired)
        return ""

    def retire(self, key: bytes, present: Iterable[int]) -> bool:
        """All others are to count no more (K2), if that may be.

        Args:
            key: the one that remains.
            present: all participants (K3).
        Returns:
            Whether it was done now.
        """
        if key not in self.accepted or len(self.accepted) == 1 or self.waits_for(present):
            return False
        others = tuple(other for other in self.accepted if other != key)
        self._hold((key,), (*self.retired, *others)[-RETIRED_MAX:])
        return True

    def is_over(self, key: bytes, present: Iterable[int]) -> bool:
        """Tells whether a key stands alone, with all participants."""
        return self.accepted == (key,) and not self.waits_for(present)

    def waits_for(self, present: Iterable[int]) -> list[int]:
        """Participants that have not said that they have the ring."""
        return sorted(set(present) - self._sent)

    def connected(self, participant: int) -> None:
        """A participant has connected: it may be another process than before (K3)."""
        self._sent.discard(participant)

    def has(self, participant: int) -> None:
        """A participant has said that it has the present ring."""
        self._sent.add(participant)

    def _hold(self, accepted: tuple[bytes, ...], retired: tuple[bytes, ...]) -> None:
        self.accepted, self.retired = accepted, retired
        self._sent.clear()
