"""Hashes of contents: every change shows, whatever is cut where."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from elaswave.blocks.placement import Block
from elaswave.coordinator.records.run_state import add_digests, state_digest
from elaswave.hashing import MASK64
from elaswave.state.flat import FlatUnit, tensor_digest
from elaswave.state.seals import Seals, row_hashes, run_hash, tensor_hash

STANDING = {"step": 3, "num_updates": 3, "data_cursor": (0, 48), "grids": [40, 41], "tensor_digests": {"a": 1, "b": 2}}


@pytest.mark.parametrize("position", [0, 1, 17, 16383])
@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_one_flipped_bit_changes_the_hash_of_a_run(position, bit):
    run = torch.randn(16384)
    before = run_hash(run)
    run.view(torch.int32)[position] ^= -(2**31) if bit == 31 else 1 << bit
    assert run_hash(run) != before


def test_the_hash_of_a_run_knows_positions_and_signs_of_zero():
    assert run_hash(torch.tensor([1.0, 2.0])) != run_hash(torch.tensor([2.0, 1.0]))
    assert run_hash(torch.tensor([0.0])) != run_hash(torch.tensor([-0.0]))
    assert run_hash(torch.zeros(0)) == 0
    assert run_hash(torch.full((4,), float("nan"))) == run_hash(torch.full((4,), float("nan")))


def test_a_view_in_the_middle_of_a_tensor_is_hashed_like_a_copy():
    whole = torch.randn(100)
    assert run_hash(whole[10:60]) == run_hash(whole[10:60].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hashes_of_rows_are_those_of_runs(dtype):
    flat = torch.randn(5 * 64 + 32).to(dtype)
    assert row_hashes(flat, 64) == [run_hash(run) for run in flat.split(64)]
    assert row_hashes(flat[:32], 64) == [run_hash(flat[:32])]


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (200, 333)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64])
def test_one_flipped_bit_changes_the_hash_of_a_tensor_of_any_length_and_type(shape, dtype):
    values = torch.ones(shape, dtype=dtype)
    before, length = tensor_hash(values), values.numel() * values.itemsize
    for place in {0, length // 2, length - 1}:
        values.view(-1).view(torch.uint8)[place] ^= 1
        assert tensor_hash(values) != before
        values.view(-1).view(torch.uint8)[place] ^= 1
    assert tensor_hash(values) == before


def test_the_hash_of_a_tensor_does_not_depend_on_how_it_lies_in_memory():
    values = torch.randn(6, 8)
    assert tensor_hash(values.t().contiguous().t()) == tensor_hash(values)


def test_a_digest_knows_slot_tensor_position_and_value():
    values = torch.tensor([1.0, 2.0, 3.0])
    reference = tensor_digest("master", "w", 0, values)
    others = [
        tensor_digest("exp_avg", "w", 0, values),
        tensor_digest("master", "v", 0, values),
        tensor_digest("master", "w", 1, values),
        tensor_digest("master", "w", 0, values.flip(0)),
        tensor_digest("master", "w", 0, values + torch.tensor([0.0, 0.0, 1e-6])),
        tensor_digest("master", "w", 0, values[:2]),
    ]
    assert len({reference, *others}) == 7


def test_digests_longer_than_a_chunk_are_those_of_their_parts():
    values = torch.randn((1 << 15) * 2 + 77)
    cut = (1 << 15) + 5
    parts = tensor_digest("master", "w", 0, values[:cut]) + tensor_digest("master", "w", cut, values[cut:])
    assert tensor_digest("master", "w", 0, values) == parts & MASK64


def test_digests_of_parts_are_added_by_name_and_sorted():
    assert list(add_digests([{"b": MASK64, "a": 1}, {"b": 2}, {}]).items()) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"num_updates": 2},
        {"data_cursor": (1, 48)},
        {"data_cursor": (0, 49)},
        {"grids": [41, 40]},
        {"grids": [40]},
        {"tensor_digests": {"a": 2, "b": 1}},
        {"tensor_digests": {"a": 1, "c": 2}},
        {"tensor_digests": {"a": 1}},
        {"fences": ["a:int8"]},
    ],
)
def test_the_state_digest_is_about_everything_that_decides_how_training_goes_on(change):
    digest = state_digest(**STANDING)
    assert len(digest) == 16 and int(digest, 16) >= 0
    assert state_digest(**STANDING | change) != digest


def test_the_state_digest_of_a_model_without_fences_does_not_mention_them():
    assert state_digest(**STANDING, fences=()) == state_digest(**STANDING)
    assert state_digest(**STANDING, fences=["a:int8"]) != state_digest(**STANDING, fences=["a:int4"])


def test_the_state_digest_does_not_depend_on_the_order_of_names():
    assert state_digest(**STANDING | {"tensor_digests": {"b": 2, "a": 1}}) == state_digest(**STANDING)


def test_a_working_copy_that_goes_while_frames_of_it_arrive_has_not_changed_in_memory():
    unit = SimpleNamespace(flat=torch.randn(128))
    units = {4: cast("FlatUnit", unit)}
    blocks = [Block(0, 4, 0, 64), Block(1, 4, 64, 128)]
    for arrives, given_up in ((False, [0, 1]), (True, [1])):
        seals = Seals(blocks)
        seals.written([0, 1], [unit.flat[:64], unit.flat[64:]])
        if arrives:
            seals.await_frames([0])
        unit.flat[3] += 1.0  # of block 0: a frame has landed, and the wait for the others is interrupted
        unit.flat[70] += 1.0
        seals.drop(units)
        assert [each.place for each in seals.given_up] == given_up


def test_what_has_arrived_whole_is_watched_again():
    unit = SimpleNamespace(flat=torch.randn(64))
    seals = Seals([Block(0, 4, 0, 64)])
    seals.await_frames([0])
    seals.written([0], [unit.flat])
    unit.flat[3] += 1.0
    seals.drop({4: cast("FlatUnit", unit)})
    assert [each.place for each in seals.given_up] == [0]
