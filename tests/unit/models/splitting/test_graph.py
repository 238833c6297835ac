"""The operator graph as a value: what it knows of each operator, and its forms."""

import json

import pytest
import torch
from tests.networks import Texts, seeded, tokens
from torch import Tensor, nn

import elaswave
from elaswave.errors import UsageError


@pytest.fixture(scope="module")
def graph() -> elaswave.OperatorGraph:
    return elaswave.split(seeded(Texts), tokens(), 2).graph


def test_a_node_knows_operator_line_module_shapes_and_parameters(graph: elaswave.OperatorGraph) -> None:
    node = next(node for node in graph if "blocks.1.mlp.0.weight" in node.parameters)
    assert node.operator == "aten.linear.default"
    assert node.module == "blocks.1.mlp.0"
    assert node.shapes == ((2, 6, 16),) and node.dtypes == ("float32",)
    assert node.bytes_out == 2 * 6 * 16 * 4
    assert node.flops == 2 * 2 * 6 * 8 * 16
    assert "tests/networks.py" in node.source and "self.mlp(" in node.source
    assert node.forward_s > 0 and node.backward_s > 0
    assert graph[node.inputs[0]].operator == "aten.layer_norm.default"
    view = next(node for node in graph if node.operator == "aten.transpose.int")
    assert view.bytes_out == 0, "a view makes nothing"
    written = next(node for node in graph if node.operator.startswith("aten.clamp_"))
    reader = next(node for node in graph if node.number > written.number and written.number in node.inputs)
    assert reader.operator == "aten.unsqueeze.default", "who reads what was written in place comes after it"


def test_it_is_printed_as_a_table(graph: elaswave.OperatorGraph) -> None:
    lines = str(graph).splitlines()
    assert len(lines) == len(graph) + 3, "a head, a line for each cut, a total"
    assert lines[graph.cuts[0] + 1] == "--- part 1 ---"
    assert "networks.py" in lines[1]
    assert lines[-1].startswith(f"{len(graph)} operators, ")


def test_other_programs_can_read_it(graph: elaswave.OperatorGraph) -> None:
    assert elaswave.OperatorGraph.from_json(graph.to_json()) == graph
    assert json.loads(graph.to_json())["cuts"] == list(graph.cuts)
    dot = graph.to_dot()
    assert dot.count("subgraph cluster_") == 2
    assert dot.count(" -> ") == sum(len(node.inputs) for node in graph)


def test_the_graph_of_a_network_needs_no_cut() -> None:
    found = elaswave.operator_graph(seeded(Texts, blocks=1), tokens())
    assert found.cuts == () and len(found.parts()) == 1
    assert found.seconds == pytest.approx(sum(node.forward_s + node.backward_s for node in found))


class Viewed(nn.Module):
    """Memory that is written and read through views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        base = self.map(x)
        early = base.transpose(0, 1)
        left, right = base[:, :2], base[:, 2:]
        left.mul_(3.0)  # read by all three below
        whole = base.exp()
        turned = early.sigmoid()
        half = right.tanh()
        return whole + turned + half.sum()


def test_what_is_written_through_a_view_comes_before_what_reads_that_memory() -> None:
    found = elaswave.operator_graph(seeded(Viewed), torch.randn(4, 4))
    (write,) = [node for node in found if node.operator.startswith("aten.mul_")]
    (made,) = [node for node in found if node.operator.startswith("aten.linear")]
    for operator in ("aten.exp", "aten.sigmoid", "aten.tanh"):  # which half of the memory is not looked at
        (reader,) = [node for node in found if node.operator.startswith(operator)]
        assert write.number in reader.inputs, operator
    (view,) = [node for node in found if node.operator.startswith("aten.transpose")]
    assert view.inputs == (made.number,), "what comes before the write does not wait for it"
    (last,) = [node for node in found if node.operator.startswith("aten.sum")]
    assert write.number not in last.inputs, "it reads other memory"


class Tracking(nn.Module):
    """A buffer that is written through a view."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.seen.view(2, 2)
        pairs.add_(1.0)
        result: Tensor = self.map(x) + self.seen
        return result


def test_a_buffer_that_is_written_through_a_view_is_read_after_it() -> None:
    found = elaswave.operator_graph(seeded(Tracking), torch.randn(3, 4))
    (write,) = [node for node in found if node.operator.startswith("aten.add_")]
    (reader,) = [node for node in found if node.operator == "aten.add.Tensor"]
    assert write.number in reader.inputs and reader.parameters == ("seen",)


class Late(nn.Module):
    """A buffer that is there from the first call on: declared before, or not even that."""

    def __init__(self, declared: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.Module()
        self.declared = declared
        if declared:
            self.inner.register_buffer("before", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if getattr(self.inner, "before", None) is None:
            if self.declared:
                self.inner.before = y.detach()
            else:
                self.inner.register_buffer("before", y.detach())
            return y
        return y + self.inner.before


@pytest.mark.parametrize("declared", [True, False])
def test_a_buffer_that_the_first_call_makes_is_refused(declared: bool) -> None:
    model = Late(declared)
    with pytest.raises(UsageError, match=r"makes the buffer inner\.before in its first call.*register it"):
        elaswave.operator_graph(model, torch.ones(2, 4))
    assert model.inner._buffers == ({"before": None} if declared else {}), "the network is as it was"
