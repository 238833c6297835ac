"""A bit that flips in a worker's memory is found in the vote of the step that could count with it: the step is refused,
what is wrong is made good, and the run has the bits of an undisturbed one.

Workers are threads here, so that a test can reach into the memory of one of them at any point of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import small_config
from tests.integration.thread_jobs import Killed, Machine, ThreadJob
from torch import nn

from elaswave.blocks.placement import ReplicaRole
from elaswave.data.fingerprint import SampleHash
from elaswave.data.samples import Draw, Source
from elaswave.errors import StateError, VoteError
from elaswave.models.layers import Layer, ModelSpec
from elaswave.protocol.step.soundness import MAX_CHANGES, STATE_SAMPLE_PERIOD
from elaswave.state.flat import HeldBlock
from elaswave.state.seals import is_working
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer

STEP, TABLE = 3, 1
SETTINGS: dict[str, Any] = {
    "model.num_layers": 1,
    "run.steps": 5,
    "layout.widths": [3],
    "batch.num_microbatches": 3,
    "elastic.block_size": 64,
    "elastic.spot_checks": 0,  # one between a forward and its backward would find a flip there first, as other bits
}


class Table(nn.Module):
    """Has a frozen parameter, a running statistic, and a constant that is in no checkpoint."""

    mean: torch.Tensor
    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16)
        self.frozen = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("angles", torch.linspace(0, 1, 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.map(x) @ self.frozen * self.angles.cos() - self.mean


class Points:
    """Samples that are made up."""

    sources: tuple[Source, ...] = ()

    def num_samples(self, split: str) -> int:
        return 64

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        return iter(())

    def batch(self, draws: Sequence[Draw], split: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.stack([(torch.arange(16) + 0.37 * draw.sample).sin() for draw in draws])
        return x, x.flip(1)


def training() -> Training:
    layers = (
        Layer("first", lambda: nn.Linear(16, 16)),
        Layer("table", Table),
        Layer("last", lambda: nn.Linear(16, 16)),
    )
    config = small_config(SETTINGS)
    return Training(
        model=ModelSpec(layers, nn.functional.mse_loss),
        dtype=torch.float32,
        make_optimizer=lambda shapes: ConfiguredOptimizer(config.optimizer, config.run.steps),
        open_samples=lambda folder: Points(),
    )


class Strike:
    """Does something to a worker's memory once, or in every attempt from a step on.

    Args:
        act: what.
        worker, step, phase: where and when.
        always: again in each later attempt.
    """

    def __init__(
        self,
        act: Callable[[Machine], object],
        worker: int = 1,
        step: int = STEP,
        phase: str = "forward",
        always: bool = False,
    ) -> None:
        self.act, self.worker, self.step, self.phase, self.always = act, worker, step, phase, always
        self.has_struck = False

    def reached(self, phase: str, index: int, machine: Machine) -> None:
        is_here = machine.worker == self.worker and phase == self.phase and index == 0 and machine.step >= self.step
        if is_here and (self.always or not self.has_struck):
            self.has_struck = True
            self.act(machine)


def flip(values: torch.Tensor, place: int = 5) -> None:
    flat = values.data.view(-1)  # autograd knows nothing of it
    words = flat.view(torch.int32 if flat.itemsize == 4 else torch.int16)
    words[place] ^= 1 << (22 if flat.itemsize == 4 else 6)


def held(machine: Machine, role: ReplicaRole, *, buffers: bool = False) -> HeldBlock:
    return next(copy for copy in machine.copies.values() if copy.role is role and copy.is_buffers is buffers)


def working_copy(machine: Machine) -> None:
    """Of a block that the worker neither owns nor follows."""
    flat = machine.engine.layers[TABLE].flat
    block = next(each for each in machine.terms.blocks if each.layer == TABLE and each.id not in machine.copies)
    flip(flat[block.start : block.stop])


def owned_master(machine: Machine) -> None:
    flip(held(machine, ReplicaRole.OWNER).slots["master"])


def followed_master(machine: Machine) -> None:
    flip(held(machine, ReplicaRole.FOLLOWER).slots["master"])


def frozen(machine: Machine) -> None:
    flip(machine.engine.layers[TABLE].module.frozen)


def constant_in_use(machine: Machine) -> None:
    flip(machine.engine.layers[TABLE].module.angles)


def built_constant(machine: Machine) -> None:
    flip(dict(machine.engine.layers[TABLE].constants())["table.angles"])


def statistic(machine: Machine) -> None:
    unit = machine.engine.layers[TABLE].buffer_unit
    flip(unit.flat)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        yield run(tmp_path_factory.mktemp("undisturbed"), patch).computation


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    probe: Any = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> ThreadJob:
    return ThreadJob(
        folder,
        SETTINGS | (settings or {}),
        probe=probe,
        training=options.pop("training", None) or training(),
        **options,
    ).run(monkeypatch)


def retries(job: ThreadJob) -> list[str]:
    return [reason for report in job.reports for reason in report.retries] + [each.reason for each in job.decisions]


QUICK = [(working_copy, "forward"), (owned_master, "forward"), (owned_master, "gather"), (statistic, "reduce")]
PLACES = [working_copy, owned_master, followed_master, statistic]
OTHERS = [
    pytest.param(place, phase, marks=pytest.mark.slow)
    for place in PLACES
    for phase in ("forward", "backward", "reduce", "vote", "gather")
    if (place, phase) not in QUICK
]


@pytest.mark.parametrize(("place", "phase"), [*QUICK, *OTHERS])
def test_a_flip_in_a_block_costs_an_attempt_and_no_bit(
    place: Any, phase: str, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run(tmp_path, monkeypatch, Strike(place, phase=phase))
    assert job.computation == undisturbed
    if (place, phase) == (working_copy, "gather"):
        assert not job.decisions  # it was overwritten
        return
    decision = job.decisions[0]
    assert "on worker 1 the " in decision.reason and "changed in memory since" in decision.reason
    assert decision.resume_step == STEP + (phase == "gather") and decision.rollback is None


@pytest.mark.parametrize("place", [frozen, constant_in_use, pytest.param(built_constant, marks=pytest.mark.slow)])
def test_a_flip_in_what_no_step_writes_costs_an_attempt_and_no_bit(
    place: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run(tmp_path, monkeypatch, Strike(place))
    assert job.computation == undisturbed and not job.decisions
    (reason,) = [text for text in retries(job) if "memory" in text]
    assert "on worker 1 frozen parameters, or buffers that are not persistent, of layer table have changed" in reason


def test_constants_that_cannot_be_made_anew_come_from_another_worker(
    undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(machine: Machine) -> None:
        frozen(machine)
        machine.engine._made_again = machine.engine.constants  # the source shares the memory that has changed

    job = run(tmp_path, monkeypatch, Strike(act))
    assert job.computation == undisturbed and not job.decisions


@pytest.mark.parametrize("place", [working_copy, owned_master, pytest.param(followed_master, marks=pytest.mark.slow)])
def test_in_bfloat16_masters_and_working_copies_lie_apart_and_both_are_watched(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def low(folder: str, probe: Any = None) -> ThreadJob:
        settings = SETTINGS | {"model.dtype": "bfloat16", "elastic.block_size": 512}
        return ThreadJob(tmp_path / folder, settings, probe=probe).run(monkeypatch)

    before, job = low("before"), low("after", Strike(place))
    assert job.computation == before.computation
    (decision,) = job.decisions
    assert "changed in memory" in decision.reason and decision.rollback is None


@pytest.mark.parametrize("place", [owned_master, working_copy])
def test_copies_that_were_made_after_a_loss_are_watched_too(
    place: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KillThenFlip(Strike):
        def reached(self, phase: str, index: int, machine: Machine) -> None:
            if (machine.worker, machine.step, phase) == (2, 2, "forward"):
                job.kill(2)
                raise Killed
            super().reached(phase, index, machine)

    def act(machine: Machine) -> None:
        """Of a copy whose master does not lie in the layer, and of what the layer computes with then."""
        copy = next(copy for copy in machine.copies.values() if not is_working(copy, machine.engine.layers))
        if place is working_copy:
            flip(machine.engine.layers[copy.block.layer].flat[copy.block.start : copy.block.stop])
        else:
            flip(copy.slots["master"])

    job = ThreadJob(tmp_path, SETTINGS, probe=KillThenFlip(act, step=4), training=training())
    assert job.run(monkeypatch).computation == undisturbed
    assert "changed in memory" in job.decisions[-1].reason and job.decisions[-1].rollback is None


def test_of_three_copies_two_win_where_no_memory_has_changed(
    undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(machine: Machine) -> None:
        flip(held(machine, ReplicaRole.FOLLOWER).slots["exp_avg"])  # has no seal, and makes the next master another one

    job = run(tmp_path, monkeypatch, Strike(act, step=2), {"elastic.num_followers": 2})
    assert job.computation == undisturbed
    (decision,) = job.decisions
    assert "differs between its owner" in decision.reason and decision.rollback is None


def test_of_two_copies_none_is_right_and_the_job_goes_back(
    undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run(
        tmp_path, monkeypatch, Strike(lambda machine: flip(held(machine, ReplicaRole.OWNER).slots["exp_avg"]), step=2)
    )
    assert job.computation == undisturbed
    (decision,) = job.decisions
    assert decision.rollback == 0 and "no copy is known to be right" in decision.reason
    (question,) = job.searches
    assert question.newest == 0  # any later checkpoint may hold it


@pytest.mark.slow
def test_an_optimizers_state_that_decides_nothing_is_compared_within_one_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"optimizer.ema_decay": 0.9, "run.steps": STEP + STATE_SAMPLE_PERIOD}
    before = run(tmp_path / "before", monkeypatch, settings=settings)
    strike = Strike(lambda machine: flip(held(machine, ReplicaRole.FOLLOWER).slots["ema"]))
    job = run(tmp_path / "after", monkeypatch, strike, settings)
    assert job.computation == before.computation
    assert "in its state" in job.decisions[0].reason and "the certificate does not hold" in job.decisions[0].reason


@pytest.mark.parametrize("phase", ["forward", "gather"])
def test_a_worker_alone_finds_what_has_changed_in_its_memory(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"layout.widths": [1]}
    before = run(tmp_path / "before", monkeypatch, settings=alone)
    job = run(tmp_path / "after", monkeypatch, Strike(owned_master, worker=0, phase=phase), alone)
    assert job.computation == before.computation
    (decision,), (question,) = job.decisions, job.searches
    assert decision.rollback == 0 and question.newest == STEP - 2 + (phase == "gather")


@pytest.mark.parametrize(
    "settings",
    [pytest.param({"run.eval_every": 5}, marks=pytest.mark.slow), {}, {"layout.widths": [1]}],
    ids=["evaluation", "end", "alone"],
)
def test_what_changes_after_the_last_step_is_found_before_it_is_told(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(tmp_path / "before", monkeypatch, settings=settings)
    last = SETTINGS["run.steps"]
    worker = 0 if "layout.widths" in settings else 1
    job = run(tmp_path / "after", monkeypatch, Strike(owned_master, worker, last, "gather"), settings)
    assert (job.computation, job.evaluations) == (before.computation, before.evaluations)
    assert f"after step {last} was refused" in job.decisions[0].reason


@pytest.mark.parametrize(
    ("phase", "num_followers", "step"),
    [
        ("apply", 2, 5),
        ("gather", 1, 5),
        pytest.param("apply", 1, 5, marks=pytest.mark.slow),
        pytest.param("gather", 2, 5, marks=pytest.mark.slow),
        pytest.param("gather", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_an_optimizers_state_that_changes_shortly_before_it_is_written_is_found(
    phase: str, num_followers: int, step: int, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no seal, and no vote comes after the last step. In APPLY it makes a wrong master too, which is sealed."""
    settings: dict[str, Any] = {"elastic.num_followers": num_followers, "run.checkpoint_every": 2}
    strike = Strike(lambda machine: flip(held(machine, ReplicaRole.OWNER).slots["exp_avg"]), step=step, phase=phase)
    job = run(tmp_path, monkeypatch, strike, settings)
    assert strike.has_struck and job.computation == undisturbed
    (decision,) = job.decisions
    assert f"a checkpoint after step {step} was refused: block" in decision.reason and "in its state" in decision.reason
    assert decision.rollback == (None if num_followers == 2 else 0)


def test_code_that_writes_parameters_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(machine: Machine) -> None:
        machine.engine.layers[TABLE].module.map.weight.data.mul_(0.5)

    class Everywhere(Strike):
        def reached(self, phase: str, index: int, machine: Machine) -> None:
            if (machine.step, phase, index) == (STEP, "forward", 0):
                write(machine)

    with pytest.raises(VoteError, match=r"layer table .* were written on workers \[0, 1, 2\] at once"):
        run(tmp_path, monkeypatch, Everywhere(write))


def test_a_worker_whose_memory_changes_again_and_again_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StateError, match=f"the memory of worker 1 has changed {MAX_CHANGES} times"):
        run(tmp_path, monkeypatch, Strike(working_copy, always=True))
