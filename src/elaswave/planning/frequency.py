"""The frequency axis: at which clock each worker computes, under limits of power. Pure.

A worker's load is what it computes in a step, in seconds at its base level; the *pace* is the largest load over level
speed. `choose_levels` finds the smallest pace that the levels and the limit permit and then, among all choices that
keep it, the one that draws least: the bottleneck is lifted, slack is lowered.

That is exact for the pace. A pipeline's step also contains the way of a micro-batch through all stages, on which slow
workers count even if they have slack; the planner therefore times the whole plan and keeps it only if it helps.
"""

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.machines import Cluster, DeviceSpec

_SLACK = 1e-9
"""Relative; differences of rounding."""


def choose_levels(
    loads_s: np.ndarray,
    device: np.ndarray,
    devices: tuple[DeviceSpec, ...],
    *,
    power_limit_w: float | None = None,
    least_speed: float = 0.0,
) -> np.ndarray:
    """Levels with the smallest pace, and the least draw among those.

    Args:
        loads_s: seconds of computing in a step at the base level, at least 0 [workers].
        device: index into devices of each worker [workers].
        devices: their levels.
        power_limit_w: of all workers together while all of them compute; None means no limit.
        least_speed: no level below this speed is taken where power permits.
    Returns:
        int64 level of each worker.
    Raises:
        InfeasiblePlan: even the levels that draw least exceed the limit; says by how much.
    """
    # Workers of one device with one load are one case, however many they are.
    distinct, load_of = np.unique(np.round(loads_s, 12), return_inverse=True)
    case_of = load_of * len(devices) + device
    number = np.bincount(case_of)
    cases = np.flatnonzero(number)
    inverse, number = (np.cumsum(number > 0) - 1)[case_of], number[cases]
    kinds, loads = cases % len(devices), distinct[cases // len(devices)]
    speeds, draws = _level_tables(devices)
    speeds, draws = speeds[kinds], draws[kinds]

    def cheapest(pace: float, floor: float) -> tuple[np.ndarray, float] | None:
        needed = loads / pace if pace > 0 else np.where(loads > 0, np.inf, 0.0)
        needed = np.maximum(needed, np.minimum(floor, speeds.max(axis=1)))
        possible = speeds >= (needed * (1 - _SLACK))[:, None]
        if not bool(np.all(possible.any(axis=1))):
            return None
        draw = np.where(possible, draws, np.inf)
        level = np.argmin(draw, axis=1)
        return level, float(np.sum(draw[np.arange(len(level)), level] * number))

    lowest = float(np.sum(draws.min(axis=1) * number))
    if power_limit_w is not None and lowest > power_limit_w * (1 + _SLACK):
        raise InfeasiblePlan(
            f"power: {len(loads_s)} workers draw at least {lowest:.1f} W together while they compute, but may draw "
            f"{power_limit_w:.1f} W: {lowest - power_limit_w:.1f} W too much"
        )

    def allowed(found: tuple[np.ndarray, float] | None) -> bool:
        return found is not None and (power_limit_w is None or found[1] <= power_limit_w * (1 + _SLACK))

    # The pace is some worker's load at some level.
    with np.errstate(invalid="ignore"):
        paces = np.unique(np.where(speeds > 0, loads[:, None] / np.where(speeds > 0, speeds, 1.0), 0.0))
    first, last = 0, len(paces) - 1
    while first < last:
        middle = (first + last) // 2
        if allowed(cheapest(float(paces[middle]), 0.0)):
            last = middle
        else:
            first = middle + 1
    pace = float(paces[last])
    found = cheapest(pace, least_speed)
    if not allowed(found):
        found = cheapest(pace, 0.0)
    assert found is not None
    return found[0][inverse]


def common_levels(cluster: Cluster, where: np.ndarray) -> np.ndarray:
    """Levels of workers whose clocks are not chosen one by one: the base ones, or one for all under a power limit.

    Then all run at one speed, the highest at which they keep within the limit together, as under a machine room's cap
    that is shared evenly: below the base level's where the limit is low, above it where lost workers have left enough.

    Args:
        cluster: with the limit.
        where: positions of the workers.
    Returns:
        int64, in the order of `where`; the lowest levels if even those draw too much (`check_power` refuses them).
    """
    devices, kind = cluster.devices, cluster.device[where]
    number = np.bincount(kind, minlength=len(devices))
    most = 1.0 if cluster.power_limit_w is None else float("inf")
    speeds = sorted({level.speed for device in devices for level in device.levels if level.speed <= most})
    chosen: list[int] = []
    for speed in reversed(speeds):
        chosen = [max(sum(level.speed <= speed for level in device.levels) - 1, 0) for device in devices]
        draw = sum(
            device.levels[level].power_w * int(count)
            for device, level, count in zip(devices, chosen, number, strict=True)
        )
        if cluster.power_limit_w is None or draw <= cluster.power_limit_w * (1 + 1e-9):
            break
    return np.array(chosen, dtype=np.int64)[kind]


def check_power(cluster: Cluster, peak_power_w: float) -> None:
    """Refuses what draws too much.

    Args:
        cluster: with the limit.
        peak_power_w: of all workers together while all of them compute.
    Raises:
        InfeasiblePlan: names the limit and by how much it is exceeded.
    """
    limit = cluster.power_limit_w
    if limit is not None and peak_power_w > limit * (1 + 1e-9):
        raise InfeasiblePlan(
            f"power: the workers would draw {peak_power_w:.1f} W while all of them compute, but may draw "
            f"{limit:.1f} W together: {peak_power_w - limit:.1f} W too much"
        )


def _level_tables(devices: tuple[DeviceSpec, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Tabulates the speed and draw of every level of every device; sets speed 0 and infinite draw where a device has
    fewer levels."""
    most = max(len(device.levels) for device in devices)
    speeds, draws = np.zeros((len(devices), most)), np.full((len(devices), most), np.inf)
    for index, device in enumerate(devices):
        speeds[index, : len(device.levels)] = [level.speed for level in device.levels]
        draws[index, : len(device.levels)] = [level.power_w for level in device.levels]
    return speeds, draws
