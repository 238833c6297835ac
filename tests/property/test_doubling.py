"""Recursive doubling: every worker's value reaches every worker exactly once, whatever their number."""

from hypothesis import given
from hypothesis import strategies as st

from elaswave.protocol.step.traffic import doubling, doubling_partners


@given(size=st.integers(1, 70))
def test_recursive_doubling_brings_every_value_to_every_worker_once(size):
    workers = tuple(3 * rank + 1 for rank in range(size))
    roles = {worker: doubling(workers, worker) for worker in workers}
    held = {worker: {worker: 1} for worker in workers}
    for worker, (helper, _, _) in roles.items():
        if helper is not None:
            assert roles[helper][1] == worker
            held[helper] = {**held[helper], **held[worker]}
    num_turns = {len(partners) for helper, _, partners in roles.values() if helper is None}
    assert len(num_turns) == 1
    for turn in range(num_turns.pop()):
        after = dict(held)
        for worker, (helper, _, partners) in roles.items():
            if helper is None:
                partner = partners[turn]
                assert roles[partner][2][turn] == worker
                assert not held[worker].keys() & held[partner].keys()
                after[worker] = {**held[worker], **held[partner]}
        held = after
    for worker, (helper, _, _) in roles.items():
        assert held[worker if helper is None else helper].keys() == set(workers)
        assert all(worker in doubling_partners(workers, partner) for partner in doubling_partners(workers, worker))
