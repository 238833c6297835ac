"""What `torch.distributed.pipelining.pipeline()` and `elaswave.split` make of the same networks, as a table.

    python benchmarks/split_table.py            # all families; needs transformers for four of them
    python benchmarks/split_table.py unet t5

Each network is cut into two: by torch at the module that stands in the middle of the forward, by elaswave where both
halves take the same time. "equal" means that outputs and gradients have the bits of the network itself (elaswave
leaves out gradients of tensors that both parts use; torch's are compared as its parts make them in one process).
"""

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples")]
import resnet101  # noqa: E402
import unet  # noqa: E402

import elaswave  # noqa: E402
from elaswave.errors import UsageError  # noqa: E402

ROWS, LENGTH, VOCABULARY = 4, 8, 48


class UNet(nn.Module):
    """The layers of ``examples/unet.py`` as one network."""

    def __init__(self) -> None:
        super().__init__()
        size = unet.CHANNELS
        self.enter, self.leave = unet.Enter(), unet.Leave()
        self.down1, self.down2 = unet.Down(size), unet.Down(2 * size)
        self.up1, self.up2 = unet.Up(4 * size), unet.Up(2 * size)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """[B, 1, H, W] to [B, 1, H, W]."""
        result: torch.Tensor = self.leave(self.up2(self.up1(self.down2(self.down1(self.enter(pictures))))))
        return result


def of_transformers(name: str, **sizes: Any) -> nn.Module:
    """A small network of a class, without dropout."""
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(vocab_size=VOCABULARY, use_cache=False, **sizes))
    return model


LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet101": (lambda: resnet101.ResNet(resnet101.BLOCKS, 8, 5), "layer3.10"),
    "unet": (UNet, "up1"),
    "gpt2": (
        lambda: of_transformers("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT),
        "transformer.h.1",
    ),
    "llama": (lambda: of_transformers("LlamaForCausalLM", **LLAMA), "model.layers.1"),
    "qwen3": (lambda: of_transformers("Qwen3ForCausalLM", head_dim=8, **LLAMA), "model.layers.1"),
    "t5": (
        lambda: of_transformers(
            "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
        ),
        "decoder.block.0",
    ),
}
"""How to make a network, and the module before which torch cuts."""


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    """Of a micro-batch, by keyword."""
    generator = torch.Generator().manual_seed(3)
    if family == "resnet101":
        return {"x": torch.randn(ROWS, 1, 16, 16, generator=generator)}
    if family == "unet":
        return {"pictures": torch.randn(ROWS, 1, 16, 16, generator=generator)}
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if family == "t5" else {})


def first_output(outputs: Any) -> torch.Tensor:
    """The tensor that is compared."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs[0]
    assert isinstance(found, torch.Tensor)
    return found


def by_torch(model: nn.Module, place: str, inputs: dict[str, torch.Tensor]) -> str:
    """What pipeline() makes of a network."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    try:
        pipe = pipeline(model, mb_args=(), mb_kwargs=inputs, split_spec={place: SplitPoint.BEGINNING})
    except Exception as error:
        cause = error.__cause__ or error
        return f"fails: {type(cause).__name__}: {(str(cause).splitlines() or [''])[0][:110]}"
    try:
        output = first_output(torch.fx.Interpreter(pipe.split_gm).run(*inputs.values()))  # in one graph of autograd
        output.square().mean().backward()
    except Exception as error:
        return (
            f"{pipe.num_stages} stages; running them fails: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
        )
    theirs = {
        name.partition(".")[2]: parameter.grad.clone()
        for name, parameter in pipe.split_gm.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    expected = first_output(model(**inputs))
    expected.square().mean().backward()
    ours = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    missing = sorted(ours.keys() - theirs.keys())
    other = sorted(name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name]))
    words = ["outputs equal" if torch.equal(output, expected) else "outputs differ"]
    words.append(f"{len(other)} of {len(ours)} gradients differ" if other else "gradients equal")
    if missing:
        words.append(f"{len(missing)} missing under their names, first {missing[0]}")
    return f"{pipe.num_stages} stages; {', '.join(words)}"


def by_elaswave(model: nn.Module, inputs: dict[str, torch.Tensor]) -> str:
    """What `elaswave.split` makes of it."""
    try:
        layers = elaswave.split(model, inputs, 2)
    except UsageError as error:
        return f"refused: {str(error)[:120]}"
    again = len({target for layer in layers for target in layer.ties.values()})
    shared = f"; {again} used several times" if again else ""
    return f"2 parts of {len(layers.graph)} operators; outputs and gradients equal{shared}"


def main(families: list[str]) -> None:
    """Prints the table."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| network | `torch.distributed.pipelining.pipeline()` | `elaswave.split` |\n|---|---|---|")
    for family in families or list(FAMILIES):
        make, place = FAMILIES[family]
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            models.append(make().train())
        results = [by_torch(models[0], place, inputs_of(family)), by_elaswave(models[1], inputs_of(family))]
        print(f"| {family} | {results[0]} | {results[1]} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
