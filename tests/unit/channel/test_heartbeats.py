"""When a control client sends its next heartbeat."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave.channel.client import next_heartbeat_s


@pytest.mark.parametrize(
    ("now_s", "due_s"), [(0.0, 0.25), (10.0, 10.25), (10.01, 10.25), (10.24, 10.25), (10.26, 10.5)]
)
def test_clients_of_one_machine_send_theirs_at_one_instant(now_s: float, due_s: float) -> None:
    assert next_heartbeat_s(now_s, 0.25) == due_s


@given(st.floats(0.0, 1e8), st.floats(0.005, 10.0))
def test_the_next_one_comes_later_and_not_later_than_an_interval(now_s: float, interval_s: float) -> None:
    due_s = next_heartbeat_s(now_s, interval_s)
    assert now_s < due_s <= now_s + interval_s + 2 * math.ulp(now_s + interval_s)
