"""The digest of a tensor is the sum of the digests of its parts, wherever it is cut; every change of a bit shows."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaswave.hashing import MASK64, mix64, mix_words
from elaswave.state.flat import tensor_digest
from elaswave.state.seals import run_hash

bits32 = st.integers(0, 2**32 - 1)
"""Any bits, so also every kind of nan."""
words = st.lists(bits32, min_size=1, max_size=40)


def tensor_of(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


@given(bits=words, start=st.integers(0, 2**40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_digests_of_parts_add_up_from_any_cut(bits, start, cuts) -> None:
    values = tensor_of(bits)
    bounds = [0, *sorted(min(cut, len(bits)) for cut in cuts), len(bits)]
    parts = [
        tensor_digest("exp_avg", "block.0.w", start + first, values[first:last])
        for first, last in zip(bounds, bounds[1:])
    ]
    assert sum(parts) & MASK64 == tensor_digest("exp_avg", "block.0.w", start, values)


@given(bits=words, data=st.data())
def test_a_flipped_bit_changes_digest_and_hash(bits, data) -> None:
    changed = list(bits)
    changed[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 31))
    assert tensor_digest("master", "w", 0, tensor_of(bits)) != tensor_digest("master", "w", 0, tensor_of(changed))
    assert run_hash(tensor_of(bits)) != run_hash(tensor_of(changed))


@given(bits=words, data=st.data())
def test_exchanged_values_change_digest_and_hash(bits, data) -> None:
    one, other = (data.draw(st.integers(0, len(bits) - 1)) for _ in range(2))
    changed = list(bits)
    changed[one], changed[other] = changed[other], changed[one]
    before, after = tensor_of(bits), tensor_of(changed)
    same = changed == bits
    assert (tensor_digest("master", "w", 0, before) == tensor_digest("master", "w", 0, after)) == same
    assert (run_hash(before) == run_hash(after)) == same


@given(values=st.lists(st.integers(0, MASK64), min_size=1, max_size=20))
def test_the_mixing_of_arrays_is_that_of_single_numbers(values) -> None:
    mixed = mix_words(np.array(values, dtype=np.uint64))
    assert mixed.tolist() == [mix64(value) for value in values]
