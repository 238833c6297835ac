"""The links of a simulated worker: frames by key and generation, as the real transport keeps them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elaswave.blocks.placement import Placement
from elaswave.protocol.messages import FIRST_GENERATION
from elaswave.protocol.step.engine import Key
from elaswave.types import Layout
from verify.simulator.host import Host
from verify.simulator.messages import SimFrame

_LANDED: Any = object()


def closed(peer: int) -> str:
    """How a link has ended, as an accusation says it."""
    return f"the link to worker {peer} has closed"


class SimLinks:
    """See `elaswave.protocol.step.engine.Links`.

    Args:
        host: the worker.
    """

    def __init__(self, host: Host) -> None:
        self.generation = FIRST_GENERATION
        self.members: frozenset[int] = frozenset(host.model.layout.workers)
        self.num_frames = 0
        """That have come."""
        self.dead: set[int] = set()
        """Peers whose process has ended."""
        self.closed: set[int] = set()
        """Peers whose link has closed."""
        self.broken: tuple[int, str] | None = None
        """A peer whose link has ended, though frames of this generation were sent there, or were to be; and how."""
        self._wanted: dict[int, bool] = {}
        """Peers to which links are made in the background -> whether they stand."""
        self._host = host
        self._sent_to: set[int] = set()
        """Peers to which frames of this generation have been sent."""
        self._here: dict[Key, Any] = {}
        """Frames of this generation that have come, or `_LANDED`."""
        self._later: dict[int, dict[Key, SimFrame]] = {}
        """Frames of generations that it has not reached yet."""
        self._slots: dict[Key, Callable[[Any], None]] = {}

    def connect(self, layout: Layout, placement: Placement) -> None:
        """Links are there as soon as they are needed; those that have closed are made again."""
        for peer in self.closed & set(layout.workers) - self.dead:
            self.closed.discard(peer)
            self._host.world.open_again(self._host.id, peer)

    def want(self, addresses: Mapping[int, str]) -> None:
        """They take a while."""
        before = self._wanted
        self._wanted = {peer: before.get(peer, False) for peer in addresses}
        for peer in addresses.keys() - before.keys():
            self._dial(peer)

    def _dial(self, peer: int) -> None:
        world = self._host.world
        world.after(3 * world.delay(), self._host, self._stands, peer)

    def _stands(self, peer: int) -> None:
        if peer in self._wanted and peer not in self.dead:
            if peer in self.closed:
                self.closed.discard(peer)
                self._host.world.open_again(self._host.id, peer)
            self._wanted[peer] = True
            self._host.machine.look_at_links()

    def has(self, peer: int) -> bool:
        """Whether it stands."""
        return self._wanted.get(peer, False) and peer not in self.closed

    def edit(self, generation: int, members: tuple[int, ...]) -> None:
        """Frames of older generations are nothing any more."""
        self.generation, self.members = generation, frozenset(members)
        self._slots, self.broken = {}, None
        self._sent_to = set()
        self._here = dict(self._later.pop(generation, {}))
        for old in [other for other in self._later if other < generation]:
            del self._later[old]

    def post(self, key: Key, slot: Callable[[Any], None]) -> None:
        """A frame lands in its slot as it arrives."""
        if key in self._here:
            if self._here[key] is not _LANDED:
                self._land(key, slot, self._here[key])
        else:
            self._slots[key] = slot

    def send(self, key: Key, payload: Any) -> None:
        """Sends a frame."""
        host = self._host
        kind, step, attempt, a, b, peer = key
        self._sent_to.add(peer)
        if peer in self.closed:
            self.broken = peer, closed(peer)
        execution = host.machine.execution
        frame = SimFrame(self.generation, execution.step, execution.attempt, payload)
        host.world.to_worker(host, peer, Key(kind, step, attempt, a, b, host.id), frame)

    def take(self, key: Key) -> Any:
        """A frame that is here."""
        frame = self._here.pop(key)
        return None if frame is _LANDED else self._use(key, frame)

    # -------------------------------------------------------------------------------------------------- for the worker

    def close(self, peer: int) -> None:
        """The link to a peer has ended."""
        self.closed.add(peer)
        if peer in self._wanted and peer not in self.members:
            self._dial(peer)
        if peer in self._sent_to:
            self.broken = peer, closed(peer)

    def arrive(self, key: Key, frame: SimFrame) -> bool:
        """A frame comes in; whether it is of the present generation."""
        self.num_frames += 1
        if frame.generation > self.generation:
            self._later.setdefault(frame.generation, {})[key] = frame
            return False
        if frame.generation < self.generation or key.peer not in self.members:
            return False
        slot = self._slots.pop(key, None)
        if slot is None:
            self._here[key] = frame
        else:
            self._land(key, slot, frame)
        return True

    def missing(self, keys: Iterable[Key]) -> set[Key]:
        """Those of some frames that are not here."""
        return {key for key in keys if key not in self._here}

    def _land(self, key: Key, slot: Callable[[Any], None], frame: SimFrame) -> None:
        self._here[key] = _LANDED
        slot(self._use(key, frame))

    def _use(self, key: Key, frame: SimFrame) -> Any:
        host, execution = self._host, self._host.machine.execution
        is_member = key.peer in self.members
        host.world.see.consumed(host.id, self.generation, execution.step, execution.attempt, frame[:3], is_member)
        return frame.value
