"""torch.optim's classes on blocks: their own bits, whatever is cut where; options, schedulers and what is kept."""

import base64
import io
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.shapes import make_shape
from tests.unit.training.blocks import CUTS, SHAPE, Crew, Whole, assert_same, decoded, tried
from torch.optim import lr_scheduler

from elaswave.checkpoints.format import MASTER
from elaswave.errors import CheckpointError, OptimizerError
from elaswave.training import lent_steps, torch_optimizer
from elaswave.training.own_optimizer import OwnOptimizer

STEPS = 15
BIASES = ("layer0.t1", "layer0.t3")


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have (Chen et al. 2023); its count of steps is a plain number."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["count"] = 0
                state["count"] += 1
                beta1, beta2 = group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["average"] * beta1 + parameter.grad * (1 - beta1)
                parameter.sub_(torch.sign(update), alpha=group["lr"])
                # Replaced, not written: what is kept has to be taken over.
                state["average"] = state["average"] * beta2 + parameter.grad * (1 - beta2)


class Counting(torch.optim.SGD):
    """An option that every step changes, as schedule-free optimizers have them."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1
            group["lr"] = 0.1 / group["made"]
        super().step()


class CountsInItself(torch.optim.SGD):
    """Counts in attributes, as a plain loop permits, where a worker calls it once for each block. Its rule changes with
    the count."""

    calls = 0

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.kept = {"steps": torch.zeros((), dtype=torch.int64), "rates": [1.0], "scale": np.float64(1.0)}

    def step(self, closure=None):
        self.calls += 1
        self.kept["steps"] += 1
        self.kept["rates"].append(self.calls / 3)
        self.kept["scale"] /= np.float64(2.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self.kept["steps"] > 5:
                    parameter.grad = parameter.grad.sign() * self.kept["rates"][-1]
        super().step()


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=1e-2, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "Adagrad filled": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.3),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Lion": lambda p: Lion(p, weight_decay=0.1),
    "Counting": lambda p: Counting(p, lr=0.1),
    "counts in itself": lambda p: CountsInItself(p, lr=0.1),
}
TWO_GROUPS = {
    "AdamW": lambda p: torch.optim.AdamW(
        [{"params": p.named(*BIASES), "weight_decay": 0.0, "lr": 3e-2}, {"params": p.except_named(*BIASES)}], lr=1e-2
    ),
    "SGD with momentum in one": lambda p: torch.optim.SGD(
        [{"params": p.named(*BIASES), "momentum": 0.9}, {"params": p.except_named(*BIASES)}], lr=1e-2
    ),
    "Adam with amsgrad in one": lambda p: torch.optim.Adam(
        [{"params": p.except_named(*BIASES)}, {"params": p.named(*BIASES), "amsgrad": True}], lr=1e-2
    ),
    "RAdam": lambda p: torch.optim.RAdam(
        [{"params": p.named("*.t2"), "betas": (0.5, 0.6)}, {"params": p.except_named("*.t2")}], lr=1e-2
    ),
}


@pytest.mark.parametrize("factory", [*OPTIMIZERS.values(), *TWO_GROUPS.values()], ids=[*OPTIMIZERS, *TWO_GROUPS])
def test_blocks_have_the_bits_of_torch_on_whole_tensors(factory):
    crew, whole = Crew(tried(factory)), Whole(factory)
    for number in range(1, STEPS + 1):
        crew.step(number)
        whole.step(number)
        assert_same(crew.values, whole.values)
        if whole.scalars:
            assert {name: value for name, value in crew.scalars.items() if name in whole.scalars} == whole.scalars


@pytest.mark.parametrize("at_once", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("factory", [*OPTIMIZERS.values(), *TWO_GROUPS.values()], ids=[*OPTIMIZERS, *TWO_GROUPS])
def test_blocks_that_are_updated_by_one_step_have_the_bits_of_each_alone(factory, at_once):
    crew, other = Crew(tried(factory)), Crew(tried(factory), at_once=at_once)
    for number in range(1, STEPS + 1):
        crew.step(number)
        other.step(number)
        assert_same(crew.values, other.values)
        assert crew.scalars == other.scalars
    # What was updated together may be updated alone from then on, and the other way round.
    crew.at_once, other.at_once = other.at_once, crew.at_once
    crew.step(STEPS + 1)
    other.step(STEPS + 1)
    assert_same(crew.values, other.values)


def test_the_steps_of_an_optimizer_do_not_grow_with_blocks():
    calls = []

    class Counted(torch.optim.SGD):
        def step(self, closure=None):
            calls.append([len(group["params"]) for group in self.param_groups])
            super().step()

    optimizer = tried(lambda p: Counted(p, lr=0.1))
    for cuts in (CUTS, [*range(0, SHAPE.size, 64), SHAPE.size]):
        crew = Crew(optimizer, cuts=cuts, workers=1, at_once=1000)
        calls.clear()
        crew.step(1)
        # The pilot's, a part of a tensor whole and in halves, and that of all blocks.
        assert calls == [[1], [1], [1], [1], [sum(len(held.segments) for held in crew.blocks)]]


@settings(max_examples=10, deadline=None)
@given(
    cuts=st.sets(st.integers(1, SHAPE.size // 32 - 1), max_size=12),
    workers=st.integers(1, 4),
    name=st.sampled_from(["AdamW fused", "RAdam", "NAdam", "Adagrad filled"]),
)
def test_cuts_and_workers_do_not_show(cuts, workers, name):
    optimizer = tried(OPTIMIZERS[name])
    crew = Crew(optimizer, cuts=[0, *(32 * cut for cut in sorted(cuts)), SHAPE.size], workers=workers)
    other = Crew(optimizer)
    for number in range(1, 9):
        crew.step(number)
        other.step(number)
    assert_same(crew.values, other.values)
    assert crew.scalars == other.scalars


def test_states_are_there_from_the_step_on_from_which_torch_has_them():
    factory = TWO_GROUPS["SGD with momentum in one"]
    optimizer = tried(factory)
    assert (optimizer.slots, optimizer.late) == (("momentum_buffer",), ("momentum_buffer",))
    crew = Crew(optimizer)
    crew.step(1, updates=False)
    assert {name for held in crew.blocks for name in held.slots} == {MASTER}
    crew.step(2)
    have = {slot.name for slot in crew.shape.tensors if slot.has("momentum_buffer")}
    assert have == set(BIASES)
    for held in crew.blocks:
        expected = any(part.slot.name in BIASES for part in held.segments)
        assert ("momentum_buffer" in held.slots) is expected
    digested = {name for held in crew.blocks for name, _ in held.digests(crew.updaters[0].scalars())}
    assert {name for name in digested if name.startswith("momentum_buffer")} == {f"momentum_buffer.{n}" for n in BIASES}


def test_adagrad_has_its_states_before_the_first_update():
    optimizer = tried(OPTIMIZERS["Adagrad filled"])
    assert (optimizer.slots, optimizer.late) == (("sum",), ())
    assert optimizer.initial("sum", optimizer.shapes((SHAPE,))[0].tensors[0]) == pytest.approx(0.3)
    assert Crew(optimizer).scalars == {f"step.{slot.name}": 0.0 for slot in SHAPE.tensors}


def test_numbers_are_in_the_digest_once_per_tensor():
    crew = Crew(tried(OPTIMIZERS["NAdam"]))
    crew.step(1)
    digests = [name for held in crew.blocks for name, _ in held.digests(crew.updaters[0].scalars())]
    for slot in SHAPE.tensors:
        assert digests.count(f"step.{slot.name}") == digests.count(f"mu_product.{slot.name}") == 1
    before = [value for held in crew.blocks for name, value in held.digests(crew.updaters[0].scalars())]
    crew.updaters[0].committed(2, 0.0, updates=True)
    assert before != [value for held in crew.blocks for name, value in held.digests(crew.updaters[0].scalars())]


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "MultiStep": lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 7]),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=3),
    "Plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def loss_of(number):
    return 1.0 / number if number < 5 else 2.0


@pytest.mark.parametrize("make", ["AdamW", "SGD momentum"])
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_set_all_options_as_in_a_plain_loop(make, scheduler):
    factory = OPTIMIZERS[make]
    crew, whole = Crew(tried(factory, scheduler)), Whole(factory, scheduler)
    for number in range(1, STEPS + 1):
        rate = whole.optimizer.param_groups[0]["lr"]
        crew.step(number, loss=loss_of(number))
        whole.step(number, loss=loss_of(number))
        assert_same(crew.values, whole.values)
        assert [updater.learning_rate for updater in crew.updaters] == [rate, rate]
    assert len({updater.state() for updater in crew.updaters}) == 1


def test_a_step_that_is_told_again_changes_nothing():
    optimizer = tried(OPTIMIZERS["RAdam"], SCHEDULERS["OneCycle"])
    crew, other = Crew(optimizer), Crew(optimizer)
    for number in range(1, 6):
        crew.step(number)
        other.updaters[0].committed(number, 0.0, updates=True)
        other.step(number)  # which tells it again
    assert_same(crew.values, other.values)
    assert other.updaters[0].state() == other.updaters[1].state()


def test_a_skipped_step_moves_the_scheduler_on_and_no_count_of_updates():
    crew = Crew(tried(OPTIMIZERS["AdamW"], SCHEDULERS["LambdaLR"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crew.step(1, loss=math.nan, updates=False)
    crew.step(2)
    assert crew.updaters[0].learning_rate == 1e-2 / 2
    assert set(crew.scalars.values()) == {1.0}


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS.values()], ids=["none", *SCHEDULERS])
@pytest.mark.parametrize("make", ["NAdam", "Counting", "Lion", "counts in itself"])
def test_going_on_after_a_checkpoint(make, scheduler):
    if make != "NAdam" and scheduler not in (None, SCHEDULERS["LambdaLR"]):
        return  # they have no momentum to be cycled, and one scheduler shows it
    if make == "NAdam" and scheduler is SCHEDULERS["Cyclic"]:
        scheduler = lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, cycle_momentum=False)  # noqa: E731
    optimizer = tried(OPTIMIZERS[make], scheduler)
    crew = Crew(optimizer)
    for number in range(1, 8):
        crew.step(number, loss=loss_of(number))
    crew.updaters = [optimizer.updater() for _ in crew.updaters]
    straight = Crew(optimizer)
    for number in range(1, 8):
        straight.step(number, loss=loss_of(number))
    for updater in crew.updaters:
        updater.load(straight.updaters[0].state(), 7)
    for number in range(8, STEPS):
        crew.step(number, loss=loss_of(number))
        straight.step(number, loss=loss_of(number))
    assert_same(crew.values, straight.values)
    assert crew.scalars == straight.scalars
    assert decoded(crew.updaters[0].state()) == decoded(straight.updaters[0].state())


def test_saved_options_are_stronger_than_those_of_the_script():
    saved = tried(lambda p: torch.optim.SGD(p, lr=0.25)).updater().state()
    updater = tried(lambda p: torch.optim.SGD(p, lr=0.5)).updater()
    updater.load(saved, 3)
    updater.committed(4, 0.0, updates=True)
    assert updater.learning_rate == 0.25


def test_the_state_of_another_optimizer_is_refused():
    updater = tried(OPTIMIZERS["AdamW"]).updater()
    with pytest.raises(CheckpointError, match=r"step 4 has no state of an optimizer like torch\.optim\.AdamW"):
        updater.load("", 4)
    with pytest.raises(CheckpointError, match="with 2 parameter groups and no scheduler, but .* has 1 and none"):
        updater.load(tried(TWO_GROUPS["AdamW"]).updater().state(), 4)
    with pytest.raises(CheckpointError, match="with 1 parameter groups and a scheduler"):
        updater.load(tried(OPTIMIZERS["AdamW"], SCHEDULERS["Cosine"]).updater().state(), 4)


def test_a_missing_option_lr_is_reported_as_zero():
    class Fixed(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"rate": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["rate"])

    assert tried(Fixed).updater().learning_rate == 0.0


def test_what_is_no_scheduler_is_refused():
    with pytest.raises(OptimizerError, match=r"has returned list, which has no step and no state_dict and no load_"):
        tried(OPTIMIZERS["AdamW"], lambda optimizer: [lr_scheduler.ConstantLR(optimizer)])


def test_a_scheduler_that_raises_is_told_with_its_traceback():
    with pytest.raises(OptimizerError, match=r"^lr_scheduler=, called with torch\.optim\.AdamW, has raised ") as caught:
        tried(OPTIMIZERS["AdamW"], lambda optimizer: lr_scheduler.StepLR(optimizer))
    assert "TypeError: StepLR.__init__() missing 1 required" in str(caught.value)
    assert "lr_scheduler.StepLR(optimizer)" in str(caught.value), "the traceback"


def test_a_scheduler_that_cannot_be_kept_is_refused():
    class Keeping(lr_scheduler.LambdaLR):
        def state_dict(self):
            return {"how": lambda step: step}

    with pytest.raises(OptimizerError, match="cannot be kept in a checkpoint: .*must be plain values"):
        tried(OPTIMIZERS["AdamW"], lambda optimizer: Keeping(optimizer, lambda step: 1.0))


def test_states_that_come_later_than_tried_are_refused():
    class Late(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and bool((parameter.grad == 77.0).any()):
                        self.state[parameter]["seen"] = torch.ones_like(parameter)

    crew = Crew(tried(lambda p: Late(p, lr=0.1)))
    crew.updaters[0].committed(1, 0.0, updates=True)
    held = crew.blocks[0]
    with pytest.raises(OptimizerError, match=r"keeps seen of layer0\.t0 after update 1, but kept nothing"):
        crew.updaters[0].update([held], [torch.full((held.num_elements,), 77.0)], 1)


def test_a_master_that_moves_is_found(monkeypatch):
    factory = OPTIMIZERS["AdamW"]
    crew, whole = Crew(tried(factory)), Whole(factory)
    for number in range(1, 5):
        for held in crew.blocks:
            held.slots[MASTER] = held.slots[MASTER].clone()  # as `TorchEngine.use_layout` does
        crew.step(number)
        whole.step(number)
    assert_same(crew.values, whole.values)


def test_states_lie_where_the_parameters_are():
    crew = Crew(tried(OPTIMIZERS["AdamW"]))
    held = crew.blocks[0]
    held.slots = {MASTER: held.slots[MASTER].to("meta")}  # another device, without content
    crew.updaters[0].committed(1, 0.0, updates=True)
    crew.updaters[0].update([held], [torch.zeros(held.num_elements, device="meta")], 1)
    assert len(held.slots) == 3 and {values.device.type for values in held.slots.values()} == {"meta"}


def test_an_optimizer_is_tried_once(monkeypatch):
    calls = []
    own = OwnOptimizer(lambda p: (calls.append(1), torch.optim.SGD(p, lr=0.1))[1])
    own((SHAPE,))
    num_calls = len(calls)
    assert own((SHAPE,)) is own((SHAPE,))
    assert len(calls) == num_calls


def test_an_own_optimizer_travels_to_another_interpreter():
    own = OwnOptimizer(OPTIMIZERS["AdamW"], None)
    copy = OwnOptimizer.__new__(OwnOptimizer)
    copy.__setstate__(own.__getstate__())
    assert copy((SHAPE,)).slots == ("exp_avg", "exp_avg_sq")


def test_the_last_cut_is_the_end():
    assert CUTS[-1] == SHAPE.size and all(cut % 32 == 0 for cut in CUTS)
    assert torch_optimizer.PILOT_ELEMENTS % 32 == 0


class Late(torch.optim.SGD):
    """Is what `rule` makes of it from update 20 on."""

    def __init__(self, parameters, rule):
        super().__init__(parameters, lr=0.1)
        self.rule, self.made = rule, 0

    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            group["size"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["seen"] = 0.0
                    if self.made >= 20:
                        self.rule(parameter, group, self.state[parameter])
        super().step()


def by_norm(parameter, group, state):
    parameter.grad = parameter.grad / (parameter.grad.norm() + 1e-6)


def by_a_product(parameter, group, state):
    if parameter.dim() == 2:
        parameter.grad = parameter.grad @ parameter.grad.T @ parameter.grad


def by_a_state(parameter, group, state):
    state["seen"] = float(parameter.grad.norm())


def by_an_option(parameter, group, state):
    group["size"] = max(group["size"], float(parameter.grad.abs().max()))


def by_an_error(parameter, group, state):
    if parameter.dim() > 1:
        raise ValueError("takes vectors only")


LATE = {
    "norm": (by_norm, "gives the parameter other bits when"),
    "product": (by_a_product, "gives the parameter other bits when"),
    "state": (by_a_state, "leaves seen at"),
    "option": (by_an_option, "leaves option size at"),
    "error": (by_an_error, "fails for .* of its elements: takes vectors only"),
}


def run_until_refused(crew, last):
    for number in range(1, last):
        crew.step(number)
    with pytest.raises(OptimizerError, match=f"cannot be used any more: update {last} ") as caught:
        crew.step(last)
    return str(caught.value)


MATRIX = make_shape([(64, 33)])


@pytest.mark.parametrize(("rule", "words"), LATE.values(), ids=LATE)
def test_what_begins_after_the_trial_not_to_be_elementwise_is_refused(rule, words):
    crew = Crew(tried(lambda p: Late(p, rule), shape=MATRIX), cuts=[0, 544, 1024, MATRIX.size], shape=MATRIX)
    assert re.search(rf"Late cannot .* of layer0\.t0 \[64, 33\] {words}", run_until_refused(crew, 20))


def test_what_acts_on_large_gradients_only_is_refused(monkeypatch):
    class Clips(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], 1e9, foreach=False)
            super().step()

    # By a norm that no trial has reached; and of all parameters of a call, so that halves are called apart.
    crew = Crew(tried(lambda p: Clips(p, lr=0.1)), at_once=100)
    crew.step(1)
    monkeypatch.setattr("tests.unit.training.blocks.gradients", lambda step, shape: LARGE)
    with pytest.raises(OptimizerError, match="cannot be used any more: update 2 "):
        crew.step(2)


LARGE = {slot.name: torch.full(slot.shape, 1e9) for slot in SHAPE.tensors}


def test_all_parts_are_tried_in_the_course_of_time(monkeypatch):
    tried_runs = []
    own = tried(OPTIMIZERS["Lion"])
    monkeypatch.setattr(torch_optimizer, "try_update", lambda optimizer, run, *rest: tried_runs.append(run))
    crew = Crew(own, workers=1)
    for number in range(1, 121):
        crew.step(number)
    assert len(tried_runs) in (119, 120)  # one each, or at the next step's first call
    parts = [part for held in crew.blocks for part in held.segments if part.stop - part.start > 32]
    assert {run.slot.name for run in tried_runs} == {part.slot.name for part in parts}
    monkeypatch.undo()
    starts = set()
    monkeypatch.setattr(lent_steps, "_updated", lambda optimizer, run, start, stop, *rest: starts.add((start, stop)))
    run = tried_runs[0]._replace(values=torch.zeros(4000), gradient=torch.zeros(4000))
    for number in range(1, 1000):
        with pytest.raises(AttributeError):
            lent_steps.try_update(None, run, {}, number, number)
    covered = torch.zeros(4000, dtype=torch.bool)
    for start, stop in starts:
        assert start % 32 == 0 and 32 < stop - start <= lent_steps.TRIED_ELEMENTS
        covered[start:stop] = True
    assert bool(covered.all())


def test_torchs_own_classes_are_not_tried_again(monkeypatch):
    monkeypatch.setattr(torch_optimizer, "try_update", lambda *arguments: pytest.fail("was tried"))
    for name in ("AdamW", "SGD fused", "ASGD"):
        crew = Crew(tried(OPTIMIZERS[name]))
        crew.step(1)
        crew.step(2)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": 5},
        {"options": [5, 5]},
        {"options": [{"params": []}, {}]},
        {"scalars": []},
        {"scalars": [1, 2]},
        {"num_updates": "many"},
        {"attributes": 7},
    ],
)
def test_a_state_that_nobody_has_saved_is_refused(changes: dict[str, Any]) -> None:
    updater = tried(TWO_GROUPS["AdamW"]).updater()
    whole = torch.load(io.BytesIO(base64.b64decode(updater.state())), weights_only=True)
    data = io.BytesIO()
    torch.save(whole | changes, data)
    with pytest.raises(CheckpointError, match="resume with the optimizer that it was written with"):
        updater.load(base64.b64encode(data.getvalue()).decode(), 4)
