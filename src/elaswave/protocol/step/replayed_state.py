"""What a worker says again on every new connection to a coordinator. No IO, no locks.

A message that was handled may have died with the coordinator that handled it, and an acknowledged message is gone on
the worker's side. So whatever a coordinator keeps in memory only is a *standing fact*: the worker keeps it until it
does not hold any more, and says it again to every successor. What a coordinator makes durable before it acknowledges
(published losses, decisions) needs no repetition.

The order in which facts are said is a contract: parts of checkpoints before the end. A coordinator that has heard the
end of every member has heard of all their parts, so it never ends a job without a checkpoint whose parts are written.
"""

from collections.abc import Callable
from typing import Any


class ReplayedState:
    """The standing facts of one worker.

    Messages are opaque here: the product and the simulator have their own.
    """

    def __init__(self) -> None:
        self._ready: Any = None
        self._broken_links: dict[int, Any] = {}
        self._parts: dict[tuple[int, int], Any] = {}
        """(step, generation) of a checkpoint -> what this worker said of its part of it."""
        self._leaving: Any = None
        self._linked: Any = None
        self._paused: Any = None
        self._unsound: Any = None
        self._end: Any = None

    def ready(self, message: Any) -> None:
        """The worker holds its state and begins to train."""
        self._ready = message

    def link_lost(self, peer: int, message: Any) -> None:
        """The link to a peer has ended in the present generation."""
        self._broken_links[peer] = message

    @property
    def has_broken_links(self) -> bool:
        """Whether a link has ended in the present generation."""
        return bool(self._broken_links)

    def part(self, step: int, generation: int, message: Any) -> None:
        """The worker's part of a checkpoint is written, or could not be."""
        self._parts[step, generation] = message

    def leaving(self, message: Any) -> None:
        """The worker's machine will be taken away: it must leave."""
        self._leaving = message

    def ended(self, message: Any) -> None:
        """The worker has made all its steps."""
        self._end = message

    def linked(self, message: Any) -> None:
        """Notes to which of the peers that the worker is to be linked to there are links; None: nobody is wanted any
        more."""
        self._linked = message

    def paused(self, message: Any) -> None:
        """The worker waits before its next step, or was let go on since."""
        self._paused = message

    def unsound(self, message: Any) -> None:
        """The worker waits for a new generation, since copies are wrong."""
        self._unsound = message

    def moved(self) -> None:
        """The worker has left its generation: what it said of broken links, of itself and of its end was of the old
        one. Links to those that join outlive it."""
        self._broken_links.clear()
        self._paused = self._unsound = self._end = None

    def settled(self, step: int) -> None:
        """The checkpoint of a step is durable, or given up for good."""
        self._keep_parts(lambda part: part != step)

    def rolled_back(self, step: int) -> None:
        """All members go back to a checkpoint: parts of later ones are void."""
        self._keep_parts(lambda part: part <= step)

    def _keep_parts(self, wanted: Callable[[int], bool]) -> None:
        self._parts = {key: message for key, message in self._parts.items() if wanted(key[0])}

    def standing(self) -> list[Any]:
        """Lists all that holds, in the order in which it must be said."""
        parts = [message for _, message in sorted(self._parts.items(), key=lambda part: part[0])]
        here = [self._ready, self._linked, *self._broken_links.values(), self._leaving]
        facts = [*here, *parts, self._paused, self._unsound, self._end]
        return [fact for fact in facts if fact is not None]
