"""Layers of an operator graph: what crosses a cut, where layers begin, what they cost."""

from dataclasses import dataclass

import pytest
from benchmarks.operator_costs import chain_costs, crossing, direct_transfers, places, values_of


@dataclass(frozen=True)
class Node:
    inputs: tuple[int, ...] = ()
    bytes_out: int = 0
    dtypes: tuple[str, ...] = ("float32",)
    parameters: tuple[str, ...] = ()


# 0 makes a skip connection that 4 uses; 2 is a view of 1; 5 makes whole numbers.
GRAPH = [
    Node((), 100, parameters=("a",)),
    Node((0,), 10, parameters=("b", "a")),
    Node((1,), 0),
    Node((2,), 20, parameters=("c",)),
    Node((3, 0), 5),
    Node((), 1000, dtypes=("int64",)),
    Node((4, 5), 1),
]


def test_values_are_carried_to_their_last_use():
    assert [(value.made, value.uses, value.num_bytes) for value in values_of(GRAPH)] == [
        (0, (1, 4), 100),
        (1, (2, 3), 10),
        (3, (4,), 20),
        (4, (6,), 5),
    ]
    assert crossing(GRAPH) == [0, 100, 110, 110, 120, 5, 5, 0]


def test_straight_to_who_uses_them():
    assert direct_transfers(values_of(GRAPH), [1, 4]) == {(0, 1): 100, (0, 2): 100, (1, 2): 20}
    assert direct_transfers([], []) == {}


def test_layers_begin_where_little_crosses():
    assert places(GRAPH, [1.0] * 7, 2) == [5]
    assert places(GRAPH, [1.0] * 7, 4) == [1, 4]
    assert places(GRAPH, [1.0] * 7, 1) == []


def test_costs_of_layers():
    seconds = [(1.0, 2.0)] * 7
    costs = chain_costs(GRAPH, seconds, [1, 5], {"a": 3, "b": 4, "c": 5})
    assert [layer.forward_s for layer in costs.layers] == [1.0, 4.0, 2.0]
    assert costs.prefix["busy_s"][-1] == pytest.approx(21.0)
    assert [layer.accumulator_bytes / 8 for layer in costs.layers] == [3, 12, 0]
    assert [layer.boundary_bytes for layer in costs.layers] == [100, 5, 0]
    assert [layer.activation_bytes for layer in costs.layers] == [100, 35, 1001]
