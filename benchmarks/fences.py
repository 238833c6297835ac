"""Codecs of fences: error and speed of each, and what they do to the training of a small GPT on real text.

    python benchmarks/fences.py codecs [--json]
    python benchmarks/fences.py training [--steps 120] [--seeds 1 2 3] [--codecs int8 topk10] [--json]
    python benchmarks/fences.py absent [--rounds 200] [--json]

`codecs` takes an activation and a gradient of the default GPT at the boundary behind its second block, after some
steps, and normal numbers: relative error (norm of the difference over norm), bytes beside float32, and how fast a
boundary of the default size is coded and decoded, one thread, in gigabytes of float32 per second.

`training` trains one GPT on the text of Python's documentation with each codec at 1 and at 4 boundaries, as `elaswave
train` does, and compares the loss on held-out text with that of the same seed without fences: the mean difference in
percent over the seeds, with its 95 % interval (Student's t of paired differences). Needed: int8 or int4 within 1 %;
topk is shown as it is, with gradients at the places of the activations and at their own (`-own`).

`absent` says what fences cost a computation: processor time of forward and backward of a micro-batch of the default
GPT, as it is, as if there were no fences in the product (`elaswave.engine.compute` without its questions for them), and
with one fence of each codec; by turns, as medians of what each round has beside the first.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import machine, print_header

from elaswave.config.load import load_config
from elaswave.data.samples import TokenSamples
from elaswave.engine import compute
from elaswave.engine.boundaries.codecs import decode_tensor, encode_tensor
from elaswave.job.plan import sampler_of
from elaswave.models.layers import build_layer
from elaswave.state.flat import FlatLayer, model_shapes
from elaswave.state.sums import ExactAccumulator
from elaswave.training.definition import build_model
from elaswave.training.tokens import open_tokens

CODECS = ("bf16", "int8", "int4", "topk10", "topk10-own", "topk100", "topk100-own")
PLACES = {1: (1,), 4: (0, 1, 2, 3)}
"""By number of fences: the blocks behind which they stand."""
WIDTHS = (8, 64, 128)
"""Of a boundary of the default GPT: samples, tokens, hidden size."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Two-sided quantile of Student's t by number of pairs (degrees of freedom: one less)."""
NEEDED = 0.01
MODEL = (
    "model.hidden_size=64", "model.num_heads=2", "batch.num_microbatches=2", "layout.widths=[1]",
    "elastic.num_followers=0", "run.eval_microbatches=48", "run.checkpoint_every_s=0",
)  # fmt: skip


def trained_values(num_steps: int) -> dict[str, torch.Tensor]:
    """An activation behind the second block of the default GPT after so many steps of plain AdamW, and its gradient."""
    config = load_config(None, [])
    model = config.model
    spec = build_model(
        "gpt", vocab_size=config.data.resolved_vocab_size, num_layers=model.num_layers, hidden_size=model.hidden_size,
        num_heads=model.num_heads, context_length=model.context_length, dropout=0.0, num_kv_heads=None,
        intermediate_size=None, rope_theta=model.rope_theta,
    )  # fmt: skip
    layers = [build_layer(layer, 1, index) for index, layer in enumerate(spec.layers)]
    optimizer = torch.optim.AdamW([each for layer in layers for each in layer.parameters()], lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        samples = TokenSamples(open_tokens(config, Path(folder)))
        sampler = sampler_of(config, samples.num_samples("train"), samples.sources)
        for step in range(1, num_steps + 1):
            tokens, targets = samples.batch(sampler.draws(step, 0), "train")
            value = layers[2](layers[1](layers[0](tokens)))
            value.retain_grad()
            loss = spec.loss(layers[5](layers[4](layers[3](value))), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert value.grad is not None
    return {"activation": value.detach(), "gradient": value.grad}


def relative_error(tensor: torch.Tensor, codec: str) -> float:
    """Norm of what a codec changes, over the tensor's."""
    coded = encode_tensor(tensor, codec)
    assert coded is not None
    return float((decode_tensor(coded).double() - tensor.double()).norm() / tensor.double().norm())


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Median of some runs."""
    found = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def measure_codecs(num_steps: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each codec."""
    generator = torch.Generator().manual_seed(0)
    values = {**trained_values(num_steps), "normal": torch.randn(WIDTHS, generator=generator)}
    rows = []
    for codec in CODECS:
        tensor = values["normal"]
        coded = encode_tensor(tensor, codec)
        assert coded is not None
        rows.append(
            {
                "codec": codec,
                "bytes_share": coded.nbytes / tensor.nbytes,
                "errors": {name: relative_error(value, codec) for name, value in values.items()},
                "encode_gb_per_s": tensor.nbytes / seconds(partial(encode_tensor, tensor, codec), rounds) / 1e9,
                "decode_gb_per_s": tensor.nbytes / seconds(partial(decode_tensor, coded), rounds) / 1e9,
            }
        )
    return rows


def held_out_loss(seed: int, num_steps: int, codec: str, num_fences: int, sizes: tuple[str, ...]) -> float:
    """Of a whole training by one worker, after its last step."""
    fences = [f"block.{block}:{codec}" for block in PLACES[num_fences]] if codec != "dense" else []
    settings = [
        *MODEL, *sizes, f"run.seed={seed}", f"run.steps={num_steps}", f"run.eval_every={num_steps}",
        f"model.fences={json.dumps(fences)}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elaswave", "train", "--json", "--run-dir", f"{folder}/run"]
        done = subprocess.run(
            [*command, *(part for setting in settings for part in ("--set", setting))],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    loss: float = json.loads(done.stdout)["val_losses"][-1]
    return loss


def trainings(codecs: list[str], seeds: list[int], num_steps: int, sizes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A row for no fences, then one for each codec and number of them."""
    dense = [held_out_loss(seed, num_steps, "dense", 1, sizes) for seed in seeds]
    yield {"codec": "dense", "fences": 0, "losses": dense}
    for num_fences in PLACES:
        for codec in codecs:
            losses = [held_out_loss(seed, num_steps, codec, num_fences, sizes) for seed in seeds]
            differences = [100 * (loss / base - 1) for loss, base in zip(losses, dense, strict=True)]
            spread = statistics.stdev(differences) / len(differences) ** 0.5 * T_95[len(differences)]
            yield {
                "codec": codec,
                "fences": num_fences,
                "losses": losses,
                "difference_percent": statistics.mean(differences),
                "interval_percent": spread,
            }


def without_fences() -> ModuleType:
    """`elaswave.engine.compute` as if a model could have no fences: what it asks about them is answered beforehand."""
    source = Path(compute.__file__).read_text()
    for question, answer in (("self.fences is None", "True"), ("self.fences is not None", "False")):
        assert question in source
        source = source.replace(question, answer)
    module = ModuleType("compute_without_fences")
    sys.modules[module.__name__] = module
    exec(compile(source, "compute without fences", "exec"), vars(module))
    return module


def stepper(module: ModuleType, fences: dict[int, str]) -> Callable[[], None]:
    """Forward and backward of one micro-batch of the default GPT.

    Args:
        module: `elaswave.engine.compute`, or what `without_fences` makes of it.
        fences: codec by position of the layer before the boundary.
    """
    config = load_config(None, [])
    model = config.model
    vocabulary = config.data.resolved_vocab_size
    spec = build_model(
        "gpt", vocab_size=vocabulary, num_layers=model.num_layers, hidden_size=model.hidden_size,
        num_heads=model.num_heads, context_length=model.context_length, dropout=0.0,
    )  # fmt: skip
    spec = dataclasses.replace(spec, fences=fences)
    shapes = model_shapes(spec)
    layers = {
        index: FlatLayer(layer, shapes[index], torch.float32, units={}, seed=1)
        for index, layer in enumerate(spec.layers)
    }
    sums = {index: ExactAccumulator(shapes[index]) for index in layers}
    computed = module.Compute(module.ComputeRules(spec, 1), layers, sums)
    computed.begin(1, [[40] * len(shape.tensors) for shape in shapes])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, vocabulary, (config.batch.microbatch_size, model.context_length + 1), generator=generator)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> None:
        computed.forward(range(len(layers)), 0, tokens, targets)
        computed.backward(range(len(layers)), 0, None)

    return step


def measure_absent(rounds: int, codecs: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each of what is compared."""
    kinds = {
        "no fence": stepper(compute, {}),
        "no fence, and none in the product": stepper(without_fences(), {}),
        **{f"one fence, {codec}": stepper(compute, {2: codec}) for codec in codecs},
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in kinds.values():
        step()
    for turn in range(rounds):
        names = list(kinds)
        for kind in names[turn % len(names) :] + names[: turn % len(names)]:
            begin_s = time.thread_time()
            kinds[kind]()
            found[kind].append(time.thread_time() - begin_s)
    rows = []
    for kind, seconds_each in found.items():
        shares = sorted(each / base for each, base in zip(seconds_each, found["no fence"], strict=True))
        rows.append(
            {
                "what": kind,
                "cpu_s": statistics.median(seconds_each),
                "share": statistics.median(shares),
                "quartiles": [shares[len(shares) // 4], shares[3 * len(shares) // 4]],
            }
        )
    return rows


def print_absent(rows: list[dict[str, Any]]) -> None:
    """As a Markdown table."""
    print("| | processor time of a micro-batch | beside no fence, median and quartiles |\n|---|---|---|")
    for row in rows:
        low, high = row["quartiles"]
        print(f"| {row['what']} | {1e3 * row['cpu_s']:.2f} ms | {row['share']:.3f} ({low:.3f} to {high:.3f}) |")


def print_codecs(rows: list[dict[str, Any]]) -> None:
    """As a Markdown table."""
    print("| codec | bytes | error, normal numbers | activation | gradient | coded, GB/s | decoded, GB/s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        errors = " | ".join(f"{100 * row['errors'][name]:.2f} %" for name in ("normal", "activation", "gradient"))
        speeds = f"{row['encode_gb_per_s']:.2f} | {row['decode_gb_per_s']:.2f}"
        print(f"| `{row['codec']}` | {row['bytes_share']:.3f} | {errors} | {speeds} |")


def print_training(row: dict[str, Any]) -> None:
    """One line of a Markdown table."""
    losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
    difference = (
        "" if row["codec"] == "dense" else f"{row['difference_percent']:+.2f} ± {row['interval_percent']:.2f} %"
    )
    print(f"| {row['codec']} | {row['fences']} | {losses} | {difference} |", flush=True)


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("codecs", "training", "absent"))
    parser.add_argument("--steps", type=int, default=120, help="of a training; codecs: before the values are taken")
    parser.add_argument("--rounds", type=int, default=200, help="of coding a boundary, or of `absent`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="of trainings and fences")
    parser.add_argument("--size", action="append", default=[], help="section.key=value of the trainings")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.json:
        print_header(machine())
    if arguments.what == "codecs":
        rows = measure_codecs(arguments.steps, arguments.rounds)
        if not arguments.json:
            print_codecs(rows)
        missed = False
    elif arguments.what == "absent":
        rows = measure_absent(arguments.rounds, arguments.codecs)
        if not arguments.json:
            print_absent(rows)
        missed = False
    else:
        rows = []
        if not arguments.json:
            print("| codec | fences | held-out loss, by seed | against dense |\n|---|---|---|---|")
        for row in trainings(arguments.codecs, arguments.seeds, arguments.steps, tuple(arguments.size)):
            rows.append(row)
            if not arguments.json:
                print_training(row)
        within = {
            codec: all(abs(row["difference_percent"]) <= 100 * NEEDED for row in rows if row["codec"] == codec)
            for codec in {"int8", "int4"} & set(arguments.codecs)
        }
        missed = bool(within) and not any(within.values())
    if arguments.json:
        print(json.dumps({"machine": machine(), "what": arguments.what, "rows": rows}))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
