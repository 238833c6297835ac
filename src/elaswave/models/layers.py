"""What the engine asks of a model, what a layer may ask of the engine, and the parts that GPT and Llama share.

A model is a list of layers and a loss. Each layer is a factory of an ``nn.Module`` (tensor in, tensor out) that any
worker can build alone: its initial values depend on nothing but torch's default generator, which `build_layer` seeds
from (run seed, layer). Layers keep no state between calls, and draw random numbers from the default generator only,
so that the bits of a micro-batch's forward and backward do not depend on who computes it or what came before.

While a layer runs, it may say and ask things (`aux_loss`, `batch`): the engine puts a `Call` in place around each call
of a layer (`inside`), one per thread. Where there is none, as in ordinary PyTorch, an auxiliary loss goes nowhere and
there is no batch.

The models choose one kernel by hand: the product of a linear layer in float32 on a CPU. torch hands it to MKL, which
leaves AMD processors at half their speed; oneDNN, which torch contains too and uses for bfloat16, does not. Measured on
one core of an AMD EPYC (AVX-512), torch 2.13.0, forward and backward of 512 rows: 128 x 512 in 1.02 ms against 2.10,
320 x 1280 in 5.7 against 12.4 (230 against 105 GFLOP/s); the default model in 28 ms against 40. The price is some 20 us
per product, which shows in small ones. Like MKL's, the result depends on shapes, strides and the kind of processor
only.

Suffixes of tensor names give their shape:
    B batch, T position, C hidden size, H query heads, K key/value heads, G query heads per key/value head (H = K * G),
    D size of a head (C = H * D), F intermediate size of the MLP, V vocabulary.
"""

import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from elaswave.devices.interface import seed_host
from elaswave.errors import ConfigError, UsageError
from elaswave.fences import Codec, FenceRatio, codecs_at, fence_problems, fence_ratio_of, ratio_problems
from elaswave.hashing import key64


class LossOutput(NamedTuple):
    """What a loss returns that is normalised by a count over the whole batch, such as tokens that are not ignored.

    The loss of a step is the sum of all totals divided by the sum of all counts.
    """

    total: torch.Tensor
    """A scalar: the sum over the micro-batch."""
    count: torch.Tensor | int  # type: ignore[assignment]  # hides tuple.count
    """What it is a sum over: a whole number, at least 0."""


@dataclass(frozen=True)
class Layer:
    """One layer of a model, and how any worker builds it.

    Args:
        name: unique in the model; the full name of a parameter is ``f"{name}.{parameter name in the module}"``.
        build: makes the module, with initial values drawn only from torch's, numpy's and Python's global generators,
            which are seeded by (run seed, position of the layer) before. Must also work under
            ``torch.device("meta")``.
        ties: own parameter name -> full name of the parameter of another layer that it is one tensor with.
        recompute: keep only the layer's input, and run it again in backward: less memory, more time, the same bits.
        compile: run it through ``torch.compile``.
        keeps_names: the full name of a parameter is its name in the module alone, as in a network that was cut into
            layers. Names of tied parameters that are left out of `Result.state_dict` are those of other layers. A
            layer may then be tied with itself: each use of a parameter brings a gradient of its own.
        only_reads: names of tied parameters that no training uses here, so that they bring no gradient.
    """

    name: str
    build: Callable[[], nn.Module]
    _: KW_ONLY
    ties: Mapping[str, str] = field(default_factory=dict)
    recompute: bool = False
    compile: bool = False
    keeps_names: bool = False
    only_reads: frozenset[str] = frozenset()

    def full_name(self, name: str) -> str:
        """Returns the name in the model of a tensor of this layer's module."""
        return name if self.keeps_names else f"{self.name}.{name}"

    def is_further_use(self, name: str) -> bool:
        """Tells whether a parameter of this layer's module is another one's memory, used once more."""
        return self.keeps_names and name in self.ties

    def own_name(self, full: str) -> str:
        """Does the inverse of `full_name`."""
        return full if self.keeps_names else full.removeprefix(f"{self.name}.")


@dataclass(frozen=True)
class ModelSpec:
    """A model: what the engine needs and nothing more.

    Args:
        layers: in forward order; the first takes a micro-batch's inputs, each further one what its predecessor returns:
            a tensor, or a tree of tensors (`elaswave.engine.checks.values`).
        loss: (output of the last layer, targets) -> the mean over the micro-batch, a scalar, or `LossOutput`.
        metrics: by name, (output of the last layer, targets) -> the mean over the micro-batch, or (total, count).
        fences: codec of the boundary behind each layer that has one, by position (`elaswave.fences`).
        fence_ratios: of adaptive fences, from which step on; empty: the run chooses them.
    """

    layers: tuple[Layer, ...]
    loss: Callable[[Any, Any], torch.Tensor | LossOutput]
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    fences: Mapping[int, Codec] = field(default_factory=dict)
    fence_ratios: tuple[FenceRatio, ...] = ()

    def with_fences(self, fences: Sequence[str], ratios: Sequence[str] = ()) -> "ModelSpec":
        """Makes the same model with fences.

        Args:
            fences: ``LAYER:CODEC``, as `model.fences` of a configuration has them.
            ratios: ``STEP:LAYER:RATIO``, as `model.fence_ratios` has them.
        Raises:
            ConfigError: a fence that stands behind no layer of the model, or behind the last one, or the ratio of one
                that has none; all of them.
        """
        if not fences and not ratios:
            return self
        names = [layer.name for layer in self.layers]
        if problems := fence_problems(fences, names):
            raise ConfigError([f"model.fences: {problem}" for problem in problems])
        if problems := ratio_problems(ratios, fences):
            raise ConfigError([f"model.fence_ratios: {problem}" for problem in problems])
        return replace(self, fences=codecs_at(fences, names), fence_ratios=tuple(map(fence_ratio_of, ratios)))


def build_layer(spec: Layer, seed: int, index: int) -> nn.Module:
    """Builds one layer with its initial values, the same in any process and in any order.

    Leaves the global generators in an unspecified state: every draw of the engine is seeded anew.

    Args:
        spec: the layer.
        seed: the run's seed.
        index: position of the layer in the model.
    """
    key = key64(seed, index, "init")
    seed_host(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    return spec.build()


@dataclass
class Call:
    """One call of a layer.

    Args:
        inputs: fetches the micro-batch's inputs.
        key: of draws in this micro-batch: run seed, step, micro-batch; None: there is none.
        check: called while the layer waits for another process; it may raise, and the layer is run again later.
        elsewhere: stands around such a wait.
    """

    inputs: Callable[[], Any]
    key: tuple[int, ...] | None = None
    check: Callable[[], None] = lambda: None
    elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext
    aux_losses: list[torch.Tensor] = field(default_factory=list)
    """In the order in which they were given."""


class _Here(threading.local):
    call: Call | None = None


_HERE = _Here()


class inside:
    """Puts a call in place for this thread, as a context manager. A class: it stands around every run of a layer, and
    takes a quarter of the time of a generator."""

    __slots__ = ("_before", "_call")

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._before, _HERE.call = _HERE.call, self._call

    def __exit__(self, *exception: object) -> None:
        _HERE.call = self._before


def aux_loss(value: torch.Tensor) -> None:
    """Adds an auxiliary loss of the present micro-batch, from inside a layer: a router's balance loss, say.

    Its gradient joins the layer's backward. A step's auxiliary loss is the mean over micro-batches, weighted with their
    counts where the loss returns counts; it is reported as the metric "aux_loss", beside the loss. Outside of a layer
    that elaswave runs, and in evaluation, it does nothing.

    Args:
        value: a scalar, computed from the layer's input and parameters.
    Raises:
        UsageError: it is no scalar of a floating-point type.
    """
    call = _HERE.call
    if call is None:
        return
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise UsageError(
            f"aux_loss was given {describe(value)}, needed is a scalar tensor of a floating-point type: take its mean "
            "or sum"
        )
    call.aux_losses.append(value)


def batch() -> Any:
    """Returns the inputs of the present micro-batch, as the dataset's `collate` made them, from inside any layer.

    Masks and positions need not travel through the layers before. Not to be written to.

    Raises:
        UsageError: no layer is being run by elaswave here.
    """
    call = _HERE.call
    if call is None:
        raise UsageError(
            "batch() was called where elaswave runs no layer; call it in a layer's forward, while a Trainer trains"
        )
    return call.inputs()


def draw_key() -> tuple[int, ...] | None:
    """Returns what keys the draws of the present micro-batch; None where elaswave runs no layer."""
    return None if _HERE.call is None else _HERE.call.key


def check_wait() -> None:
    """Lets the worker's transfers move, and leaves the layer if its step is over; it is to be called while a layer
    waits."""
    if _HERE.call is not None:
        _HERE.call.check()


def computed_elsewhere() -> AbstractContextManager[None]:
    """Stands around a wait for another process, which is to take as long as the layer permits."""
    return nullcontext() if _HERE.call is None else _HERE.call.elsewhere()


def describe(value: object) -> str:
    """Describes what a value is, for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if isinstance(value, int | float) else type(value).__name__


USE_ONEDNN = True
"""False: always torch's own choice. The two round differently, so all workers of a job must use the same."""


def _find_onednn() -> Any:
    """Finds oneDNN's linear operator, which torch.compile uses too; None where torch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


_ONEDNN_LINEAR = _find_onednn()


class _Wanted(threading.local):
    """What `gradients_along` has been told in this thread: backwards of CPU tensors run in the thread that asks."""

    gradients: tuple[Collection[Node], bool] | None = None
    """None: everything."""


_WANTED = _Wanted()


@contextmanager
def gradients_along(way: Collection[Node], *, along: bool) -> Iterator[None]:
    """Saves products that will not be used while a backward runs in halves.

    torch's own kernels know which of their gradients are asked for, functions written in Python do not.

    Args:
        way: nodes of the graph on the way from output to input.
        along: True: gradients that stay on the way are wanted, False: those that leave it, or are off it.
    """
    _WANTED.gradients = (way, along)
    try:
        yield
    finally:
        _WANTED.gradients = None


def _is_wanted(node: Any, target: Node | None) -> bool:
    assert _WANTED.gradients is not None
    way, along = _WANTED.gradients
    return (node in way and target in way) is along


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes ``x @ weight.T + bias`` by oneDNN."""
    result: torch.Tensor = _ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return result


class _OneDNNLinear(torch.autograd.Function):
    """A linear map and its gradients, each product by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Maps ``x`` [..., in], weight [out, in], bias [out] to [..., out]."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, weight and bias, contiguous."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        if _WANTED.gradients is not None:
            targets = [target for target, _ in ctx.next_functions]
            for_x, for_weight, for_bias = (
                needed and _is_wanted(ctx, target) for needed, target in zip(ctx.needs_input_grad, [*targets, None][:3])
            )
        gradient = gradient.contiguous()
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t(), None) if for_x else None,
            _product(rows.t(), x.flatten(0, -2).t(), None) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes ``x @ weight.T + bias`` with the faster of torch's kernels.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
    Returns:
        [..., out]
    """
    if not USE_ONEDNN or _ONEDNN_LINEAR is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    result: torch.Tensor = _OneDNNLinear.apply(x, weight, bias)
    return result


INIT_STD = 0.02
"""Standard deviation of the initial weights (GPT-2, Radford et al. 2019)."""


def token_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Computes the mean cross entropy in nats per token, in float32 whatever the logits' dtype."""
    return F.cross_entropy(logits_BTV.float().flatten(0, -2), targets_BT.flatten())


def check_sizes(
    *,
    vocab_size: int,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    context_length: int,
    dropout: float,
    problems: Sequence[str] = (),
) -> None:
    """Refuses sizes from which no model can be built.

    Args:
        problems: what the caller has found itself, reported together with the rest.
    Raises:
        ConfigError: lists every problem, by configuration key.
    """
    found = list(problems)
    sizes = {
        "data.vocab_size": vocab_size,
        "model.num_layers": num_layers,
        "model.hidden_size": hidden_size,
        "model.num_heads": num_heads,
        "model.context_length": context_length,
    }
    found += [f"{key}: {value} is below 1" for key, value in sizes.items() if value < 1]
    if num_heads >= 1 and hidden_size % num_heads:
        found.append(f"model.hidden_size: {hidden_size} is no multiple of model.num_heads, {num_heads}")
    if not 0 <= dropout < 1:
        found.append(f"model.dropout: {dropout} is not in [0, 1)")
    if found:
        raise ConfigError(found)


def check_sequence(tokens_BT: torch.Tensor, context_length: int) -> None:
    """Refuses sequences that have more positions than the model.

    Raises:
        ValueError: more than context_length positions.
    """
    if tokens_BT.shape[-1] > context_length:
        raise ValueError(
            f"a sequence of {tokens_BT.shape[-1]} tokens does not fit model.context_length, {context_length}: "
            "shorten it or build the model with more positions"
        )


class Linear(nn.Linear):
    """A linear map whose weights start as normal(0, std), and whose biases start at zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float = INIT_STD) -> None:
        self.std = std  # before the parent's constructor, which draws the initial values
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the initial values."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        return linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """A table of vectors that start as normal(0, `INIT_STD`)."""

    def reset_parameters(self) -> None:
        """Draws the initial values."""
        nn.init.normal_(self.weight, std=INIT_STD)


_DRAW_VALUES = 1 << 16


def _drop_threshold(probability: float) -> int:
    """Computes how many of the 65,536 values of a draw mean "drop"; at least one value keeps."""
    return min(round(probability * _DRAW_VALUES), _DRAW_VALUES - 1)


def dropout_noise(
    shape: torch.Size, probability: float, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Draws what dropout multiplies by: 0 with the given probability, else the reciprocal of the share that is kept.

    Four elements share one 64-bit draw of the default generator, 16 bits each. ``bernoulli_`` makes one slow draw per
    element: 0.6 ms against 0.1 ms per 131,072 elements on one core, 3 ms of the 30 that the default model needs.
    Integer draws also are the same on every kind of CPU.

    Args:
        shape: of the result.
        probability: of a zero, in [0, 1); rounded to a multiple of 2**-16, which the scale takes into account.
        dtype: of the result, a floating-point one.
        device: of the result, whose default generator draws; None: the CPU.
    """
    num_elements = math.prod(shape)
    words = torch.empty((num_elements + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    threshold = _drop_threshold(probability)
    noise = words.view(torch.int16)[:num_elements].to(torch.float32)
    noise.ge_(threshold - _DRAW_VALUES // 2).mul_(_DRAW_VALUES / (_DRAW_VALUES - threshold))
    return noise.view(shape).to(dtype)


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) with `dropout_noise` for its mask.

    Args:
        probability: of an element to be zeroed in training.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def extra_repr(self) -> str:
        """Returns what ``repr`` shows between the brackets."""
        return f"probability={self.probability}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps any shape to the same shape."""
        if not self.training or _drop_threshold(self.probability) == 0:
            return x
        # By the generator of the device that runs it: noise from the host would have to be waited for.
        return x * dropout_noise(x.shape, self.probability, x.dtype, x.device)


class CausalAttention(nn.Module):
    """Softmax attention over earlier positions, with dropout on the attention weights.

    Without dropout it is torch's own fused kernel. With dropout that kernel falls back to a slow path (1.9 ms against
    1.1 ms for forward and backward of the default model's attention), so the products are written out.

    Args:
        dropout: probability of an attention weight to be zeroed in training.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
        """Attends; query head h uses key/value head h // G.

        Returns:
            The mixed values [B, T, C], contiguous.
        """
        B, T, H, D = q_BTHD.shape
        K = k_BTKD.shape[2]
        if not self.training or _drop_threshold(self.dropout.probability) == 0:
            out_BHTD = F.scaled_dot_product_attention(
                q_BTHD.transpose(1, 2),
                k_BTKD.transpose(1, 2),
                v_BTKD.transpose(1, 2),
                is_causal=True,
                enable_gqa=H != K,
            )
            return out_BHTD.transpose(1, 2).reshape(B, T, H * D)
        G = H // K
        # The G query heads of one key/value head become G * T rows of one product: keys are never repeated.
        q_NRD = q_BTHD.view(B, T, K, G, D).permute(0, 2, 3, 1, 4).reshape(B * K, G * T, D)
        k_NTD = k_BTKD.transpose(1, 2).reshape(B * K, T, D)
        v_NTD = v_BTKD.transpose(1, 2).reshape(B * K, T, D)
        mask_TT = torch.full((T, T), -math.inf, dtype=q_NRD.dtype, device=q_NRD.device).triu_(1)
        scores_NRT = torch.baddbmm(mask_TT.repeat(G, 1), q_NRD, k_NTD.transpose(1, 2), alpha=D**-0.5)
        weights_NRT = self.dropout(scores_NRT.softmax(-1))
        out_BKGTD = torch.bmm(weights_NRT, v_NTD).view(B, K, G, T, D)
        return out_BKGTD.permute(0, 3, 1, 2, 4).reshape(B, T, H * D)
