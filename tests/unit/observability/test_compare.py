"""Comparing two runs: the same computation, or the first step and tensor that differ."""

import math

import pytest
from tests.unit.observability.samples import LOSSES, make_result

from elaswave.observability.compare import StepDifference, TensorDifference, compare_results

TENSORS = {"master.embedding.weight": "aa", "exp_avg.embedding.weight": "bb", "master.head.weight": "cc"}


def test_equal_losses_and_state_are_the_same_computation_whatever_else_differs() -> None:
    other = make_result(config={"layout": {"stages": 1, "replicas": 1}}, duration_s=99.0, memory={}, val_losses=[3.0])
    comparison = compare_results(make_result(), other, TENSORS, None)
    assert comparison.same
    assert comparison.summary == "same computation: 6 steps with equal losses and equal state"
    assert comparison.num_differing_tensors == 0
    assert comparison.differing_config["layout.stages"] == (2, 1)


def test_skipped_steps_are_equal_to_each_other() -> None:
    a, b = make_result(losses=[5.0, "nan"]), make_result(losses=[5.0, math.nan])
    assert compare_results(a, b, None, None).same


@pytest.mark.parametrize(("loss", "other"), [(4.7, math.nextafter(4.7, 5)), (0.0, -0.0), (4.7, "nan"), ("inf", "-inf")])
def test_the_first_differing_step_is_named_down_to_the_last_bit(loss: float, other: float) -> None:
    a, b = make_result(losses=[5.0, loss, 3.0]), make_result(losses=[5.0, other, 2.0], state_digest="ab")
    comparison = compare_results(a, b, None, None)
    assert not comparison.same
    assert comparison.first_differing_step == StepDifference(step=2, losses=(loss, other))
    assert comparison.summary == "different computations: the losses differ first at step 2"


def test_losses_that_differ_are_a_difference_though_the_states_are_equal() -> None:
    comparison = compare_results(make_result(), make_result(losses=[*LOSSES[:-1], 1.0]), TENSORS, TENSORS)
    assert not comparison.same
    assert comparison.num_differing_tensors is None


def test_the_first_differing_tensor_is_named_in_the_order_of_the_first_run() -> None:
    other = {"exp_avg.embedding.weight": "b0", "master.head.weight": "c0", "master.embedding.weight": "aa"}
    comparison = compare_results(make_result(), make_result(state_digest="ab"), TENSORS, other)
    assert not comparison.same
    assert comparison.first_differing_step is None
    assert comparison.first_differing_tensor == TensorDifference(name="exp_avg.embedding.weight", digests=("bb", "b0"))
    assert comparison.num_differing_tensors == 2
    assert comparison.summary == (
        "different computations: the losses are equal but the states differ; "
        "the first differing tensor is exp_avg.embedding.weight"
    )


def test_tensors_that_only_one_run_has() -> None:
    other = {**TENSORS, "momentum.head.weight": "dd"}
    comparison = compare_results(make_result(), make_result(state_digest="ab"), TENSORS, other)
    assert comparison.first_differing_tensor == TensorDifference(name="momentum.head.weight", digests=(None, "dd"))


def test_equal_tensors_in_states_that_differ() -> None:
    comparison = compare_results(make_result(), make_result(state_digest="ab"), TENSORS, TENSORS)
    assert (comparison.first_differing_tensor, comparison.num_differing_tensors) == (None, 0)
    assert not comparison.same


def test_different_numbers_of_steps_are_named_first() -> None:
    shorter = make_result(losses=LOSSES[:4], state_digest="ab")
    comparison = compare_results(make_result(), shorter, TENSORS, TENSORS)
    assert comparison.summary == (
        "different computations: different number of steps, 6 and 4; the losses of the first 4 steps are equal"
    )
    assert (comparison.steps, comparison.num_differing_tensors) == ((6, 4), None)
    comparison = compare_results(make_result(losses=[1.0]), shorter, None, None)
    assert "number of steps, 1 and 4; the losses differ first at step 1" in comparison.summary


def test_the_number_of_a_configurations_format_is_no_setting() -> None:
    old = {"model": {"width": 64}, "run": {"seed": 1}}
    new = {"format": 2, "model": {"hidden_size": 64}, "run": {"seed": 1}}
    comparison = compare_results(make_result(config=old), make_result(config=new), None, None)
    assert comparison.differing_config == {"model.width": (64, None), "model.hidden_size": (None, 64)}


def test_the_configuration_is_compared_key_by_key() -> None:
    a = make_result(config={"run": {"seed": 1, "steps": 6}, "layout": {"widths": [1, 3]}})
    b = make_result(config={"run": {"seed": 2, "steps": 6}, "layout": {"stages": 2}})
    assert compare_results(a, b, None, None).differing_config == {
        "run.seed": (1, 2),
        "layout.widths": ([1, 3], None),
        "layout.stages": (None, 2),
    }
