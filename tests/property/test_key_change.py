"""The change of a job's key under any order of news, losses, joins, successors and repeated requests: at each instant
all who take part could connect to each other and to the coordinator, and in the end only one key is left."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave.protocol.coordinator.key_change import KEYS_MAX, KeyChange

Ring = tuple[bytes, ...]
HOME, FAR = 0, 1
"""Agents; the first one starts coordinators."""
AGENTS = (HOME, FAR)
FIRST = b"the first key"


class Participant:
    """An agent or a worker."""

    def __init__(self, agent: int, ring: Ring) -> None:
        self.agent = agent
        self.ring = ring
        self.retired: Ring = ()
        self.told: deque[Ring | int] | None = None
        """On its connection, and not read yet: a ring, or a worker that is to be started; None: there is none."""
        self.said: deque[Ring] = deque()
        """By it, and not read yet."""

    def take(self, ring: Ring) -> None:
        self.retired += tuple(key for key in self.ring if key not in ring)
        self.ring = ring
        self.said.append(ring)


def meet(one: Ring, other: Ring) -> bool:
    """As the handshake has it, whoever dials."""
    return one[0] in other or other[0] in one


class World:
    """A job whose coordinator changes the key. A test decides what happens next.

    Args:
        make: makes the coordinator's rules.
    """

    def __init__(self, make: Callable[[Ring, Ring], KeyChange] = KeyChange) -> None:
        self.make = make
        self.change = make((FIRST,), ())
        self.alive = {agent: Participant(agent, (FIRST,)) for agent in AGENTS}
        self.present = set(AGENTS)
        self.num_ids = len(AGENTS)
        for agent in (*AGENTS, *AGENTS):
            self.start(agent, self.new_id())
        for each in list(self.alive):
            self.connect(each)

    def new_id(self) -> int:
        self.num_ids += 1
        self.present.add(self.num_ids)
        return self.num_ids

    def start(self, agent: int, worker: int) -> None:
        self.alive[worker] = Participant(agent, self.alive[agent].ring)

    def connect(self, who: int) -> None:
        participant = self.alive[who]
        if participant.told is not None:
            return
        assert meet(participant.ring, self.change.accepted)
        participant.told, participant.said = deque(), deque()
        self.change.connected(who)
        if self.change.was_begun:
            participant.told.append(self.change.accepted)

    def disconnect(self, who: int) -> None:
        for lost in self.alive[who].told or ():
            if isinstance(lost, int):
                self.present.discard(lost)  # its process does not start, which ends the wait for it
        self.alive[who].told = None

    def tell_all(self) -> None:
        for who in self.present & self.alive.keys():
            if (told := self.alive[who].told) is not None:
                told.append(self.change.accepted)

    # ------------------------------------------------------------------------------------------------- what may happen

    def ask(self, key: bytes) -> None:
        if not self.change.offer(key):
            self.tell_all()

    def go_on(self, key: bytes) -> None:
        if self.change.retire(key, self.present):
            self.tell_all()

    def read(self, who: int) -> None:
        participant = self.alive[who]
        if participant.told:
            told = participant.told.popleft()
            if isinstance(told, int):
                self.start(who, told)
            else:
                participant.take(told)

    def hear(self, who: int) -> None:
        participant = self.alive[who]
        if participant.told is not None and participant.said and participant.said.popleft() == self.change.accepted:
            self.change.has(who)

    def join(self, agent: int) -> None:
        told = self.alive[agent].told if agent in self.alive else None
        if told is not None:
            told.append(self.new_id())

    def lose(self, who: int) -> None:
        if who == HOME:
            return  # the job ends with it
        for each in [other for other, held in self.alive.items() if other == who or held.agent == who]:
            self.disconnect(each)
            del self.alive[each]
            self.present.discard(each)

    def replace_coordinator(self) -> None:
        for who in self.alive:
            self.disconnect(who)
        home = self.alive[HOME]
        self.change = self.make(home.ring, home.retired)

    def step(self, kind: int, number: int) -> None:
        """One of these things."""
        whose = sorted(self.alive)[number % len(self.alive)]
        key = b"key %d" % (number % 3)
        [
            lambda: self.ask(key),
            lambda: self.go_on(key),
            lambda: self.read(whose),
            lambda: self.read(whose),
            lambda: self.hear(whose),
            lambda: self.hear(whose),
            lambda: self.join(number % 2),
            lambda: self.lose(whose) if number % 4 == 0 else self.disconnect(whose),
            lambda: self.connect(whose),
            lambda: self.replace_coordinator() if number % 3 == 0 else None,
            self.settle,
        ][kind]()
        self.check()

    def settle(self) -> None:
        """All that was said is read and heard."""
        while any(held.told or (held.told is not None and held.said) for held in self.alive.values()):
            for who in list(self.alive):
                self.read(who)
                self.hear(who)

    def check(self) -> None:
        """Everybody who takes part could connect to everybody else."""
        rings = [self.alive[who].ring for who in self.present & self.alive.keys()] + [self.change.accepted]
        assert all(meet(one, other) for one in rings for other in rings)

    def end(self) -> None:
        """From now on nothing is lost, and a person asks until the key is changed."""
        key = next(key for key in (b"key %d" % number for number in range(9)) if key not in self.change.retired)
        for _ in range(3):
            self.ask(key)
            for who in sorted(self.alive):
                self.connect(who)
            self.settle()
            for who in sorted(self.alive):
                self.connect(who)
            self.check()
            self.go_on(key)
        assert self.change.is_over(key, self.present), self.change.waits_for(self.present)
        assert {held.ring for who, held in self.alive.items() if who in self.present} == {(key,)}


def play(schedule: Sequence[tuple[int, int]], make: Callable[[Ring, Ring], KeyChange] = KeyChange) -> None:
    world = World(make)
    for kind, number in schedule:
        world.step(kind, number)
    if len(world.change.accepted) < KEYS_MAX:  # else one of the changes that were begun is ended
        world.end()


SCHEDULES = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 11)), max_size=120)


@settings(max_examples=150)
@given(SCHEDULES)
def test_all_who_take_part_can_always_meet(schedule: list[tuple[int, int]]) -> None:
    play(schedule)


def test_a_change_without_trouble_comes_to_its_end() -> None:
    play([])


# ------------------------------------------------------------------------------------ what is wrong on purpose is found


class PrefersTheNewKey(KeyChange):
    def offer(self, key: bytes) -> str:
        said = super().offer(key)
        self.accepted = (key, *(other for other in self.accepted if other != key))
        return said


class WaitsForNobody(KeyChange):
    def waits_for(self, present: object) -> list[int]:
        return []


class ForgetsWhatWasRetired(KeyChange):
    def offer(self, key: bytes) -> str:
        self.retired = ()
        return super().offer(key)


def test_a_new_key_that_is_preferred_at_once_is_found() -> None:
    world = World(PrefersTheNewKey)
    first, second = sorted(world.present - set(AGENTS))[:2]
    world.ask(b"key 0")
    world.read(first)
    world.replace_coordinator()  # before the agent that starts its successor has heard of that key, and it is lost
    world.connect(second)
    world.ask(b"key 1")
    world.read(second)
    with pytest.raises(AssertionError):
        world.check()


def test_who_is_not_waited_for_is_found() -> None:
    world = World(WaitsForNobody)
    world.ask(b"key 0")
    world.go_on(b"key 0")
    with pytest.raises(AssertionError):
        world.check()


def test_a_retired_key_never_counts_again() -> None:
    change = KeyChange((FIRST,))
    assert not change.offer(b"key 0") and not change.has(1) and change.retire(b"key 0", [1])
    assert "was changed for another one already" in change.offer(FIRST) and change.accepted == (b"key 0",)
    forgetful = ForgetsWhatWasRetired((b"key 0",), (FIRST,))
    assert not forgetful.offer(FIRST), "the rule is not what refuses it"


def test_each_request_means_the_same_when_it_comes_twice() -> None:
    change = KeyChange((FIRST,))
    assert not change.was_begun
    change.offer(b"key 0")
    change.has(1)
    change.offer(b"key 0")
    assert change.accepted == (FIRST, b"key 0") and change.waits_for([1, 2]) == [2] and change.was_begun
    assert not change.retire(b"key 0", [1, 2]) and not change.retire(b"key 1", [1])
    assert change.retire(b"key 0", [1]) and not change.retire(b"key 0", [1])
    assert (change.accepted, change.retired, change.was_begun) == ((b"key 0",), (FIRST,), True)
    assert not change.is_over(b"key 0", [1]), "what was said before is no answer"
    change.has(1)
    assert change.is_over(b"key 0", [1]) and not change.is_over(b"key 1", [1])


def test_another_process_of_an_id_has_to_say_so_anew() -> None:
    change = KeyChange((FIRST, b"key 0"))
    change.has(1)
    change.connected(1)
    assert change.waits_for([1]) == [1]


def test_changes_that_were_never_ended_have_a_bound() -> None:
    change = KeyChange((FIRST,))
    said = [change.offer(b"key %d" % number) for number in range(4)]
    assert said[:3] == [""] * 3 and "begun and not ended" in said[3] and len(change.accepted) == 4
    for peer in (1, 2):
        change.has(peer)
    assert change.retire(b"key 1", [1, 2])
    assert change.retired == (FIRST, b"key 0", b"key 2")
