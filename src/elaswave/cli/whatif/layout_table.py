"""An allocation as a table, for people and as JSON: stages, who is in them, what they do, and which is the slowest."""

from typing import Any

import msgspec
import numpy as np

from elaswave.cli.tables import format_bytes, format_seconds, render_table
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.plan import Allocation, StageShare
from elaswave.planning.programs.prediction import time_as_it_is

_MAX_LISTED = 8
"""Workers of a stage that are named one by one."""
_NO_LIMIT_BYTES = 1e14
"""What a device without a stated memory has."""


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage."""

    chain: int
    stage: int
    start: int
    """First layer that its workers hold."""
    stop: int
    """One past the last one."""
    shared_layers: int
    """Of them, those that the next stage holds too."""
    workers: list[int]
    num_microbatches: list[int]
    """Fewest and most of its workers."""
    speed_levels: list[float]
    """Slowest and fastest frequency level of its workers, relative to the base level."""
    busy_s: float
    """Seconds of a step for which its busiest worker computes."""
    memory_bytes: float
    """The most that one of its workers holds."""
    free_memory_bytes: float
    """The least that one of its workers has left."""
    is_bottleneck: bool


def stage_rows(
    cluster: Cluster, costs: Costs, allocation: Allocation, *, followers: int = DEFAULT_FOLLOWERS
) -> list[StageRow]:
    """Lists the stages of an allocation, chain by chain.

    Args:
        cluster: with all its workers.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block.
    """
    found = time_as_it_is(cluster, costs, allocation, followers=followers, exact=False).found
    rows: list[StageRow] = []
    first = 0
    for number, chain in enumerate(allocation.chains):
        for index, share in enumerate(chain.stages):
            here = slice(first, first + share.width)
            first += share.width
            following = chain.stages[index + 1].start if index + 1 < len(chain.stages) else share.stop
            speeds = _level_speeds(cluster, share)
            memory = found.memory_bytes[here]
            free = cluster.memory_bytes[cluster.index_of(share.workers)] - memory
            rows.append(
                StageRow(
                    chain=number,
                    stage=index,
                    start=share.start,
                    stop=share.stop,
                    shared_layers=max(0, share.stop - following),
                    workers=share.workers.tolist(),
                    num_microbatches=[int(share.num_microbatches.min()), int(share.num_microbatches.max())],
                    speed_levels=[float(speeds.min()), float(speeds.max())],
                    busy_s=float(found.busy_s[here].max()),
                    memory_bytes=float(memory.max()),
                    free_memory_bytes=float(free.min()),
                    is_bottleneck=(number, index) == (found.bottleneck_chain, found.bottleneck_stage),
                )
            )
    return rows


def _level_speeds(cluster: Cluster, share: StageShare) -> np.ndarray:
    devices = cluster.device[cluster.index_of(share.workers)]
    if len(cluster.devices) == 1:
        return np.array([level.speed for level in cluster.devices[0].levels])[share.levels]
    pairs = zip(devices.tolist(), share.levels.tolist())
    return np.array([cluster.devices[device].levels[level].speed for device, level in pairs])


def render_stages(rows: list[StageRow], width: int) -> list[str]:
    """Formats the table, the bottleneck marked.

    Args:
        rows: of `stage_rows`.
        width: columns of the terminal.
    """
    several = any(row.chain for row in rows)
    header = ["stage", "workers", "layers", "micro-batches", "level", "busy", "memory", ""]
    cells = [
        [
            f"{row.chain}.{row.stage}" if several else str(row.stage),
            _workers(row.workers),
            f"{row.start} to {row.stop - 1}" + (f" ({row.shared_layers} shared)" if row.shared_layers else ""),
            _range([str(number) for number in row.num_microbatches]),
            _range([f"{speed:g}" for speed in row.speed_levels]),
            format_seconds(row.busy_s),
            "-" if row.free_memory_bytes > _NO_LIMIT_BYTES else format_bytes(round(row.memory_bytes)),
            "<- bottleneck" if row.is_bottleneck else "",
        ]
        for row in rows
    ]
    kept = [
        column
        for column, name in enumerate(header)
        if name not in ("level", "memory") or any(row[column] not in ("1", "-") for row in cells)
    ]
    return render_table([header[column] for column in kept], [[row[column] for column in kept] for row in cells], width)


def _workers(workers: list[int]) -> str:
    if len(workers) <= _MAX_LISTED:
        return " ".join(map(str, workers))
    return f"{len(workers)}: {workers[0]} ... {workers[-1]}"


def _range(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def as_json(document: Any) -> str:
    """Encodes a document as indented JSON; values that are no plain data become it."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
