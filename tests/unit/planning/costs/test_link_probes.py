"""A link's costs from a few probes: what is probed, and what is made of the seconds."""

import random
from collections.abc import Callable

import pytest

from elaswave.planning.costs.link_probes import FIRST_BYTES, PROBE_BYTES_MAX, LinkProbe, MeasuredLinks, probing


def measured(seconds: Callable[[LinkProbe], float]) -> tuple[MeasuredLinks, list[LinkProbe]]:
    """What is found on a link on which a probe takes so long, and the probes."""
    steps, asked = probing(), []
    probe = next(steps)
    while True:
        asked.append(probe)
        try:
            probe = steps.send(seconds(probe))
        except StopIteration as end:
            return end.value, asked


def link(trip_s: float, out: float, back: float) -> Callable[[LinkProbe], float]:
    """Rates in bytes a second."""
    return lambda probe: trip_s + probe.sent_bytes / out + probe.returned_bytes / back


@pytest.mark.parametrize("trip_s", [0.0002, 0.02, 0.54])
@pytest.mark.parametrize("mbit_per_s", [0.1, 8, 1000])
def test_both_directions_are_found(trip_s: float, mbit_per_s: float) -> None:
    rate = mbit_per_s * 1e6 / 8
    found, asked = measured(link(trip_s, rate, rate / 5))
    assert found.out.bandwidth_bytes_per_s == pytest.approx(rate)
    assert found.back.bandwidth_bytes_per_s == pytest.approx(rate / 5)
    assert found.out.latency_s == found.back.latency_s == trip_s / 2
    assert found.off < 1e-9
    assert found.num_probes == len(asked) <= 27


def test_what_disturbs_some_probes_does_not_count() -> None:
    """Each third takes up to three times as long."""
    draw, plain = random.Random(1), link(0.1, 1e6, 2e5)
    count = iter(range(100))
    found, _ = measured(lambda probe: plain(probe) * (draw.uniform(1, 3) if next(count) % 3 == 0 else 1))
    assert found.out.bandwidth_bytes_per_s == pytest.approx(1e6)
    assert found.back.bandwidth_bytes_per_s == pytest.approx(2e5)
    assert found.out.latency_s == 0.05


def test_the_time_in_which_a_window_opens_is_no_bandwidth() -> None:
    plain = link(0.1, 1e6, 1e6)
    found, _ = measured(lambda probe: plain(probe) + (0.4 if sum(probe) > 1e5 else 0.0))
    assert found.out.bandwidth_bytes_per_s == pytest.approx(1e6)
    assert found.off > 0.1, "and it is said that the line does not fit"


def test_a_link_that_is_too_fast_is_probed_with_no_more_than_is_permitted() -> None:
    found, asked = measured(lambda _: 1e-5)
    assert max(map(sum, asked)) == PROBE_BYTES_MAX
    assert found.out.bandwidth_bytes_per_s > 1e12


def test_a_slow_link_is_not_flooded() -> None:
    _, asked = measured(link(0.02, 1e3, 1e3))
    assert max(map(sum, asked)) == FIRST_BYTES


def test_times_must_have_passed() -> None:
    with pytest.raises(ValueError, match=r"a probe took 0\.0 s, needed: the time that has passed, above 0"):
        measured(lambda _: 0.0)
