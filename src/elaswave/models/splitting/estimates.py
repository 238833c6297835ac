"""What operators would take on another device, from a few that were measured there.

A device is described by what each operator takes at least (a launch), by its floating-point operations per second and
its bytes per second, or by how much faster it is than this one. Coefficients below zero are not tried. The fit is of
relative errors, so that small operators count as much as large ones.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elaswave.errors import UsageError
from elaswave.models.splitting.graph import DeviceEstimate, OperatorGraph, OperatorNode

TERMS = ("s per operator", "s per flop", "s per byte", "times as long as here")
MEASURED_MIN = 3


def to_measure(graph: OperatorGraph, count: int) -> tuple[int, ...]:
    """The numbers of operators to measure on another device: the longest of each kind, the longest kinds first.

    Args:
        graph: measured here.
        count: how many at most.
    """
    longest: dict[str, OperatorNode] = {}
    for node in graph:
        if node.bytes_out and (node.operator not in longest or node.seconds > longest[node.operator].seconds):
            longest[node.operator] = node
    chosen = sorted(longest.values(), key=lambda node: -node.seconds)[:count]
    rest = sorted((node for node in graph if node not in chosen), key=lambda node: -node.seconds)
    return tuple(sorted(node.number for node in [*chosen, *rest][:count]))


def estimate_on_device(graph: OperatorGraph, measured: Mapping[int, float]) -> DeviceEstimate:
    """Estimates all operators on another device.

    Args:
        graph: measured here.
        measured: seconds there, forward and backward together, by number of operator.
    Raises:
        UsageError: too few were measured, or no such operators.
    """
    numbers = sorted(measured)
    strange = [number for number in numbers if not 0 <= number < len(graph) or not measured[number] > 0]
    if len(numbers) < MEASURED_MIN or strange:
        found = f"{strange[0]!r}: {measured[strange[0]]!r}" if strange else f"{len(numbers)} operators"
        raise UsageError(
            f"estimate was given {found}, needed: seconds above 0 of at least {MEASURED_MIN} of the operators 0 to "
            f"{len(graph) - 1}; graph.to_measure(8) names some that tell much"
        )
    features = np.array([_features(graph[number]) for number in numbers])
    seconds = np.array([measured[number] for number in numbers])
    terms = _fit(features, seconds)
    left_out = []
    for index in range(len(numbers)):
        others = [each for each in range(len(numbers)) if each != index]
        guess = float(features[index] @ _fit(features[others], seconds[others]))
        left_out.append(abs(guess / seconds[index] - 1))
    nodes = [_with_seconds(node, measured.get(node.number, float(_features(node) @ terms))) for node in graph]
    return DeviceEstimate(
        OperatorGraph(tuple(nodes), graph.cuts),
        {name: float(value) for name, value in zip(TERMS, terms) if value > 0},
        tuple((number, float(s), float(row @ terms)) for number, s, row in zip(numbers, seconds, features)),
        float(np.median(left_out)),
    )


def _features(node: OperatorNode) -> npt.NDArray[np.float64]:
    is_view = not node.bytes_out and not node.flops
    moved = 0 if is_view else node.bytes_in + node.bytes_out
    return np.array([1.0, node.flops, moved, node.seconds], dtype=np.float64)


def _fit(features: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Coefficients of at least 0 with the smallest squares of relative errors; every choice of terms is tried."""
    best, best_error = np.zeros(features.shape[1]), np.inf
    scaled = features / seconds[:, None]
    sizes = np.maximum(np.abs(scaled).max(0), 1e-300)
    for columns in _choices(features.shape[1], len(seconds)):
        found = np.zeros(features.shape[1])
        chosen = list(columns)
        solution = np.linalg.lstsq(scaled[:, chosen] / sizes[chosen], np.ones(len(seconds)), rcond=None)[0]
        found[chosen] = solution / sizes[chosen]
        error = float(((scaled @ found - 1) ** 2).sum()) * (1 + 0.05 * len(chosen))  # among equal fits the shorter
        if (found >= 0).all() and error < best_error:
            best, best_error = found, error
    return best


def _choices(num_terms: int, num_measured: int) -> Sequence[tuple[int, ...]]:
    most = min(num_terms, num_measured - 1)
    return [choice for size in range(1, most + 1) for choice in itertools.combinations(range(num_terms), size)]


def _with_seconds(node: OperatorNode, seconds: float) -> OperatorNode:
    share = node.forward_s / node.seconds if node.seconds else 1.0
    return replace(node, forward_s=seconds * share, backward_s=seconds * (1 - share))
