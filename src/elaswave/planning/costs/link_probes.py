"""What a link costs, `alpha + beta x bytes`, from a few probes of it. Pure: says what to probe, is told the seconds.

A probe sends some bytes, has some returned, and takes the time until the last of them is there. So only one clock is
read, and latencies of the two directions cannot be told apart: each gets half of a round trip's.

The time of a round trip is the least of a few that carry nothing. A direction's bandwidth is what a quarter of a
transfer takes less than the whole one: that leaves out the round trip, the time in which TCP opens its window, and what
is constant otherwise. What disturbs a probe makes it longer, so the least time of each size counts.
"""

from collections.abc import Generator, Mapping
from typing import NamedTuple

from elaswave.planning.costs.network import NetworkLink

ROUND_TRIPS = 5
FIRST_BYTES = 1 << 14
GROWTH = 4
PROBE_BYTES_MAX = 1 << 26
ENOUGH_S = 1.0
"""A transfer that takes so long beyond the round trip is told well apart from what disturbs it."""
ENOUGH_ROUND_TRIPS = 4.0
"""Nor does the opening of TCP's window then count for much."""
REPEATS = 2


class LinkProbe(NamedTuple):
    """What is sent, and what is to be returned."""

    sent_bytes: int
    returned_bytes: int


class MeasuredLinks(NamedTuple):
    """The two directions of a link."""

    out: NetworkLink
    back: NetworkLink
    num_probes: int
    off: float
    """Of the larger probes, the largest share by which a time differs from `alpha + beta x bytes`."""


Probing = Generator[LinkProbe, float, MeasuredLinks]
"""Yields probes, is sent the seconds of each, returns what was found."""


def probing() -> Probing:
    """Measures a link, with 15 to 27 probes.

    Raises:
        ValueError: seconds that are not above 0.
    """
    trips = []
    for _ in range(ROUND_TRIPS):
        trips.append((yield from _timed(LinkProbe(0, 0))))
    trip_s = min(trips)
    out, num_out = yield from _direction(trip_s, is_out=True)
    back, num_back = yield from _direction(trip_s, is_out=False)
    betas = _beta(out, trip_s), _beta(back, trip_s)
    off = max(
        abs((trip_s + beta * size) / seconds - 1)
        for beta, times in zip(betas, (out, back), strict=True)
        for size, seconds in times.items()
        if size >= max(times) // GROWTH
    )
    there, again = (NetworkLink(bandwidth_bytes_per_s=1.0 / beta, latency_s=trip_s / 2) for beta in betas)
    return MeasuredLinks(there, again, ROUND_TRIPS + num_out + num_back, off)


def _direction(trip_s: float, *, is_out: bool) -> Generator[LinkProbe, float, tuple[dict[int, float], int]]:
    """Measures the least seconds of sizes that grow until one takes long enough, of that size and its quarter again;
    and counts the probes."""
    size, found, count = FIRST_BYTES, dict[int, float](), 0
    while True:
        found[size] = yield from _timed(_probe(size, is_out))
        count += 1
        if found[size] >= trip_s + max(ENOUGH_S, ENOUGH_ROUND_TRIPS * trip_s) or size >= PROBE_BYTES_MAX:
            break
        size *= GROWTH
    for _ in range(REPEATS):
        for each in (size // GROWTH, size):
            seconds = yield from _timed(_probe(each, is_out))
            found[each] = min(seconds, found.get(each, seconds))
            count += 1
    return found, count


def _probe(num_bytes: int, is_out: bool) -> LinkProbe:
    return LinkProbe(num_bytes, 0) if is_out else LinkProbe(0, num_bytes)


def _timed(probe: LinkProbe) -> Generator[LinkProbe, float, float]:
    seconds = yield probe
    if not seconds > 0:
        raise ValueError(f"a probe took {seconds} s, needed: the time that has passed, above 0")
    return seconds


def _beta(times: Mapping[int, float], trip_s: float) -> float:
    """Computes the seconds a byte takes; goes by the whole transfer where its part took too long for that."""
    size = max(times)
    part = size // GROWTH
    slope = (times[size] - times[part]) / (size - part)
    whole = max(times[size] - trip_s, 1e-9) / size
    return slope if 0 < slope < whole else whole
