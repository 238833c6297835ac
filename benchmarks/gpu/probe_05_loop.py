"""Probe 5: a plain loop's micro-batch, ours layer by layer, and that as CUDA graphs: seconds, busy seconds, launches.

Parameters and activations in bfloat16, no dropout, no optimizer (it is timed by itself). It decides whether graphs are
needed and what targets are.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from bits import make_bits_repeat
from parts import Bench, Probe, Row
from timing import launches_of, time_issue, time_on_host
from torch import nn

from elaswave.models.gpt import gpt
from elaswave.models.layers import ModelSpec
from elaswave.models.llama import llama

PROBE = Probe(5, __file__)
Piece = Callable[[], AbstractContextManager[Any]]
TOKENS = (2048, 4096, 8192, 16384)
"""Of a micro-batch."""


class Model:
    """A model of the product on the device, with a micro-batch.

    Args:
        name: gpt or llama.
        num_tokens: of the micro-batch, in whole sequences.
    """

    def __init__(self, bench: Bench, name: str, num_tokens: int) -> None:
        spec, length, vocabulary = _spec(name, bench.small)
        dtype = torch.bfloat16
        with bench.device:
            torch.manual_seed(1)
            self.layers = [layer.build() for layer in spec.layers]
            self.tokens = torch.randint(0, vocabulary, (max(1, num_tokens // length), length))
        self.loss = spec.loss
        self.whole = nn.Sequential(*self.layers)
        self.parameters = [list(layer.parameters()) for layer in self.layers]
        for each in self.whole.parameters():
            each.data = each.data.to(dtype)  # buffers stay as they are, as in the product
        self.num_parameters = sum(each.numel() for part in self.parameters for each in part)

    def plain(self) -> list[torch.Tensor]:
        """Forward and backward of the network; gradients are added to those of before, as a plain loop does."""
        self.loss(self.whole(self.tokens), self.tokens).backward()
        return [each.grad for part in self.parameters for each in part if each.grad is not None]

    def by_layers(self, piece: Piece = nullcontext) -> list[torch.Tensor]:
        """As the product does it: each layer forward from a detached input, then backward; gradients are new.

        Args:
            piece: stands around each layer's forward, the loss, and each layer's backward.
        """
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        value = self.tokens
        for layer in self.layers:
            value = value.detach()
            if value.is_floating_point():
                value.requires_grad_(True)
            inputs.append(value)
            with piece():
                value = layer(value)
            outputs.append(value)
        last = value.detach().requires_grad_(True)
        with piece():
            (reached,) = torch.autograd.grad(self.loss(last, self.tokens), last)
        found: list[torch.Tensor] = []
        for given, out, parameters in zip(reversed(inputs), reversed(outputs), reversed(self.parameters)):
            wanted = [given, *parameters] if given.requires_grad else parameters
            with piece():
                gradients = torch.autograd.grad(out, wanted, reached)
            if given.requires_grad:
                reached, *gradients = gradients
            found.extend(gradients)
        return found


def _spec(name: str, small: bool) -> tuple[ModelSpec, int, int]:
    """Model, tokens of a sequence, size of the vocabulary."""
    if name == "gpt":
        sizes: dict[str, Any] = {"vocab_size": 50257, "num_layers": 12, "hidden_size": 768, "num_heads": 12}
        length = 1024
        if small:
            sizes, length = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 4}, 16
        return gpt(**sizes, context_length=length, dropout=0.0), length, sizes["vocab_size"]
    sizes = {"vocab_size": 32000, "num_layers": 22, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4}
    sizes |= {"intermediate_size": 5632}
    length = 2048
    if small:
        sizes = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
        sizes, length = sizes | {"intermediate_size": 64}, 16
    model = llama(**sizes, context_length=length, dropout=0.0, rope_theta=10000.0)
    return model, length, sizes["vocab_size"]


def _measure(bench: Bench, call: Callable[[], Any], seconds: float) -> Row:
    taken = time_on_host(bench, call, seconds, most=30)
    return {"wall_s": taken.median_s, "low_s": taken.low_s, "high_s": taken.high_s, **launches_of(bench, call)}


def _graphs_of(model: Model, *, in_one: bool) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A micro-batch by layers as CUDA graphs: in one, or a graph for each layer's forward and each backward.

    Returns:
        Their replay, and where it leaves gradients.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model.by_layers()
    torch.cuda.current_stream().wait_stream(side)
    graphs: list[torch.cuda.CUDAGraph] = []
    pool = torch.cuda.graph_pool_handle()

    def captured() -> AbstractContextManager[Any]:
        graphs.append(torch.cuda.CUDAGraph())
        return torch.cuda.graph(graphs[-1], pool=pool)

    if in_one:
        with captured():
            found = model.by_layers()
    else:
        found = model.by_layers(captured)

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    return replay, found


def _rows(bench: Bench, name: str) -> Iterator[Row]:
    sizes = (32,) if bench.small else TOKENS
    for place, num_tokens in enumerate(sizes):
        share = bench.left_s / (len(sizes) - place) / 7
        about: Row = {"model": name, "tokens": num_tokens}
        try:
            make_bits_repeat(repeat=False)
            model = Model(bench, name, num_tokens)
            about["parameters"] = model.num_parameters
            yield {**about, "loop": "plain, anything allowed", **_measure(bench, model.plain, share)}
            make_bits_repeat()
            yield {**about, "loop": "plain, deterministic", **_measure(bench, model.plain, share)}
            model.whole.zero_grad(set_to_none=True)
            row = _measure(bench, model.by_layers, share)
            yield {**about, "loop": "by layers", **row, "issue_s": time_issue(bench, model.by_layers, 2)}
            if bench.is_cuda:
                expected = model.by_layers()
                for in_one in (True, False):
                    replay, found = _graphs_of(model, in_one=in_one)
                    replay()
                    bench.sync()
                    name_of_loop = "by layers, one graph" if in_one else "by layers, a graph per layer and direction"
                    row = _measure(bench, replay, share) | {"issue_s": time_issue(bench, replay, 2)}
                    yield {**about, "loop": name_of_loop, **row, "same_bits": all(map(torch.equal, found, expected))}
                    del replay, found
                    bench.free()
                del expected
                yield {**about, "memory_peak": torch.cuda.max_memory_allocated()}
        except (RuntimeError, torch.OutOfMemoryError) as error:
            yield {**about, "error": f"{type(error).__name__}: {error}"[:400]}
        model = None  # type: ignore[assignment]
        bench.free()


@PROBE.part(45)
def gpt_124m(bench: Bench) -> Iterator[Row]:
    """GPT-2's shape."""
    yield from _rows(bench, "gpt")


@PROBE.part(55)
def llama_1b(bench: Bench) -> Iterator[Row]:
    """TinyLlama's shape, 1.1 billion parameters."""
    yield from _rows(bench, "llama")


@PROBE.part(8)
def update(bench: Bench) -> Iterator[Row]:
    """torch's fused AdamW of float32 masters, for the plain loop's step."""
    for num_parameters in (1 << 10,) if bench.small else (124_000_000, 1_100_000_000):
        chunks = [
            torch.zeros(min(1 << 24, num_parameters - first), device=bench.device, requires_grad=True)
            for first in range(0, num_parameters, 1 << 24)
        ]
        for each in chunks:
            each.grad = torch.randn_like(each)
        optimizer = torch.optim.AdamW(chunks, fused=True)
        yield {"parameters": num_parameters, "adamw": _measure(bench, optimizer.step, bench.seconds / 5)}
        del chunks, optimizer, each
        bench.free()


if __name__ == "__main__":
    sys.exit(PROBE.main())
