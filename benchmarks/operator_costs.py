"""Layers for a plan from an operator graph, as `elaswave.split` makes it: a chain with carried values. Pure.

A value that is made before a cut and used behind it crosses the cut, also if it is used several stages later: it is
carried through all stages between. `crossing` says how many bytes that are; `direct_transfers` says what would travel
if each value went straight from the stage that makes it to those that use it, which this engine does not do.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from elaswave.planning.costs.layers import Costs, LayerCosts

SUM_BYTES, STATE_BYTES, FLOAT_BYTES = 8, 12, 4
"""Of a parameter: its exact sum; master and Adam's two moments; the parameter itself, float32."""


class Operator(Protocol):
    """What is asked of a node of an `elaswave.models.splitting.graph.OperatorGraph`."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the operators that it is given something of."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of what it makes."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of parameters and buffers that it is given."""

    @property
    def bytes_out(self) -> int:
        """Of what it makes; a view makes nothing."""


class Value(NamedTuple):
    """What an operator makes and others use."""

    made: int
    uses: tuple[int, ...]
    """Numbers of the operators that use it, or views of it, ascending."""
    num_bytes: int


def values_of(operators: Sequence[Operator]) -> list[Value]:
    """The values of a graph, those of whole numbers left out: parts compute masks and positions for themselves.

    Args:
        operators: in the order in which they run.
    """
    roots: list[tuple[int, ...]] = []
    uses: dict[int, list[int]] = {}
    for number, operator in enumerate(operators):
        given = tuple(dict.fromkeys(root for source in operator.inputs for root in roots[source]))
        for root in given:
            uses.setdefault(root, []).append(number)
        is_view = not operator.bytes_out
        roots.append(given if is_view else (number,))
    return [
        Value(number, tuple(users), operators[number].bytes_out)
        for number, users in sorted(uses.items())
        if any(dtype.startswith(("float", "bfloat", "complex")) for dtype in operators[number].dtypes)
    ]


def crossing(operators: Sequence[Operator]) -> list[int]:
    """Bytes that cross a cut before each operator, and behind the last one: [number of operators + 1]."""
    change = [0] * (len(operators) + 2)
    for value in values_of(operators):
        change[value.made + 1] += value.num_bytes
        change[value.uses[-1] + 1] -= value.num_bytes
    found, so_far = [], 0
    for each in change[: len(operators) + 1]:
        so_far += each
        found.append(so_far)
    return found


def direct_transfers(values: Sequence[Value], cuts: Sequence[int]) -> dict[tuple[int, int], int]:
    """Bytes from part to part if each value goes straight to each part that uses it.

    Args:
        values: of the graph.
        cuts: numbers of the operators that begin a new part.
    """
    part_of: dict[int, int] = {}
    part = 0
    last = max((value.uses[-1] for value in values), default=0)
    for number in range(last + 1):
        part += number in cuts
        part_of[number] = part
    found: dict[tuple[int, int], int] = {}
    for value in values:
        source = part_of[value.made]
        for target in dict.fromkeys(part_of[use] for use in value.uses):
            if target != source:
                found[source, target] = found.get((source, target), 0) + value.num_bytes
    return found


def places(operators: Sequence[Operator], seconds: Sequence[float], most: int) -> list[int]:
    """Where layers begin: of places that are about equally far apart those that little crosses.

    Args:
        operators: of the network.
        seconds: of each, forward and backward.
        most: layers at most.
    Returns:
        Numbers of the operators that begin a layer, the first one's left out.
    """
    bytes_at = crossing(operators)
    target = sum(seconds) / most
    found: list[int] = []
    since, candidates = 0.0, []
    for number, each in enumerate(seconds[:-1]):
        since += each
        if since >= 0.5 * target:
            candidates.append(number + 1)
        if since >= 1.5 * target:
            place = min(candidates, key=lambda cut: (bytes_at[cut], cut))
            found.append(place)
            since = sum(seconds[place : number + 1])
            candidates = []
        if len(found) == most - 1:
            break
    return found


def chain_costs(
    operators: Sequence[Operator],
    seconds: Sequence[tuple[float, float]],
    cuts: Sequence[int],
    parameters: Mapping[str, int],
) -> Costs:
    """Costs of the layers between cuts.

    Args:
        operators: of the network.
        seconds: of each, forward and backward, on the kind of device.
        cuts: where layers begin.
        parameters: elements of each trained tensor by name; a tied one counts in each layer that uses it.
    """
    bytes_at = crossing(operators)
    ends = [0, *cuts, len(operators)]
    layers = []
    for start, stop in zip(ends, ends[1:]):
        part = operators[start:stop]
        names = dict.fromkeys(name for operator in part for name in operator.parameters)
        elements = sum(parameters.get(name, 0) for name in names)
        backward_s = sum(back for _, back in seconds[start:stop])
        layers.append(
            LayerCosts(
                name=f"operators {start} to {stop - 1}",
                forward_s=sum(ahead for ahead, _ in seconds[start:stop]),
                input_gradient_s=backward_s / 2,
                weight_gradient_s=backward_s / 2,
                parameter_bytes=float(elements * FLOAT_BYTES),
                accumulator_bytes=float(elements * SUM_BYTES),
                optimizer_bytes=float(elements * STATE_BYTES),
                activation_bytes=float(sum(operator.bytes_out for operator in part)),
                boundary_bytes=float(bytes_at[stop] if stop < len(operators) else 0),
            )
        )
    return Costs(layers=tuple(layers), source="operators of elaswave.split")
