"""The vote's all-reduce over every transport: right results, the same on all, and an end in every failure."""

import threading
from types import SimpleNamespace

import pytest
from tests.conformance.worlds import in_threads, until

from elaswave.engine.activity import Activity
from elaswave.errors import InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.protocol.step.ballot import add_words
from elaswave.protocol.step.engine import FrameKind
from elaswave.protocol.step.execution import Execution
from elaswave.worker import links as links_module
from elaswave.worker.links import TransportLinks


class Voter(Execution):
    """A worker that does nothing but the all-reduce of its protocol, over its real links."""

    def __init__(self, transport, workers):
        self.worker = transport.worker
        self.links = TransportLinks(transport.worker, (), transport, Activity(), transport.poll)
        self.layout = SimpleNamespace(workers=tuple(workers))
        self.step = self.attempt = 1

    def merge(self, values, merge=add_words):
        life = self.all_reduce(FrameKind.VOTE, values, merge)
        while True:
            try:
                self.links.wait(next(life))
            except StopIteration as end:
                return list(end.value)


def together(transports, function):
    """Run ``function(voter)`` on every worker at the same time."""
    workers = [transport.worker for transport in transports]
    voters = [Voter(transport, workers) for transport in transports]
    return in_threads([lambda voter=voter: function(voter) for voter in voters])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_sums_and_maxima_side_by_side_as_in_the_vote(world, size):
    def merge(total, other):
        return [total[0] + other[0], max(total[1], other[1]), *add_words(total[2:], other[2:])]

    def run(voter):
        return [voter.merge([voter.worker + 1, 100 - voter.worker, *[2**62] * count], merge) for count in (0, 1, 300)]

    wrapped = (size * 2**62 + 2**63) % 2**64 - 2**63
    for results in together(world.linked(size), run):
        for count, result in zip((0, 1, 300), results, strict=True):
            assert result == [size * (size + 1) // 2, 100, *[wrapped] * count]


def test_all_reduces_follow_each_other_without_mixing(world):
    def run(voter):
        seen = []
        for voter.step in range(1, 6):
            seen.append(voter.merge([voter.worker + 10 * voter.step]))
        return seen

    for seen in together(world.linked(3), run):
        assert seen == [[3 + 30 * step] for step in range(1, 6)]


def test_an_all_reduce_ends_when_a_member_is_lost(world):
    transports = world.linked(3)

    def run(index):
        with pytest.raises(PeerLostError):
            Voter(transports[index], [0, 1, 2]).merge([1])

    timer = threading.Timer(0.05, transports[0].close)
    timer.start()
    in_threads([lambda: run(1)])  # 0 lends its value to 1, and is gone
    timer.join()


def test_an_all_reduce_can_be_interrupted_and_done_again_in_the_next_generation(world):
    transports = world.linked(3)

    def interrupted(index):
        with pytest.raises(InterruptedWaitError, match="worker 2 hangs"):
            Voter(transports[index], [0, 1, 2]).merge([1])

    timers = [threading.Timer(0.05, transports[index].interrupt, ["worker 2 hangs"]) for index in range(2)]
    for timer in timers:
        timer.start()
    in_threads([lambda: interrupted(0), lambda: interrupted(1)])
    for timer in timers:
        timer.join()

    def again(index):
        transports[index].advance_generation(1, [0, 1])
        return Voter(transports[index], [0, 1]).merge([index + 1])

    assert in_threads([lambda: again(0), lambda: again(1)]) == [[3], [3]]
    until(lambda: not transports[2].peers, transports[2])


def test_an_all_reduce_is_bounded_in_time(world, monkeypatch):
    monkeypatch.setattr(links_module, "WAIT_TIMEOUT_S", 0.01)
    transports = world.linked(2)
    with pytest.raises(WaitTimeoutError, match="worker 1"):
        Voter(transports[0], [0, 1]).merge([1])
