"""`elaswave.split` and `elaswave.operator_graph`: any network as layers, and what it is made of."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elaswave.errors import UsageError
from elaswave.models.layers import Call, Layer, inside
from elaswave.models.splitting.attributes import ChangingAttributes
from elaswave.models.splitting.backward import BackwardCode, refuse_registered
from elaswave.models.splitting.check import (
    Difference,
    bits_of,
    buffers_kept,
    cloned_inputs,
    difference,
    difference_in_evaluation,
    scales_of,
    tensors_in,
)
from elaswave.models.splitting.cut import (
    DependencyGraph,
    balanced_cuts,
    bounds_of,
    costs_of,
    places_in_evaluation,
    problem_with_cuts,
)
from elaswave.models.splitting.graph import OperatorGraph, graph_of, with_own_uses
from elaswave.models.splitting.inputs import call_of
from elaswave.models.splitting.measure import OperatorRun, operator_seconds, run_operators
from elaswave.models.splitting.parts import SplitMode, in_mode, make_layers
from elaswave.models.splitting.trace import trace

LINK_BYTES_PER_S = 1e9
"""What two workers of one machine reach about."""


class SplitLayers(list[Layer]):
    """The parts of a network: a list of layers for `elaswave.Trainer`, and how they came about.

    A run keeps the cuts that it began with (``model.cuts`` in its configuration): the Trainer cuts the network again
    where the run that it resumes was cut.
    """

    def __init__(self, network: "TracedNetwork", cuts: tuple[int, ...]) -> None:
        super().__init__(network.layers(cuts))
        self.network = network
        self.cuts = cuts
        """Numbers of the operators that begin a new part."""

    @property
    def fingerprint(self) -> str:
        """A hash of the network's operators."""
        return self.network.fingerprint

    @property
    def graph(self) -> OperatorGraph:
        """The operators with what they cost, and the cuts."""
        return self.network.graph(self.cuts)

    @property
    def part_s(self) -> list[float]:
        """What each part takes by counted costs: its operators forward and backward, and what crosses at its ends."""
        costs = self.network.costs
        return [costs.part_s(start, stop) for start, stop in bounds_of(self.cuts, len(self.network.train.ops))]

    def cut_at(self, cuts: Sequence[int], fingerprint: str = "") -> "SplitLayers":
        """Makes the same network with other cuts.

        Args:
            cuts: numbers of the operators that begin a new part.
            fingerprint: of the network that they are of; empty: any.
        Raises:
            UsageError: it is another network, or cannot be cut there.
        """
        own = self.network.fingerprint
        if fingerprint and fingerprint != own:
            raise UsageError(
                f"the run was begun with another network: the fingerprint of its operators is {fingerprint}, and that "
                f"of the network now {own}. Resume with the same network, example inputs and versions of libraries"
            )
        return SplitLayers(self.network, self.network.checked_cuts(cuts))


class TracedNetwork:
    """A network, traced and run in both modes.

    Args:
        model: the network, with its values; stays as it is.
        example_inputs: inputs of a micro-batch.
        link_bytes_per_s: between two parts.
    """

    def __init__(self, model: nn.Module, example_inputs: Any, link_bytes_per_s: float) -> None:
        _refuse_arguments(model, link_bytes_per_s)
        self.model, self.example_inputs = model, example_inputs
        self._is_timed = False
        if not any(part.training for part in model.modules()):
            model.train()
        with torch.random.fork_rng(devices=[]):
            self.train = trace(model, example_inputs)
            self._train_flow = DependencyGraph(self.train, run_operators(self.train, model, example_inputs))
            apart = with_own_uses(self._train_flow)
            if apart is not self.train:
                self.train = apart
                self._train_flow = DependencyGraph(apart, run_operators(apart, model, example_inputs))
            with in_mode(model, train=False):
                self._evaluation = trace(model, example_inputs, self.train.constants)
            facts = run_operators(self._evaluation, model, example_inputs)
            self._evaluation_flow = DependencyGraph(self._evaluation, facts, self._train_flow.written_buffers())
            self._refuse_what_no_trace_holds()
        self._there = places_in_evaluation(self._train_flow, self._evaluation_flow)
        self.costs = costs_of(self._train_flow, self._there, link_bytes_per_s)

    def _refuse_what_no_trace_holds(self) -> None:
        """Refuses, in ordinary calls, attributes that change, and the network's own code in its backward. It runs after
        the traces, which refuse what is written in place."""
        attributes, backward = ChangingAttributes(self.model), BackwardCode()
        for is_training in (True, False):
            args, kwargs = call_of(cloned_inputs(self.example_inputs))
            call = Call(lambda: cloned_inputs(self.example_inputs))
            with in_mode(self.model, train=is_training), buffers_kept(self.model), attributes.watched():
                with torch.set_grad_enabled(is_training), inside(call), backward.watched():
                    returned = self.model(*args, **kwargs)
            if is_training:
                refuse_registered(self.model)  # also what the forward has registered
                backward.refuse([*tensors_in(returned), *call.aux_losses], self._facts.functions)
        attributes.refuse()

    @property
    def _facts(self) -> OperatorRun:
        return self._train_flow.facts

    @property
    def fingerprint(self) -> str:
        """A hash of the operators, their arguments and the constants."""
        text = repr([(op.target, op.args, sorted(op.kwargs.items()), op.context) for op in self.train.ops])
        constants = [bits_of(constant) for name, constant in sorted(self.train.constants.items())]
        return hashlib.blake2b(b"".join([text.encode(), *constants]), digest_size=8).hexdigest()

    def graph(self, cuts: Sequence[int] = ()) -> OperatorGraph:
        """Makes the public graph; the first time, operators are timed."""
        if not self._is_timed:
            self._facts.seconds = operator_seconds(self.train, self.model, self.example_inputs)
            self._is_timed = True
        return graph_of(self._train_flow, cuts)

    def best_cuts(self, num_parts: int) -> tuple[int, ...]:
        """Finds where the slowest of so many parts is fastest.

        Raises:
            UsageError: it cannot be cut into so many.
        """
        if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
            raise UsageError(f"num_parts is {num_parts!r}, needed: a whole number of at least 1")
        cuts = balanced_cuts(self.costs, num_parts)
        if cuts is None:
            raise problem_with_cuts(self._train_flow, self._there, self.costs, num_parts)
        return cuts

    def checked_cuts(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Cuts that a person or a run has given.

        Raises:
            UsageError: the network cannot be cut there.
        """
        given: Any = cuts
        if not isinstance(given, list | tuple) or not all(type(cut) is int for cut in given):
            raise UsageError(f"cuts is {cuts!r:.80}, needed: a list of numbers of operators")
        ends = [0, *cuts, len(self.train.ops)]
        wrong = [cut for cut in cuts if not 0 < cut < ends[-1] or not self.costs.cross_s[cut] < float("inf")]
        if wrong or any(start >= stop for start, stop in zip(ends, ends[1:])):
            raise UsageError(
                f"the network of {ends[-1]} operators cannot be cut at {list(wrong or cuts)}: cuts are numbers of "
                "operators in rising order, not between uses of a buffer that is written, in training or evaluation; "
                "print(split.graph) shows them"
            )
        return tuple(cuts)

    def layers(self, cuts: Sequence[int]) -> list[Layer]:
        """Makes the parts."""
        places: list[int] = []
        for cut in cuts:
            place = self._there[cut]
            assert place is not None, "the costs allow no such cut"
            places.append(max([place, *places[-1:]]))
        return make_layers(
            self.model,
            SplitMode(self._train_flow, bounds_of(cuts, len(self.train.ops)), self.train.out_tree),
            SplitMode(self._evaluation_flow, bounds_of(places, len(self._evaluation.ops)), self._evaluation.out_tree),
            self.example_inputs,
        )


def split(
    model: nn.Module,
    example_inputs: Any,
    num_parts: int,
    *,
    cuts: Sequence[int] | None = None,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    verify: bool = True,
) -> SplitLayers:
    """Cuts any network into layers for `elaswave.Trainer`.

    The network is traced to a flat list of operators, and the list is cut where the slowest part is fastest, by what
    can be counted of each operator: so the cuts are the same in every process. Tensors keep the names that they have in
    the network; each use of a parameter brings a gradient of its own, so that the cuts do not show in the weights.

    Args:
        model: the network, with values; it stays as it is. Its first call decides nothing: it is traced here.
        example_inputs: inputs of a micro-batch as the dataset's collate makes them, of the sizes that training has: a
            tensor, a tuple or list (arguments of the forward), or a dictionary (its keywords).
        num_parts: how many layers to make.
        cuts: numbers of operators before which to cut, instead of the best ones.
        link_bytes_per_s: how fast bytes cross a cut.
        verify: compare outputs, gradients and buffers of the parts with the network's, bit for bit, also for inputs of
            other sizes, and what they return in evaluation with the traced network's.
    Returns:
        The layers; `SplitLayers.graph` shows what was found.
    Raises:
        UsageError: the network cannot be traced or cut, runs code of its own in its backward, or the parts compute
            other bits than the network; names the line of code and the reason.
    """
    network = TracedNetwork(model, example_inputs, link_bytes_per_s)
    found = network.best_cuts(num_parts) if cuts is None else network.checked_cuts(cuts)
    layers = SplitLayers(network, found)
    if verify:
        _compare(model, layers, network.layers(()), example_inputs)
    return layers


def _compare(model: nn.Module, layers: Sequence[Layer], whole: Sequence[Layer], example_inputs: Any) -> None:
    """Refuses layers that compute something else than the network."""
    for inputs, expected in scales_of(model, example_inputs):
        differs = difference(model, layers, whole, inputs, expected)
        if differs is not None:
            raise UsageError(_not_equal(differs))
    differs = difference_in_evaluation(layers, whole, example_inputs)
    if differs is not None:
        raise UsageError(_not_equal(differs))


def operator_graph(model: nn.Module, example_inputs: Any) -> OperatorGraph:
    """Lists the operators of a network, each measured; arguments and errors are as of `split`."""
    return TracedNetwork(model, example_inputs, LINK_BYTES_PER_S).graph()


def _not_equal(differs: Difference) -> str:
    advice = "A cut elsewhere may be exact (num_parts, cuts=), or change that line"
    if differs.is_of_trace:
        advice = (
            "The trace differs before it is cut: it lacks what earlier calls or global variables decide, or the code "
            "there asks whether it is traced (transformers does, with an attention_mask or position_ids: leave them "
            'out where they mask nothing, or set attn_implementation="eager"). Change that line'
        )
    return (
        f"the parts do not compute what the network computes: {differs}. {advice}; with verify=False the parts are "
        "taken as they are: their bits are then their own, the same under any layout and through any failure"
    )


def _refuse_arguments(model: object, link_bytes_per_s: float) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("split was given a TorchScript module, needed: the nn.Module that it was made of")
    if not isinstance(model, nn.Module):
        raise UsageError(f"split was given a {type(model).__name__}, needed: an nn.Module")
    refuse_registered(model)
    if isinstance(link_bytes_per_s, bool) or not isinstance(link_bytes_per_s, int | float) or not link_bytes_per_s > 0:
        raise UsageError(f"link_bytes_per_s is {link_bytes_per_s!r}, needed: more than 0")
    lazy = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if is_lazy(each)]
    if lazy:
        raise UsageError(f"{lazy[0]} has no shape yet (a lazy module): call the network once before it is split")
    without = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]
    if without:
        raise UsageError(
            f"{without[0]} is on the meta device, so that operators cannot be measured: give a network with values"
        )
