"""What waits for a device, takes it for the processor, or draws from the host's generator in its place is in
`devices/`, or stands here with its reason.

A GPU hides such places: `.item()` and `.cpu()` are right and slow, a comparison with "cpu" is right on the processor
alone, and a seed of the default generator does not reach a device. Read from the syntax tree of all that computes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "src" / "elaswave"
COMPUTES = ("checkpoints", "engine", "models", "state", "training", "worker")
"""Packages in which tensors of a device may come by."""

READS = ("cpu", "item", "tolist")
"""Methods that wait for a device."""
DRAWS = ("default_generator", "manual_seed", "seed", "get_rng_state", "set_rng_state", "fork_rng", "initial_seed")
"""Of torch: the host's generator."""

REASONS = {
    "models/foreign/part.py: .cpu()": "foreign parts compute in host memory, and are refused with GPUs",
    "models/foreign/server.py: torch.manual_seed": "a process of its own, without elaswave",
    "models/foreign/server.py: torch.get_rng_state": "a process of its own, without elaswave",
    "models/foreign/layer.py: device.type": "whether it is built on the meta device",
    "models/admission.py: device.type": "whether it is built on the meta device",
    "models/huggingface/model.py: device.type": "whether it is built on the meta device",
    "models/layers.py: device.type": "a kernel of the processor's",
    "models/splitting/check.py: device.type": "the script's process, before training: splits in host memory",
    "models/splitting/check.py: torch.fork_rng": "the script's process, before training",
    "models/splitting/check.py: torch.manual_seed": "the script's process, before training",
    "models/splitting/inputs.py: device.type": "the script's process, before training",
    "models/splitting/attributes.py: device.type": "the script's process, before training",
    "models/splitting/attributes.py: torch.get_rng_state": "the script's process, before training",
    "models/splitting/attributes.py: torch.set_rng_state": "the script's process, before training",
    "models/splitting/measure.py: torch.get_rng_state": "the script's process, before training",
    "models/splitting/program.py: device.type": "autocast is that of the device that computes",
    "models/splitting/split.py: torch.fork_rng": "the script's process, before training",
    "state/flat.py: .cpu()": "what a counting buffer holds, once a micro-batch; digests at the end of a job",
    "checkpoints/shards.py: .is_cpu": "an assertion: what is written has been fetched",
    "state/device_sums.py: .cpu()": "figures that the vote has not had read: of a sum that is asked outside of a step",
    "state/device_sums.py: .tolist()": "figures that were read behind a mark",
    "state/device_sums.py: device.type": "whether Triton's kernel computes here",
    "state/seals.py: .cpu()": "constants of a layer, of the processor's: those of a device are hashed there",
    "state/flat.py: device.type": "bits of what is built in host memory",
    "state/seals.py: .tolist()": "hashes that were read behind a mark",
    "training/dataset.py: device.type": "a dataset's samples are in host memory",
    "training/elementwise.py: .tolist()": "a trial of the optimizer in the script's process",
    "training/elementwise.py: torch.get_rng_state": "a trial of the optimizer in the script's process",
    "training/elementwise.py: torch.set_rng_state": "a trial of the optimizer in the script's process",
    "training/torch_optimizer.py: .item()": "a scalar of the optimizer's, which is in host memory",
    "training/torch_optimizer.py: device.type": "whether a scalar is filled in or shared",
    "engine/checks/determinism_check.py: .cpu()": "hashes of a layer's trial, once a layer",
    "engine/checks/determinism_check.py: device.type": "numbers of the trial are drawn on the device as well",
    "engine/boundaries/codecs.py: .tolist()": "codecs of fences compute in host memory, and are refused with GPUs",
    "engine/boundaries/fences.py: .tolist()": "codecs of fences compute in host memory, and are refused with GPUs",
    "worker/links.py: .tolist()": "words of the vote, which are fetched behind a mark",
    "engine/blueprint.py: .cpu()": "what a checkpoint or a peer brings, once; frozen parameters that go into one",
    "engine/reduction.py: .tolist()": "checksums, which are fetched behind a mark",
    "engine/checks/rehearsal.py: .item()": "a micro-batch in host memory, before training",
    "engine/in_flight.py: .item()": "metrics and counts, which the host looks at in each micro-batch (docs/devices.md)",
}


def uses(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What is to be looked at, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in READS and not node.args:
                yield f".{node.func.attr}()", node.lineno
            if node.func.attr == "to" and node.args and _is_cpu(node.args[0]):
                yield ".to(cpu)", node.lineno
        if isinstance(node, ast.Attribute):
            if node.attr == "type" and _ends(node.value) in ("device", "place"):
                yield "device.type", node.lineno
            if node.attr in ("is_cuda", "is_cpu"):
                yield f".{node.attr}", node.lineno
            if node.attr in DRAWS and ast.unparse(node.value) in ("torch", "torch.random", "self.torch"):
                yield f"torch.{node.attr}", node.lineno


def _is_cpu(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _ends(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.fixture(scope="module")
def found() -> dict[str, list[int]]:
    """By file and use, its lines."""
    lines: dict[str, list[int]] = {}
    for package in COMPUTES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            for use, line in uses(ast.parse(path.read_text())):
                lines.setdefault(f"{path.relative_to(PACKAGE)}: {use}", []).append(line)
    return lines


def test_nothing_outside_devices_takes_the_device_for_the_processor(found: dict[str, list[int]]) -> None:
    strange = {place: lines for place, lines in found.items() if place not in REASONS}
    assert not strange, "by way of `elaswave.devices` it is right on every device; else it needs a reason in REASONS"


def test_every_reason_is_needed(found: dict[str, list[int]]) -> None:
    assert not set(REASONS) - set(found)


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("x = loss.item()", ".item()"),
        ("x = found.cpu().numpy()", ".cpu()"),
        ("x = found.to('cpu')", ".to(cpu)"),
        ("x = places.tolist()", ".tolist()"),
        ("if leaf.device.type == 'cpu': pass", "device.type"),
        ("if leaf.is_cuda: pass", ".is_cuda"),
        ("torch.default_generator.manual_seed(3)", "torch.default_generator"),
        ("torch.manual_seed(3)", "torch.manual_seed"),
        ("state = torch.random.get_rng_state()", "torch.get_rng_state"),
    ],
)
def test_each_use_is_seen(code: str, use: str) -> None:
    assert [found for found, _ in uses(ast.parse(code))] == [use]
