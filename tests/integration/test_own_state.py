"""Shared, frozen and written state in whole jobs: equal bits in any layout, through losses, from a checkpoint."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.integration.crew import Training as Outcome
from tests.integration.crew import train
from tests.integration.jobs import small_config
from tests.integration.test_any_layout import pipelines_of_unequal_depth, shared_boundary
from tests.integration.test_changing_layouts import Changing
from tests.integration.test_instants_of_loss import DiesAt, Probe
from tests.integration.thread_jobs import Machine, ThreadJob
from tests.own_models import KINDS, WIDTH, Head, Mix, Normed, Points, numbers, settings_of, training_of

from elaswave.api.export import initial_weights, stored_weights
from elaswave.blocks.placement import ReplicaRole, place_blocks
from elaswave.checkpoints.checkpoint import shard_folder
from elaswave.checkpoints.commit import commit_checkpoint
from elaswave.checkpoints.format import CheckpointMeta
from elaswave.coordinator.records.run_state import add_digests, check_followers, describe_checkpoint
from elaswave.engine.blueprint import Blueprint, changed_frozen, frozen_digests, materialise
from elaswave.errors import UnequalBufferError
from elaswave.hashing import MASK64
from elaswave.models.layers import Layer
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.step.engine import Phase
from elaswave.training.definition import Training
from elaswave.types import Layout

ALONE = make_layout(widths=(1,), layers_per_stage=(5,), num_microbatches=5)
LAYOUTS = {
    "two stages": make_layout(widths=(2, 2), layers_per_stage=(2, 3), num_microbatches=5),
    "between all uses": make_layout(widths=(1, 1, 1, 1), layers_per_stage=(1, 1, 1, 2), num_microbatches=5),
    "unequal widths": make_layout(widths=(1, 3), layers_per_stage=(3, 2), num_microbatches=5),
}


def settings(training: Training, **changes: Any) -> dict[str, Any]:
    return settings_of(training, **{"optimizer.grad_clip": 0.5, **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("consistency", ["bitwise", "scaled"])
def test_the_layout_does_not_show(kind: str, consistency: str, tmp_path: Path) -> None:
    training = training_of(*KINDS[kind]())
    options = settings(training) | {"elastic.consistency": consistency}
    alone = train(ALONE, tmp_path, options, steps=5, model=training)
    for name, layout in LAYOUTS.items():
        found = train(layout, tmp_path, options, steps=5, model=training)
        if consistency == "bitwise":
            assert (found.losses, found.digests) == (alone.losses, alone.digests), name
        else:
            assert found.losses == pytest.approx(alone.losses, rel=1e-4), name
        check_followers(found.digests, found.followers_digests)


def narrow(layer: Layer) -> Layer:
    return Layer(layer.name, lambda: layer.build().to(torch.bfloat16), ties=layer.ties)


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_with_fewer_bits_does_not_show_the_layout_either(kind: str, tmp_path: Path) -> None:
    training = training_of(
        *map(narrow, KINDS[kind]()),
        dtype=torch.bfloat16,
        loss=lambda output, targets: (output - targets).square().mean(),
    )

    def run(layout: Layout) -> Outcome:
        return train(layout, tmp_path, settings(training), steps=3, model=training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Points, "batch", _in_bfloat16)
        alone, cut = run(ALONE), run(LAYOUTS["between all uses"])
    assert (alone.losses, alone.digests) == (cut.losses, cut.digests)


def _in_bfloat16(points: object, indices: list[int], split: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, WIDTH, generator=generator)[numbers(indices)].to(torch.bfloat16)
    return values, values.sum(1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_move_do_not_show(kind: str, tmp_path: Path) -> None:
    training = training_of(*KINDS[kind]())
    shared = Blueprint(_config(training), training).state.shared

    def made(layers: tuple[int, int], turned: bool) -> Layout:
        layout = make_layout(widths=(2, 2), layers_per_stage=layers, num_microbatches=5, shared=shared)
        return _turned(layout) if turned else layout

    start = made((2, 3), False)
    changes = {1: (made((2, 3), True), ""), 4: (made((4, 1), True), "zero-bubble"), 7: (made((1, 4), False), "1f1b")}
    alone = train(start, tmp_path, settings(training), steps=10, model=training)
    found = train(start, tmp_path, settings(training), steps=10, model=training, change=Changing(changes))
    assert (found.losses, found.digests) == (alone.losses, alone.digests)


def _turned(layout: Layout) -> Layout:
    """The same, with workers numbered the other way round."""
    last = layout.workers[-1]
    stages = tuple(
        msgspec.structs.replace(stage, workers=tuple(sorted(last - worker for worker in stage.workers)))
        for stage in layout.stages
    )
    routes = tuple(
        tuple(msgspec.structs.replace(hop, worker=last - hop.worker) for hop in route) for route in layout.routes
    )
    return msgspec.structs.replace(layout, stages=stages, routes=routes)


@pytest.mark.parametrize("layout", [shared_boundary(), pipelines_of_unequal_depth()], ids=["boundary", "depths"])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_in_which_stages_share_layers_do_not_show(kind: str, layout: Layout, tmp_path: Path) -> None:
    layers = KINDS[kind]()
    training = training_of(*(layers[index] for index in (0, 1, 3, 4)))  # as many as these layouts have
    alone = train(make_layout(widths=(1,), layers_per_stage=(4,), num_microbatches=5), tmp_path,
                  settings(training), steps=3, model=training)  # fmt: skip
    found = train(layout, tmp_path, settings(training), steps=3, model=training)
    assert (found.losses, found.digests) == (alone.losses, alone.digests)


# ---------------------------------------------------------------------------------------------------------- losses


class DieAt(Probe):
    """Workers die one after the other.

    Args:
        points: worker, step, phase of each.
    """

    def __init__(self, *points: tuple[int, int, Phase]) -> None:
        self.points = list(points)

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        done = len(self.job.decisions)
        if done < len(self.points) and (machine.worker, machine.step, phase) == self.points[done] and index == 0:
            self.die(machine)


def _config(training: Training, **changes: Any) -> Any:
    return small_config(settings(training, **changes))


def run(folder: Path, training: Training, probe: Probe | None, patch: pytest.MonkeyPatch, **changes: Any) -> ThreadJob:
    options = settings(training, **{"layout.widths": [2, 2], "run.eval_every": 3, **changes})
    job = ThreadJob(folder, options, probe=probe, training=training)
    if probe is not None:
        probe.job = job
    return job.run(patch)


LOSSES: dict[str, tuple[tuple[int, int, Phase], ...]] = {
    "both of a stage": ((0, 2, "backward"), (1, 4, "gather")),
    "the other stage": ((3, 2, "reduce"), (2, 5, "apply")),
    "one of each": ((1, 1, "vote"), (2, 4, "forward")),
}


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        pytest.param(
            kind, points, id=f"{kind}-{name}", marks=() if index == number else pytest.mark.slow
        )  # each kind and each way once whenever CI runs
        for number, kind in enumerate(KINDS)
        for index, (name, points) in enumerate(LOSSES.items())
    ],
)
def test_two_losses_do_not_show(
    kind: str, points: tuple[tuple[int, int, Phase], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(*KINDS[kind]())
    undisturbed = run(tmp_path / "alone", training, None, monkeypatch)
    job = run(tmp_path / "unlucky", training, DieAt(*points), monkeypatch)
    assert len(job.decisions) == 2 and all(decision.rollback is None for decision in job.decisions)
    assert job.computation == undisturbed.computation
    assert job.evaluations == undisturbed.evaluations


@pytest.mark.slow
def test_the_owner_of_a_tied_tensor_dies_between_reduce_and_gather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(*KINDS["tied"]())
    undisturbed = run(tmp_path / "alone", training, None, monkeypatch)
    blueprint = undisturbed.blueprint
    owners = {blueprint.placement.owner[block.id] for block in blueprint.blocks if block.layer == 5}
    assert len(owners) > 1
    for phase in ("reduce", "vote", "apply", "gather"):
        for owner in sorted(owners)[:2]:
            job = run(tmp_path / f"{phase}-{owner}", training, DiesAt(owner, 3, phase), monkeypatch)  # type: ignore[arg-type]
            assert job.decisions and job.computation == undisturbed.computation


# ----------------------------------------------------------------------------------------------------- checkpoints


def committed(job: ThreadJob, step: int, folder: Path) -> tuple[Path, CheckpointMeta]:
    """The durable checkpoint of a step, of what the workers have written."""
    parts = [shard for shard in job.shards if shard.standing.step == step]
    sampler = job.blueprint.sampler(job.blueprint.open_samples(folder))
    state: Any = SimpleNamespace(losses=job.losses, val_losses={}, metrics={}, val_metrics={}, fence_ratios=[])
    meta = describe_checkpoint(job.blueprint, state, sampler, parts[0].standing, {})
    ref = commit_checkpoint(shard_folder(folder, step), [item for part in parts for item in part.items], meta)
    return ref.folder, ref.meta


def digests_of(blueprint: Blueprint, layout: Layout, checkpoint: tuple[Path, CheckpointMeta] | None) -> dict[str, int]:
    """Of what all workers of a layout make of a checkpoint: parts of owners; followers are checked."""
    placement = place_blocks(layout.with_followers(1), blueprint.blocks, scatter_width=blueprint.scatter_width)
    owners: list[Mapping[str, int]] = []
    followers: list[Mapping[str, int]] = []
    for worker in layout.workers:
        here, store, _ = materialise(blueprint, worker, layout, placement, checkpoint)
        owners += [store.digest_parts(ReplicaRole.OWNER), frozen_digests(here, layout, worker)]
        followers.append(store.digest_parts(ReplicaRole.FOLLOWER))
    found = add_digests(owners)
    if len(layout.workers) > 1:
        copied = add_digests(followers)
        check_followers({name: found[name] for name in copied}, copied)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_everything_under_any_layout(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(*KINDS[kind]())
    job = run(tmp_path, training, None, monkeypatch, **{"run.checkpoint_every": 3})
    checkpoint = committed(job, 6, tmp_path)
    blueprint = job.blueprint
    for layout in (ALONE, *LAYOUTS.values()):
        layout = _with_shared(layout, blueprint)
        assert digests_of(blueprint, layout, checkpoint) == dict(sorted(job.digests.items()))
    weights = stored_weights(SimpleNamespace(folder=checkpoint[0], meta=checkpoint[1]))  # type: ignore[arg-type]
    modules = [layer.build() for layer in training.model.layers]
    own = {
        f"{layer.name}.{name}": value
        for layer, module in zip(training.model.layers, modules, strict=True)
        for name, value in module.state_dict().items()
    }
    tied = {f"{layer.name}.{name}" for layer in training.model.layers for name in layer.ties}
    assert weights.tensors.keys() == own.keys() - tied
    for name, value in weights.tensors.items():
        assert (value.dtype, value.shape) == (own[name].dtype, own[name].shape), name
    if kind == "normed":
        assert weights.tensors["a.norm.num_batches_tracked"].item() == 6
        assert weights.tensors["c.norm.num_batches_tracked"].item() == 0
        assert weights.tensors["c.norm.running_mean"].eq(0.25).all()
    initial = initial_weights(training.model, blueprint.config.run.seed, {}).tensors
    assert initial.keys() == weights.tensors.keys()
    unchanged = {name for name in initial if initial[name].equal(weights.tensors[name])}
    assert unchanged == {tensor.name for tensor in blueprint.state.frozen} | {
        name for name in initial if name.startswith("c.norm.") and "weight" not in name and "bias" not in name
    }


def _with_shared(layout: Layout, blueprint: Blueprint) -> Layout:
    return msgspec.structs.replace(layout, shared=blueprint.state.shared)


def test_on_resume_a_checkpoint_wins_over_other_frozen_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, head = Mix().requires_grad_(False), Head()
    training = training_of(base, Mix(), head)
    job = run(tmp_path, training, None, monkeypatch, **{"run.checkpoint_every": 3})
    checkpoint = committed(job, 6, tmp_path)
    assert changed_frozen(job.blueprint, checkpoint) == {}
    assert changed_frozen(job.blueprint, None) == {}
    with torch.no_grad():
        base.weight.add_(1.0)
    scripts = base.weight.clone()
    other = Blueprint(job.config, training_of(base, Mix(), head))
    other.frozen = changed_frozen(other, checkpoint)
    assert list(other.frozen) == ["0.weight"]
    layout = make_layout(widths=(1, 2), layers_per_stage=(1, 2), num_microbatches=5)
    assert digests_of(other, layout, checkpoint) == dict(sorted(job.digests.items()))
    # Whoever takes over the layer later has them too.
    assert other.flat_layer(0, {}).module.weight.equal(other.frozen["0.weight"])
    assert base.weight.equal(scripts), "the script's own stays"
    assert changed_frozen(other, checkpoint).keys() == other.frozen.keys(), "and so it is found again"


def test_every_holder_of_a_frozen_layer_makes_it_alike_and_one_counts_it(tmp_path: Path) -> None:
    training = training_of(*KINDS["frozen"]())
    blueprint = Blueprint(_config(training), training)
    layout = _with_shared(LAYOUTS["unequal widths"], blueprint)
    placement = place_blocks(layout.with_followers(1), blueprint.blocks, scatter_width=blueprint.scatter_width)
    counted: Counter[str] = Counter()
    values: dict[str, list[torch.Tensor]] = {}
    for worker in layout.workers:
        here, _, _ = materialise(blueprint, worker, layout, placement, None)
        counted.update(frozen_digests(here, layout, worker).keys())
        for index, layer in here.items():
            for tensor in blueprint.shapes[index].frozen:
                name = tensor.name.split(".", 1)[1]
                values.setdefault(tensor.name, []).append(layer.module.get_parameter(name))  # type: ignore[union-attr]
    assert counted == {f"master.{tensor.name}": 1 for tensor in blueprint.state.frozen}
    assert all(value.equal(found[0]) for found in values.values() for value in found)
    assert {len(found) for found in values.values()} == {1, 3}


# --------------------------------------------------------------------------------------------------------- buffers


def test_buffers_become_the_mean_over_microbatches_once_per_step(tmp_path: Path) -> None:
    training = training_of(Normed(), Mix(), Head())
    blueprint = Blueprint(_config(training), training)
    source = blueprint.open_samples(tmp_path)
    sampler = blueprint.sampler(source)
    found: dict[str, torch.Tensor] = {}

    def note(machine: Any) -> None:
        def run_step(step: int, attempt: int = 1) -> Any:
            committed = yield from original(step, attempt)
            machine.engine.compute.refresh()
            machine.engine.layers[0].buffers.restore()
            found.update({name: buffer.clone() for name, buffer in machine.engine.layers[0].module.named_buffers()})
            return committed

        original, machine.steps.run_step = machine.steps.run_step, run_step

    layout = make_layout(widths=(1,), layers_per_stage=(3,), num_microbatches=5)
    train(layout, tmp_path, settings(training), steps=1, model=training, change=note)
    left = []
    for microbatch in range(5):
        module = training.model.layers[0].build()
        module(source.batch(sampler.microbatch(1, microbatch), "train")[0])
        left.append(module.norm.running_mean.double())
    exact = torch.stack(left).mean(0)
    assert (found["norm.running_mean"].double() - exact).abs().max() <= 2.0**-24 * exact.abs().max()
    assert found["norm.num_batches_tracked"].item() == 1


def test_whole_numbers_in_which_microbatches_differ_end_the_job_by_name(tmp_path: Path) -> None:
    class Counts(Mix):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positive", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.positive += (x > 0).sum()
            return super().forward(x)

    training = training_of(Counts(), Mix(), Head())
    for widths, layers in (((1,), (3,)), ((2, 1), (1, 2))):
        layout = make_layout(widths=widths, layers_per_stage=layers, num_microbatches=5)
        with pytest.raises(UnequalBufferError, match=r"step 1: .* in the buffers 0.positive\. All micro-batches"):
            train(layout, tmp_path, settings(training), steps=1, model=training)


def test_digests_name_what_state_dict_names(tmp_path: Path) -> None:
    training = training_of(Normed(), Mix(), Head())
    layout = make_layout(widths=(1,), layers_per_stage=(3,), num_microbatches=5)
    found = train(layout, tmp_path, settings(training), steps=1, model=training)
    named = {name.removeprefix("master.") for name in found.digests if name.startswith("master.")}
    sequential = torch.nn.Sequential(Normed(), Mix(), Head())
    assert named == set(sequential.state_dict())
    assert not any(name.startswith("exp_avg") and "running" in name for name in found.digests)
    assert all(0 <= value <= MASK64 for value in found.digests.values())


def test_buffers_are_no_part_of_the_norm(tmp_path: Path) -> None:
    """The norm is that of ordinary PyTorch's gradients, in which buffers have no place."""
    training = training_of(Normed(), Mix(), Head())
    blueprint = Blueprint(_config(training), training)
    source = blueprint.open_samples(tmp_path)
    sampler = blueprint.sampler(source)
    norms = []

    def note(machine: Any) -> None:
        def run_step(step: int, attempt: int = 1) -> Any:
            committed = yield from original(step, attempt)
            norms.append(committed.norm)
            return committed

        original, machine.steps.run_step = machine.steps.run_step, run_step

    layout = make_layout(widths=(1,), layers_per_stage=(3,), num_microbatches=5)
    train(layout, tmp_path, settings(training), steps=1, model=training, change=note)
    modules = [layer.build() for layer in training.model.layers]
    for microbatch in range(5):
        value, targets = source.batch(sampler.microbatch(1, microbatch), "train")
        for module in modules:
            value = module(value)
        (training.model.loss(value, targets) / 5).backward()
    squares = sum(float(p.grad.square().sum()) for m in modules for p in m.parameters() if p.grad is not None)
    assert norms == [pytest.approx(squares**0.5, rel=1e-4)]
