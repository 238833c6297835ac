"""Operators on another device, estimated from a few: what was planted is found again, and the error says how well."""

import numpy as np
import pytest

from elaswave.errors import UsageError
from elaswave.models.splitting.graph import OperatorGraph, OperatorNode


def graph(num_nodes: int = 40) -> OperatorGraph:
    draw = np.random.default_rng(1)
    kinds = ("aten.linear.default", "aten.add.Tensor", "aten.view.default", "aten.softmax.int")
    nodes = []
    for number in range(num_nodes):
        kind = kinds[number % len(kinds)]
        size = int(draw.integers(1_000, 1_000_000))
        nodes.append(OperatorNode(
            number=number, operator=kind, source="net.py:1 (x)", module="", inputs=(), shapes=((size,),),
            dtypes=("float32",), parameters=(), forward_s=float(draw.uniform(1e-6, 1e-3)),
            backward_s=float(draw.uniform(1e-6, 1e-3)), bytes_out=0 if "view" in kind else 4 * size, bytes_in=4 * size,
            flops=100 * size if "linear" in kind else 0,
        ))  # fmt: skip
    return OperatorGraph(tuple(nodes))


def there(node: OperatorNode) -> float:
    """A device with 5 us per launch, 1 TFLOP/s and 10 GB/s."""
    moved = node.bytes_in + node.bytes_out if node.bytes_out else 0
    return 5e-6 + node.flops / 1e12 + moved / 1e10


def test_a_device_is_found_again_from_a_few_operators() -> None:
    known = graph()
    numbers = known.to_measure(8)
    assert len(numbers) == 8 and {known[number].operator for number in numbers} >= {
        "aten.linear.default", "aten.add.Tensor", "aten.softmax.int",
    }  # fmt: skip
    found = known.estimate({number: there(known[number]) for number in numbers})
    assert found.error < 1e-6
    assert dict(found.terms) == pytest.approx({"s per operator": 5e-6, "s per flop": 1e-12, "s per byte": 1e-10})
    for node in found.graph:
        assert node.seconds == pytest.approx(there(known[node.number]), rel=1e-6)
    assert "median error of an operator left out: 0%" in str(found) and "aten.linear.default" in str(found)


def test_a_device_that_is_twice_as_fast_needs_one_term() -> None:
    known = graph()
    found = known.estimate({number: known[number].seconds / 2 for number in (0, 1, 3, 8)})
    assert dict(found.terms) == pytest.approx({"times as long as here": 0.5})
    assert found.graph.seconds == pytest.approx(known.seconds / 2)


def test_the_error_shows_that_nothing_fits() -> None:
    known, draw = graph(), np.random.default_rng(2)
    found = known.estimate({number: float(draw.exponential(1e-3)) for number in known.to_measure(12)})
    assert found.error > 0.3


@pytest.mark.parametrize("measured", [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0, 400: 1.0}, {0: 1.0, 1: 1.0, 2: -1.0}])
def test_what_is_no_measurement_is_refused(measured: dict[int, float]) -> None:
    with pytest.raises(UsageError, match="needed: seconds above 0 of at least 3 of the operators 0 to 39"):
        graph().estimate(measured)
