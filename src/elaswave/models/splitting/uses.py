"""Each use of a parameter by itself, so that the sum of its gradients does not depend on the cuts.

Two parts that use one parameter add their gradients exactly, one part with both uses would let autograd add them first,
in floating point: other bits. So every operator that is given a parameter, or a view of one, gets a value of its own
for it, and its gradient is a term of its own of the exact sum, in whichever part it stands. The operators that make the
view stand before it anew. It costs the memory of one gradient and one addition for each use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elaswave.models.splitting.cut import DependencyGraph
from elaswave.models.splitting.program import Op, Ref, renamed, renamed_in
from elaswave.models.splitting.trace import StateTensor, Traced


def with_own_uses(flow: DependencyGraph) -> Traced:
    """The same operators, where no trained parameter has two users.

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
        """From a trained parameter to this view of it; empty: it is none."""
        path = self._flow.path(value)
        return path if path[0] in self._trained else ()

    def _own(self, values: Sequence[int], viewed: Sequence[int]) -> tuple[list[Op], dict[int, int]]:
        """What an operator is to be given instead of parameters and views of them, and the operators that make it.

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
        """The value of the next use of a parameter: at first that which is there."""
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
    """What the operators make that something still depends on: some views have all been made anew."""
    needed, kept = set(outputs), set()
    for op in reversed(ops):
        if op.has_effect or op.out in needed:
            needed.update(op.values)
            kept.add(op.out)
    return kept
