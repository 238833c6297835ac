"""A network as a flat list of operators, by `torch.export` without decomposition.

What cannot be a fixed list of operators is refused here, with the line of the network's code: control flow and shapes
that depend on data, draws of Python's or numpy's generators, parameters that the forward writes.

A network as the trace has to see it: buffers that a forward assigns anew, and what it says to the engine.
"""

import random
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from elaswave.errors import UsageError
from elaswave.models.foreign.layer import foreign_in
from elaswave.models.layers import Call, inside
from elaswave.models.splitting.attributes import as_in_a_call, attributes_kept, is_torch
from elaswave.models.splitting.inputs import call_of, inputs_of, refuse_inputs
from elaswave.models.splitting.program import AUX_LOSS, GETITEM, PLAIN, Context, Op, Ref, refs_in, renamed


class Assigning(nn.Module):
    """A network that writes its buffers in place at its end where it has assigned them anew (``self.mean = ...``):
    torch 2.13's export sees assigned buffers of the outermost module only, and forgets the others. What it tells by
    `aux_loss` is an output, and `batch` gives it the inputs that it was called with.

    Args:
        network: to be traced.
        around: entered around its call.
        example_inputs: what it is called with.
    """

    def __init__(self, network: nn.Module, around: AbstractContextManager[Any], example_inputs: Any) -> None:
        super().__init__()
        self.network, self._around, self._example = network, around, example_inputs

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Returns what the network returns, and in training its auxiliary losses.

        Raises:
            UsageError: it has made a buffer that it had not before.
        """
        modules = list(self.network.modules())
        before = [(owner, key, buffer) for owner in modules for key, buffer in owner._buffers.items()]
        call = Call(lambda: inputs_of(args, kwargs, self._example))
        try:
            with self._around, inside(call):
                returned = self.network(*args, **kwargs)
            self._refuse_new(before)
            with torch.no_grad():
                for owner, key, buffer in before:
                    now = owner._buffers.get(key)
                    if buffer is not None and now is not None and now is not buffer:
                        buffer.copy_(now)
        finally:
            # Whatever has happened: what was assigned in a trace holds no numbers.
            for owner in modules:
                owner._buffers.clear()
            for owner, key, buffer in before:
                owner._buffers[key] = buffer
        return returned, tuple(call.aux_losses) if any(owner.training for owner in modules) else ()

    def _refuse_new(self, before: list[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
        known = {(id(owner), key) for owner, key, buffer in before if buffer is not None}
        for path, owner in self.network.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and (id(owner), key) not in known:
                    raise UsageError(
                        f"the forward makes the buffer {path}{'.' if path else ''}{key} in its first call, so that a "
                        "trace of it says nothing of later ones; register it with its first value in __init__"
                    )


def own_path(path: str) -> str:
    """Converts a name or path in `Assigning` to that which the network has."""
    return path.removeprefix("network").removeprefix(".")


_SILENT_WRITES = {
    "aten.batch_norm.default": (("running_mean", "running_var"), "training"),
    "aten.instance_norm.default": (("running_mean", "running_var"), "use_input_stats"),
}
"""Operators that write buffers although their schemas say nothing of it: which, and the argument that decides."""
_CHECKS = ("aten._assert_tensor_metadata.default",)
"""Operators that only compare what cannot change here."""
_ONLY_VALUES = "takes a number from a tensor, so that what follows depends on the data"
_DEPENDS = {
    "aten.item": _ONLY_VALUES,
    "aten._local_scalar_dense": _ONLY_VALUES,
    "aten.sym_size": "makes a tensor whose shape depends on the data",
    "aten._assert_scalar": "makes a tensor whose shape depends on the data",
}
_LIFTED = "_constants."
"""Before the names of tensors that are neither parameters nor buffers."""
_NO_LINE = "a place that torch does not tell"
_NO_TREE = (
    "the network returns something else than tensors in tuples, lists and dictionaries. Where it is a cache of keys "
    "and values, switch it off (use_cache=False in the configuration)"
)


class StateTensor(NamedTuple):
    """A tensor of the network."""

    kind: str
    """"parameter", "buffer" (persistent), "constant" (any other)."""
    name: str
    """The first that it has in the network."""
    use: int = 0
    """Of a trained parameter: which of its uses (`elaswave.models.splitting.graph`)."""


class Traced(NamedTuple):
    """A network in one mode."""

    ops: tuple[Op, ...]
    modules: tuple[str, ...]
    """By operator, the path of the module that it belongs to."""
    inputs: tuple[int, ...]
    """Values of the inputs' tensors, in the order of `leaves_of`."""
    state: Mapping[int, StateTensor]
    """Values that are tensors of the network."""
    constants: Mapping[str, torch.Tensor]
    """Those of kind "constant", by name."""
    outputs: tuple[Any, ...]
    """`Ref` or None for each leaf of what the network returns."""
    out_tree: Any
    """How they are put together: a tree of positions in `outputs`."""

    @property
    def ends(self) -> list[int]:
        """Values that a backward begins at, as far as they have gradients: outputs and auxiliary losses."""
        told = [op.args[0] for op in self.ops if op.target == AUX_LOSS]
        return list(dict.fromkeys(each.value for each in (*self.outputs, *told) if isinstance(each, Ref)))


def cloned_constant(constant: torch.Tensor) -> torch.Tensor:
    """Copies a constant into memory of its own; what is repeated in it stays so."""
    once = constant.detach()
    for dim, stride in enumerate(constant.stride()):
        once = once.narrow(dim, 0, min(1, once.shape[dim])) if stride == 0 else once
    return once.clone().expand(constant.shape)


def trace(model: nn.Module, example_inputs: Any, others: Mapping[str, torch.Tensor] | None = None) -> Traced:
    """Lists the operators of a network in the mode in which it is.

    Args:
        model: the network.
        example_inputs: of a micro-batch.
        others: constants of the other mode: what is not equal gets another name.
    Raises:
        UsageError: it is no fixed list of operators; names the line of code.
    """
    refuse_inputs(example_inputs)
    for path, part in foreign_in("", model).items():
        raise UsageError(
            f"the network has the foreign part {path.removeprefix('.')} ({part.kind}), which no trace sees into: give "
            "the layers by hand (docs/own-models.md)"
        )
    with as_in_a_call() as known:
        try:
            return _traced(model, example_inputs, known, others or {})
        except UsageError:
            if not known.matters:
                raise
    # What an ordinary call does may be nothing for a trace: the way that the code has for traces.
    return _traced(model, example_inputs, nullcontext(), others or {})


def _traced(
    model: nn.Module, example_inputs: Any, around: AbstractContextManager[Any], others: Mapping[str, torch.Tensor]
) -> Traced:
    args, kwargs = call_of(example_inputs)
    with attributes_kept(model), _no_foreign_draws(), _errors_named(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = Assigning(model, around, example_inputs)
        exported = torch.export.export(whole, args, dict(sorted(kwargs.items())), strict=False)
    return _Flat(model, exported, others).made()


@contextmanager
def _no_foreign_draws() -> Iterator[None]:
    """Refuses a forward that draws from Python's or numpy's generator: a trace would keep what it has drawn."""
    before = random.getstate(), np.random.get_state(legacy=False)
    yield
    after = random.getstate(), np.random.get_state(legacy=False)
    for who, one, other in zip(("Python's random", "numpy.random"), before, after, strict=True):
        if repr(one) != repr(other):
            raise UsageError(
                f"the network draws from {who} in its forward: a traced network would keep the one outcome. Draw with "
                "torch (torch.rand) and choose by torch.where, or give the layers by hand"
            )


@contextmanager
def _errors_named() -> Iterator[None]:
    """Turns what export raises into an error that names the line of the network."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        text = str(error)
        if "not a known type" in text and "pytree" in text:
            raise UsageError(f"{_NO_TREE} ({text.partition(',')[0]})") from error
        is_data = "data-dependent" in text.lower() or "DataDependent" in type(error).__name__
        why = "its control flow depends on the data" if is_data else f"{type(error).__name__}: {text.splitlines()[0]}"
        line = _line_of(error)
        advice = "change that line, or give the layers by hand (docs/own-models.md)"
        if is_data:
            advice = "write both ways and choose by torch.where"
        elif line == _NO_LINE:
            advice = (
                "give example inputs that the network itself can be called with (a tuple or list is its arguments, a "
                "dictionary its keywords); if it can be, give the layers by hand (docs/own-models.md)"
            )
        raise UsageError(f"the network cannot be traced at {line}: {why}; {advice}") from error


def _line_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_torch(frame.filename)]
    own = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    if not own:
        return _NO_LINE
    return f"{own[-1].filename}:{own[-1].lineno} ({(own[-1].line or '').strip()})"


def node_source(node: fx.Node) -> str:
    """Finds the line of the network's code that a node comes from: the innermost one outside of torch, if there is
    one."""
    text = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*([^\n]*)', text)
    frames = [frame for frame in frames if Path(frame[0]).parent != Path(__file__).parent]
    own = [frame for frame in frames if not is_torch(frame[0])] or frames
    return f"{own[-1][0]}:{own[-1][1]} ({own[-1][2].strip()})" if own else "the network"


class _Flat:
    """Makes the flat list of a network's operators.

    Args:
        model: that was traced.
        exported: what `torch.export` has made of it.
        others: constants whose names mean something else.
    """

    def __init__(self, model: nn.Module, exported: Any, others: Mapping[str, torch.Tensor]) -> None:
        self._exported, self._others = exported, others
        self._num_values = 0
        self._ops: list[Op] = []
        self._modules: list[str] = []
        self._state: dict[int, StateTensor] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._inputs: list[int] = []
        self._bases: dict[int, tuple[int, ...]] = {}
        """By value, those that it is a view of."""
        self._first_names = _first_names(model)
        self._model_values = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )

    def made(self) -> Traced:
        graph = self._exported.graph
        specs = self._exported.graph_signature.input_specs
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        by_name: dict[str, int] = {}
        given: dict[fx.Node, Any] = {}
        for node, spec in zip(placeholders, specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                given[node] = Ref(self._new())
                self._inputs.append(given[node].value)
            else:
                state = self._state_of(spec)
                # A tied tensor has several placeholders, and is one value.
                if state.name not in by_name:
                    by_name[state.name] = self._new()
                    self._state[by_name[state.name]] = state
                given[node] = Ref(by_name[state.name])
        outputs = self._inline(self._exported.graph_module, given, PLAIN, "")
        leaves = tuple(outputs[len(outputs) - self._exported.call_spec.out_spec.num_leaves :])
        tree, aux_losses = self._out_tree()
        strange = [each for each in leaves if each is not None and not isinstance(each, Ref)]
        if strange:
            raise UsageError(f"{_NO_TREE} ({strange[0]!r:.80} of type {type(strange[0]).__name__})")
        self._refuse_writes()
        kept = {each.value for each in leaves if isinstance(each, Ref)}
        ops = self._with_assigned_buffers(_pruned(self._ops, kept))
        ops = self._with_own_inputs(self._with_aux_losses(ops, [leaves[place] for place in aux_losses]))
        if not ops:
            raise UsageError(
                "the network computes nothing: what it returns does not come from an operator, so there is nothing to "
                "cut. Return tensors that the forward computes"
            )
        return Traced(
            tuple(ops), tuple(self._modules[op.number] for op in ops), tuple(self._inputs), self._state,
            self._constants, leaves[: len(leaves) - len(aux_losses)], tree,
        )  # fmt: skip

    def _out_tree(self) -> tuple[Any, Sequence[int]]:
        """Describes what the network returns as a tree of places among the leaves, and the places of auxiliary
        losses."""
        spec = self._exported.call_spec.out_spec
        try:
            returned, aux_losses = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
            return plain_tree(returned), aux_losses
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{_NO_TREE} ({type(error).__name__}: {error})") from error

    def _new(self) -> int:
        self._num_values += 1
        return self._num_values - 1

    def _state_of(self, spec: Any) -> StateTensor:
        if spec.kind is InputKind.PARAMETER:
            return StateTensor("parameter", self._first_names[id(self._model_values[own_path(spec.target)])])
        if spec.kind is InputKind.BUFFER and spec.persistent:
            return StateTensor("buffer", self._first_names[id(self._model_values[own_path(spec.target)])])
        if spec.kind is InputKind.BUFFER:
            name = own_path(spec.target)
            self._constants[name] = self._model_values[name]
            return StateTensor("constant", name)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            constant = self._exported.constants[spec.target]
            name = self._name_of(f"{_LIFTED}{own_path(spec.target).replace('.', '_')}", constant)
            self._constants[name] = constant
            return StateTensor("constant", name)
        raise UsageError(f"the network is given {spec.kind.name} {spec.target}: only tensors can be taken along")

    def _name_of(self, name: str, constant: torch.Tensor) -> str:
        """Makes a name that no other constant has."""
        for known in (self._others, self._constants):
            while name in known and not _are_same(known[name], constant):
                name += "_"
        return name

    def _inline(self, module: fx.GraphModule, given: Mapping[fx.Node, Any], context: Context, path: str) -> list[Any]:
        """Adds the operators of a graph, those of graphs within it too; returns what the graph returns."""
        values: dict[fx.Node, Any] = dict(given)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = getattr(module, node.target)
            elif node.op == "output":
                return list(fx.map_arg(node.args[0], lambda each: values[each]))
            elif node.op == "call_function":
                values[node] = self._call(node, values, context, path)
        raise AssertionError("a graph without an output")

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any], context: Context, path: str) -> Any:
        path = _module_of(node) or path
        args = _plain(fx.map_arg(node.args, lambda each: values[each]))
        kwargs = _plain(fx.map_arg(dict(node.kwargs), lambda each: values[each]))
        target = str(node.target)
        if target == "wrap_with_set_grad_enabled":
            enabled, graph, *rest = args
            inner = Context(enabled and context.grad, context.autocast)
            return self._inline(graph, _given(graph, rest), inner, path)
        if target == "wrap_with_autocast":
            device, dtype, enabled, keeps, graph, *rest = args
            inner = Context(context.grad, (device, dtype, enabled, keeps))
            return self._inline(graph, _given(graph, rest), inner, path)
        # What a graph within this one has returned, see `_inline`: it is no operator's.
        if isinstance(args[0] if args else None, list) and "getitem" in target:
            return args[0][args[1]]
        if target in _CHECKS:
            return None
        self._refuse(node, target)
        return self._add(node, args, kwargs, context, path)

    def _refuse(self, node: fx.Node, target: str) -> None:
        why = next((why for name, why in _DEPENDS.items() if target.startswith(name)), None)
        value = node.meta.get("val")
        shapes = [each.shape for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        if why is None and any(not isinstance(size, int) for shape in shapes for size in shape):
            why = "makes a tensor whose shape depends on the data"
        if why is not None:
            raise UsageError(
                f"the network cannot be cut: {target} at {node_source(node)} {why}. Shapes and control flow must be "
                "the "
                "same for every micro-batch: compute with masks (torch.where) instead, or give the layers by hand"
            )
        if "getitem" not in target and not isinstance(node.target, torch._ops.OpOverload):
            raise UsageError(
                f"the network cannot be cut: it calls {target} at {node_source(node)}, which is no operator of torch "
                "that can stand in a flat list. Write it with ordinary operators, or give the layers by hand"
            )

    def _add(self, node: fx.Node, args: Any, kwargs: Any, context: Context, path: str) -> Ref:
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._append(node, GETITEM, args, {}, (), context, path)
        writes, result = _writes_of(node.target, args, kwargs)
        made = self._append(node, str(node.target), args, kwargs, writes, context, path)
        # An operator that writes in place returns what it has written: later uses are of that value.
        return made if result is None else result

    def _append(
        self, node: fx.Node, target: str, args: Any, kwargs: Any, writes: Sequence[int], context: Context, path: str
    ) -> Ref:
        function = node.target
        draws = target != GETITEM and torch.Tag.nondeterministic_seeded in function.tags  # type: ignore[union-attr]
        out = self._new()
        self._ops.append(
            Op(len(self._ops), target, args, kwargs, out, tuple(writes), context, draws, node_source(node))
        )
        self._bases[out] = tuple(refs_in(args[:1])) if target == GETITEM else _seen_through(function, args, kwargs)
        self._modules.append(path)
        return Ref(out)

    def _memory(self, value: int) -> set[int]:
        """Finds the value and all that it is a view of."""
        found, waiting = set(), [value]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += self._bases.get(each, ())
        return found

    def _refuse_writes(self) -> None:
        """Refuses a forward that writes what has to stay: parameters, and tensors that are no state."""
        for op in self._ops:
            for value in sorted({each for written in op.writes for each in self._memory(written)}):
                state = self._state.get(value)
                if state is None or state.kind == "buffer":
                    continue
                if state.kind == "parameter":
                    raise UsageError(
                        f"the network writes its parameter {state.name} at {op.source}: parameters change in updates "
                        "only. Compute with a changed copy"
                    )
                if state.name.startswith(_LIFTED):
                    raise UsageError(
                        f"the network writes the tensor {state.name.removeprefix(_LIFTED)} at {op.source}, which is no "
                        "buffer, so that no checkpoint would hold it and no later micro-batch see it. Make it state "
                        "with register_buffer, or compute with a changed copy"
                    )

    def _added(self, target: str, args: tuple[Any, ...], source: str) -> Op:
        """Makes an operator that is not in the network's code. It has a number of its own: those of others key
        dropout."""
        self._modules.append("")
        return Op(len(self._modules) - 1, target, args, {}, self._new(), source=source)

    def _with_assigned_buffers(self, ops: Sequence[Op]) -> list[Op]:
        """A buffer that the forward assigns anew (``self.mean = ...``) is written where its new value is there.

        `Assigning` writes all of them at the end, so that no cut could come after their first use. In the network a
        use of the old value goes on with the old tensor: it gets a copy, which the backward may need unchanged.
        """
        ops, ends = list(ops), []
        while ops and ops[-1].target == "aten.copy_.default" and ops[-1].args[0].value in self._state:
            ends.append(ops.pop())
        assigned = {op.args[0].value: op for op in reversed(ends) if op.args[0] != op.args[1]}  # else: self.calls += 1
        copies = {}
        for value in assigned:
            first = next((place for place, op in enumerate(ops) if value in op.values), None)
            if first is not None:
                copy = self._added("aten.clone.default", (Ref(value),), ops[first].source)
                copies[value] = copy.out
                ops = [*ops[:first], copy, *(renamed(op, {value: copy.out}) for op in ops[first:])]
        for value, op in assigned.items():
            # Behind all that makes or writes the new value, and behind all uses of the buffer.
            new = renamed(op, copies).args[1]
            memory = self._memory(new.value)
            places = [
                place for place, each in enumerate(ops)
                if each.out in memory or value in each.values
                or any(self._memory(written) & memory for written in each.writes)
            ]  # fmt: skip
            place = max(places, default=-1) + 1
            source = ops[place - 1].source if place else op.source
            ops.insert(place, replace(op, args=(Ref(value), new), source=source))
        return ops

    def _with_aux_losses(self, ops: list[Op], told: Sequence[Ref]) -> list[Op]:
        """Auxiliary losses are told, in their order, as soon as they are there: by the part that makes them."""
        place = 0
        for ref in told:
            memory = self._memory(ref.value)
            made = [
                before for before, op in enumerate(ops)
                if op.out in memory or any(self._memory(written) & memory for written in op.writes)
            ]  # fmt: skip
            place = max([place, *(before + 1 for before in made)])
            last = ops[max(place - 1, 0)]
            ops.insert(place, replace(self._added(AUX_LOSS, (ref,), last.source), context=last.context))
            place += 1
        return ops

    def _with_own_inputs(self, ops: list[Op]) -> list[Op]:
        """An input that the network writes is copied first: it is the data's own memory."""
        written = {each for op in ops for value in op.writes for each in self._memory(value)} & set(self._inputs)
        first = [self._added("aten.clone.default", (Ref(value),), "an input") for value in sorted(written)]
        copies = {op.args[0].value: op.out for op in first}
        return [*first, *(renamed(op, copies) for op in ops)]


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.stride()) == (other.dtype, other.stride()) and torch.equal(one, other)


def _given(graph: fx.GraphModule, args: Sequence[Any]) -> dict[fx.Node, Any]:
    return dict(zip((node for node in graph.graph.nodes if node.op == "placeholder"), args, strict=True))


def _first_names(model: nn.Module) -> dict[int, str]:
    found: dict[int, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            found.setdefault(id(tensor), name)
    return found


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return own_path(str(next(reversed(stack.values()))[0])) if stack else ""


def _plain(tree: Any) -> Any:
    """Arguments without the containers of `torch.fx`."""
    if isinstance(tree, Ref):
        return tree
    if isinstance(tree, tuple):
        return tuple(_plain(each) for each in tree)
    if isinstance(tree, list):
        return [_plain(each) for each in tree]
    if isinstance(tree, dict):
        return {key: _plain(each) for key, each in tree.items()}
    return tree


def _writes_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[int], Ref | None]:
    """Finds the values that an operator writes, by its schema, and the one that it returns if that is one of them."""
    schema = target._schema
    by_name = {each.name: value for each, value in zip(schema.arguments, args)} | dict(kwargs)
    by_name |= {each.name: each.default_value for each in schema.arguments if each.name not in by_name}
    writes: list[int] = []
    by_alias = {}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = list(refs_in(by_name[argument.name]))
            writes += found
            for alias in argument.alias_info.before_set:
                by_alias[alias] = by_name[argument.name]
    if str(target) in _SILENT_WRITES:
        names, decides = _SILENT_WRITES[str(target)]
        if by_name[decides]:
            writes += [value for name in names for value in refs_in(by_name[name])]
    result = None
    if len(schema.returns) == 1 and (info := schema.returns[0].alias_info) is not None and info.is_write:
        result = next((by_alias[alias] for alias in info.before_set if isinstance(by_alias.get(alias), Ref)), None)
    return writes, result


def _seen_through(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Finds the values that what an operator makes is a view of, by its schema."""
    schema = target._schema
    returned = {alias for each in schema.returns if each.alias_info is not None for alias in each.alias_info.before_set}
    by_name = {each.name: value for each, value in zip(schema.arguments, args)} | dict(kwargs)
    return tuple(
        value
        for each in schema.arguments
        if each.alias_info is not None and returned & each.alias_info.before_set and each.name in by_name
        for value in refs_in(by_name[each.name])
    )


def _pruned(ops: Sequence[Op], outputs: set[int]) -> list[Op]:
    """Leaves out operators that nothing depends on. What an operator makes out of several is taken out right after
    it."""
    needed, kept = set(outputs), []
    for op in reversed(ops):
        if op.out in needed or op.has_effect:
            needed.update(op.values)
            kept.append(op)
    kept.reverse()
    several: dict[int, list[Op]] = {}
    for op in kept:
        if op.target == GETITEM:
            several.setdefault(op.args[0].value, []).append(op)
    ordered: list[Op] = []
    for op in kept:
        if op.target != GETITEM:
            ordered.append(op)
            ordered += several.get(op.out, [])
    return ordered


def plain_tree(tree: Any) -> Any:
    """Converts what a network returns to a tree that may travel: objects with fields become dictionaries without what
    is None."""
    if isinstance(tree, Mapping):
        return {key: plain_tree(each) for key, each in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {key: plain_tree(each) for key, each in zip(tree._fields, tree)}
    if isinstance(tree, tuple | list):
        return type(tree)(plain_tree(each) for each in tree)
    if isinstance(tree, int) or tree is None:
        return tree
    raise UsageError(f"{_NO_TREE} (a {type(tree).__name__})")
