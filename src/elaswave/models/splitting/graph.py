"""The operator graph of a network: what each operator is, where it stands in the code, and what it costs.

What operators would take on another device, from a few that were measured there.

A device is described by what each operator takes at least (a launch), by its floating-point operations per second and
its bytes per second, or by how much faster it is than this one. Coefficients below zero are not tried. The fit is of
relative errors, so that small operators count as much as large ones.

Each use of a parameter by itself, so that the sum of its gradients does not depend on the cuts.

Two parts that use one parameter add their gradients exactly, one part with both uses would let autograd add them first,
in floating point: other bits. So every operator that is given a parameter, or a view of one, gets a value of its own
for it, and its gradient is a term of its own of the exact sum, in whichever part it stands. The operators that make the
view stand before it anew. It costs the memory of one gradient and one addition for each use.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elaswave.errors import UsageError
from elaswave.models.splitting.cut import DependencyGraph
from elaswave.models.splitting.program import Op, Ref, renamed, renamed_in
from elaswave.models.splitting.trace import StateTensor, Traced


@dataclass(frozen=True, kw_only=True)
class OperatorNode:
    """One operator.

    Args:
        number: its place in the order in which they run.
        operator: its name, such as "aten.conv2d.default".
        source: file, line and text of the network's code that it comes from.
        module: path of the module that it belongs to; empty: the network itself.
        inputs: numbers of the operators that it is given something of: that have made it, or have written in place what
            it is given or a view of it, the last one of each memory.
        shapes: of what it makes.
        dtypes: of what it makes.
        parameters: names of parameters and buffers that it is given.
        forward_s, backward_s: measured seconds.
        bytes_out: of what it makes; a view makes nothing.
        bytes_in: of tensors that it is given.
        flops: of its forward, as `torch.utils.flop_counter` has formulas; 0 for operators without one.
    """

    number: int
    operator: str
    source: str
    module: str
    inputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    parameters: tuple[str, ...]
    forward_s: float
    backward_s: float
    bytes_out: int
    bytes_in: int
    flops: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of a network in the order in which they run; `elaswave.split` cuts between them.

    ``print(graph)`` shows a table, ``graph.to_json()`` and ``graph.to_dot()`` give it to other programs.

    Args:
        nodes: the operators.
        cuts: numbers of the operators that begin a new part.
    """

    nodes: tuple[OperatorNode, ...]
    cuts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[OperatorNode]:
        return iter(self.nodes)

    def __getitem__(self, number: int) -> OperatorNode:
        return self.nodes[number]

    @property
    def seconds(self) -> float:
        """Of all operators, forward and backward."""
        return sum(node.seconds for node in self.nodes)

    def parts(self) -> list[tuple[OperatorNode, ...]]:
        """Lists the operators of each part."""
        ends = [0, *self.cuts, len(self.nodes)]
        return [self.nodes[start:stop] for start, stop in zip(ends, ends[1:])]

    def __str__(self) -> str:
        rows = [("", "operator", "makes", "forward us", "backward us", "KiB out", "parameters", "source")]
        lines: dict[int, str] = {}
        for number in self.cuts:
            lines[number] = f"--- part {self.cuts.index(number) + 1} ---"
        for node in self.nodes:
            made = " ".join(f"{dtype}{list(shape)}" for dtype, shape in zip(node.dtypes, node.shapes))
            rows.append((
                str(node.number), node.operator.removesuffix(".default"), made, f"{node.forward_s * 1e6:.0f}",
                f"{node.backward_s * 1e6:.0f}", f"{node.bytes_out / 1024:.0f}", " ".join(node.parameters),
                _short(node.source),
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        found = []
        for number, row in enumerate(rows, start=-1):
            if number in lines:
                found.append(lines[number])
            cells = [
                text.rjust(width) if column in (0, 3, 4, 5) else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths))
            ]
            found.append("  ".join([*cells, row[-1]]).rstrip())
        total = f"{len(self.nodes)} operators, {self.seconds * 1e3:.1f} ms forward and backward"
        if self.cuts:
            shares = [sum(node.seconds for node in part) * 1e3 for part in self.parts()]
            total += f"; parts of {', '.join(f'{share:.1f}' for share in shares)} ms"
        return "\n".join([*found, total])

    def to_measure(self, count: int) -> tuple[int, ...]:
        """Lists the numbers of so many operators that tell much of another device: see `estimate`."""

        return to_measure(self, count)

    def estimate(self, measured: Mapping[int, float]) -> "DeviceEstimate":
        """Estimates what all operators take on another device.

        Args:
            measured: seconds there, forward and backward together, by number of operator; of a few.
        """

        return estimate_on_device(self, measured)

    def to_json(self) -> str:
        """Encodes the graph as a JSON object of ``nodes`` and ``cuts``."""
        return json.dumps({"nodes": [asdict(node) for node in self.nodes], "cuts": list(self.cuts)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "OperatorGraph":
        """Does the inverse of `to_json`."""
        found = json.loads(text)
        nodes = []
        for fields in found["nodes"]:
            lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            lists["shapes"] = tuple(tuple(shape) for shape in fields["shapes"])
            nodes.append(OperatorNode(**fields | lists))
        return OperatorGraph(tuple(nodes), tuple(found["cuts"]))

    def to_dot(self) -> str:
        """Encodes the graph for graphviz, one box for each part."""
        lines = ["digraph operators {", "  node [shape=box, fontsize=10];"]
        for index, part in enumerate(self.parts()):
            lines.append(f'  subgraph cluster_{index} {{ label="part {index}";')
            for node in part:
                label = f"{node.number} {node.operator}\\n{node.seconds * 1e6:.0f} us"
                lines.append(f'    n{node.number} [label="{label}", tooltip="{_escaped(node.source)}"];')
            lines.append("  }")
        lines += [f"  n{source} -> n{node.number};" for node in self.nodes for source in node.inputs]
        return "\n".join([*lines, "}"])


def _short(source: str) -> str:
    place, _, rest = source.partition(" (")
    path, _, line = place.rpartition(":")
    return f"{Path(path).name}:{line} {rest.removesuffix(')')}" if path else source


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def graph_of(flow: DependencyGraph, cuts: Sequence[int] = ()) -> OperatorGraph:
    """Makes the public graph of a network.

    Args:
        flow: of its operators.
        cuts: places where it is cut.
    """
    traced, facts = flow.traced, flow.facts
    maker: dict[int, int] = {}
    writers: dict[int, int] = {}  # by memory, which views share
    nodes = []
    for place, op in enumerate(traced.ops):
        values = [facts.values[value] for value in flow.made_by(place)]
        given = dict.fromkeys(op.values)
        memory = {facts.values[value].storage for value in given if value in facts.values}
        before = {maker[value] for value in given if value in maker} | {
            writers[each] for each in memory & writers.keys()
        }
        names = [traced.state[value].name for value in given if value in traced.state]
        nodes.append(OperatorNode(
            number=place, operator=op.target, source=op.source, module=traced.modules[place],
            inputs=tuple(sorted(before)),
            shapes=tuple(each.shape for each in values),
            dtypes=tuple(str(each.dtype).removeprefix("torch.") for each in values),
            parameters=tuple(names), forward_s=facts.seconds[place][0], backward_s=facts.seconds[place][1],
            bytes_out=sum(each.num_bytes for each in values if each.parent is None),
            bytes_in=sum(facts.values[value].num_bytes for value in given if value in facts.values),
            flops=facts.flops[place],
        ))  # fmt: skip
        maker[op.out] = place
        for value in op.writes:
            maker[value] = writers[facts.values[value].storage] = place
    return OperatorGraph(tuple(nodes), tuple(cuts))


@dataclass(frozen=True)
class DeviceEstimate:
    """Estimated seconds of all operators on another device.

    Args:
        graph: the operators with those seconds; those that were measured have the measured ones.
        terms: coefficients of the fit, by what they multiply; left out where they are 0.
        fitted: (number, measured seconds, seconds by the fit) of the operators that were measured.
        error: the median relative error of a measured operator where the fit is of the others alone.
    """

    graph: OperatorGraph
    terms: Mapping[str, float]
    fitted: tuple[tuple[int, float, float], ...]
    error: float

    def __str__(self) -> str:
        fit = " + ".join(f"{value:.3g} {term}" for term, value in self.terms.items())
        lines = [f"fit: {fit}; median error of an operator left out: {self.error:.0%}"]
        for number, measured_s, fitted_s in self.fitted:
            node = self.graph[number]
            lines.append(f"{number:>5}  {node.operator:<32} measured {measured_s:.3g} s, fit {fitted_s:.3g} s")
        return "\n".join([*lines, f"all {len(self.graph)} operators: {self.graph.seconds:.3g} s"])


TERMS = ("s per operator", "s per flop", "s per byte", "times as long as here")
MEASURED_MIN = 3


def to_measure(graph: OperatorGraph, count: int) -> tuple[int, ...]:
    """Lists the numbers of operators to measure on another device: the longest of each kind, the longest kinds first.

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


def with_own_uses(flow: DependencyGraph) -> Traced:
    """Makes the same operators, where no trained parameter has two users.

    Args:
        flow: of a network in training.
    Returns:
        The network itself, if each parameter is used once.
    """
    return _Uses(flow).made()


class _Uses:
    """Goes through the operators; arguments as of `with_own_uses`."""

    def __init__(self, flow: DependencyGraph) -> None:
        self._flow, self._traced = flow, flow.traced
        traced = flow.traced
        self._trained = {
            value for value, state in traced.state.items()
            if state.kind == "parameter" and flow.facts.values[value].gradient[0][1]
        }  # fmt: skip
        self._next = 1 + max([*traced.state, *traced.inputs, *flow.maker])
        self._state = dict(traced.state)
        self._num_uses: dict[int, int] = dict.fromkeys(self._trained, 0)

    def made(self) -> Traced:
        found: list[tuple[Op, str]] = []
        for op, module in zip(self._traced.ops, self._traced.modules, strict=True):
            views, own = self._own(op.values, self._path_of(op.out)[:-1])
            found += [(each, module) for each in (*views, renamed(op, own))]
        views, own = self._own(self._flow.outputs, ())
        if len(self._state) == len(self._traced.state):
            return self._traced
        found += [(each, "") for each in views]
        outputs = renamed_in(self._traced.outputs, own)
        kept = _needed([op for op, _ in found], {each.value for each in outputs if isinstance(each, Ref)})
        return self._traced._replace(
            ops=tuple(op for op, _ in found if op.out in kept),
            modules=tuple(module for op, module in found if op.out in kept),
            state=self._state,
            outputs=outputs,
        )

    def _path_of(self, value: int) -> Sequence[int]:
        """Lists the values from a trained parameter to this view of it; empty: it is none."""
        path = self._flow.path(value)
        return path if path[0] in self._trained else ()

    def _own(self, values: Sequence[int], viewed: Sequence[int]) -> tuple[list[Op], dict[int, int]]:
        """Finds what an operator is to be given instead of parameters and views of them, and the operators that make
        it.

        Args:
            values: that it is given.
            viewed: of which it makes another view.
        """
        own: dict[int, int] = {}
        views: list[Op] = []
        for value in dict.fromkeys(values):
            path = () if value in viewed else self._path_of(value)
            if path and path[0] not in own:
                own[path[0]] = self._use(path[0])
            if path and own[path[0]] != path[0]:
                views += self._views(path, own)
        return views, {old: new for old, new in own.items() if old != new}

    def _use(self, parameter: int) -> int:
        """Returns the value of the next use of a parameter: at first that which is there."""
        number = self._num_uses[parameter]
        self._num_uses[parameter] += 1
        if not number:
            return parameter
        value = self._new()
        self._state[value] = StateTensor("parameter", self._traced.state[parameter].name, number)
        return value

    def _views(self, path: Sequence[int], own: dict[int, int]) -> Iterator[Op]:
        for value in path[1:]:
            if value not in own:
                own[value] = self._new()
                yield replace(renamed(self._traced.ops[self._flow.maker[value]], own), out=own[value])

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _needed(ops: Sequence[Op], outputs: set[int]) -> set[int]:
    """Finds what the operators make that something still depends on: some views have all been made anew."""
    needed, kept = set(outputs), set()
    for op in reversed(ops):
        if op.has_effect or op.out in needed:
            needed.update(op.values)
            kept.add(op.out)
    return kept
