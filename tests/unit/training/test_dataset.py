"""Own datasets: randomness is that of the place in the data, several are mixed, what is no data is refused."""

import random
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from elaswave.data.fingerprint import DatasetFingerprint, check_same_dataset, dataset_fingerprint_in
from elaswave.data.samples import Draw, Sampler
from elaswave.errors import DataError
from elaswave.training.dataset import DatasetSamples, UserDataError, as_pair, hash_batch

X, Y = torch.arange(40.0).reshape(20, 2), torch.arange(20)
PLAIN = TensorDataset(X, Y)


class Noisy:
    """Draws from each generator, how often depends on the sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        drawn = [random.random() + np.random.rand() + torch.rand(()).item() for _ in range(index % 3 + 1)]
        return torch.tensor(drawn[-1:]), index


def draws(*samples: int) -> list[Draw]:
    return [Draw(sample, 0, sample) for sample in samples]


def test_samples_are_put_together() -> None:
    samples = DatasetSamples(PLAIN, eval_dataset=TensorDataset(X[:3] + 1, Y[:3]))
    inputs, targets = samples.batch(draws(3, 0, 3), "train")
    assert torch.equal(inputs, X[[3, 0, 3]]) and targets.tolist() == [3, 0, 3]
    assert torch.equal(samples.batch(draws(2), "validation")[0], X[2:3] + 1)
    assert (samples.num_samples("train"), samples.num_samples("validation")) == (20, 3)
    assert DatasetSamples(PLAIN).num_samples("validation") == 0
    samples.require_samples(20)
    with pytest.raises(DataError, match="dataset has 20 samples, fewer than one micro-batch of .* = 21"):
        samples.require_samples(21)


def test_randomness_depends_on_the_place_only() -> None:
    samples, sampler = DatasetSamples(Noisy()).seeded(4), Sampler(4, 20, 5, 3)
    wanted = sampler.draws(2, 1)
    first = samples.batch(wanted, "train")[0]
    for disturbance in range(5):
        torch.rand(disturbance), np.random.rand(disturbance), random.random()
        samples.batch(sampler.draws(1 + disturbance, 0), "train")
        assert torch.equal(samples.batch(wanted, "train")[0], first)
        assert torch.equal(samples.batch(wanted[disturbance:][:1], "train")[0], first[disturbance : disturbance + 1])
    again = samples.batch([draw._replace(data_pass=draw.data_pass + 1) for draw in wanted], "train")[0]
    assert not (again == first).any()
    assert not (DatasetSamples(Noisy()).seeded(5).batch(wanted, "train")[0] == first).any()
    evaluated = DatasetSamples(Noisy(), eval_dataset=Noisy()).seeded(4).batch(wanted, "validation")[0]
    assert not (evaluated == first).any()


def test_a_collate_function_draws_by_the_place_as_well() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.rand(len(rows), 2), torch.tensor([target for _, target in rows])

    samples = DatasetSamples(PLAIN, collate)
    first = samples.batch(draws(1, 2), "train")[0]
    samples.batch(draws(5), "train")
    assert torch.equal(samples.batch(draws(1, 2), "train")[0], first)
    assert not torch.equal(samples.batch(draws(2, 1), "train")[0], first)


class TestSeveralDatasets:
    def test_they_are_counted_through(self) -> None:
        other = TensorDataset(-X[:5], Y[:5])
        samples = DatasetSamples({"plus": (PLAIN, 3), "minus": (other, 1.0)})
        assert [tuple(source) for source in samples.sources] == [("plus", 20, 3.0), ("minus", 5, 1.0)]
        assert samples.num_samples("train") == 25
        assert torch.equal(samples.batch(draws(19, 20, 24), "train")[0], torch.cat([X[19:], -X[:1], -X[4:5]]))
        with pytest.raises(DataError, match=r"dataset\['minus'\] has 5 samples, fewer than one micro-batch"):
            samples.require_samples(6)
        assert DatasetSamples(PLAIN).sources == ()

    @pytest.mark.parametrize(
        "mixture, message",
        [
            ({}, "an empty dictionary"),
            ({"train": PLAIN}, r"dataset\['train'\] is a torch.utils.data.*TensorDataset; a dictionary mixes datasets"),
            ({"a": (PLAIN, 0.0)}, r"dataset\['a'\] has weight 0.0; needed a number above 0"),
            ({"a": (PLAIN, float("nan"))}, r"dataset\['a'\] has weight nan"),
            ({"a": (PLAIN, "half")}, r"dataset\['a'\] is a tuple; a dictionary mixes"),
            ({"a": ([], 1.0)}, r"dataset\['a'\] is empty"),
        ],
    )
    def test_what_is_no_mixture(self, mixture: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            DatasetSamples(mixture)


class TestHuggingFace:
    """Stand-ins for `datasets.Dataset`; the library itself was tried by hand (see docs/own-models/data.md)."""

    class Formatted:
        def __init__(self, kind: str | None) -> None:
            self.format = {"type": kind}

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = {"input_ids": [index, index + 1], "labels": index}
            return {key: torch.tensor(value) for key, value in row.items()} if self.format["type"] == "torch" else row

        def with_format(self, kind: str) -> Any:
            return TestHuggingFace.Formatted(kind)

    def test_lists_become_tensors_and_labels_targets(self) -> None:
        inputs, targets = DatasetSamples(self.Formatted(None)).batch(draws(1, 3), "train")
        assert list(inputs) == ["input_ids"] and inputs["input_ids"].tolist() == [[1, 2], [3, 4]]
        assert targets.tolist() == [1, 3]

    def test_a_format_that_was_chosen_stays(self) -> None:
        inputs, _ = DatasetSamples(self.Formatted("numpy")).batch(draws(1, 3), "train")
        assert isinstance(inputs["input_ids"], list)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PLAIN)


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return PLAIN[index]


class TestRefusals:
    @pytest.mark.parametrize(
        "dataset, message",
        [
            (
                Stream(),
                "dataset is a .*Stream, which can only be iterated over; needed a map-style dataset",
            ),
            (iter(PLAIN), "dataset is a .*, which can only be iterated over"),
            (5, "dataset is a int, which has no __getitem__"),
            (NoLength(), "dataset is a .*NoLength, which has no length .*; needed __len__"),
            ([], r"dataset is empty: len\(dataset\) is 0"),
            (DataLoader(PLAIN), "dataset is a DataLoader; needed the dataset itself: give dataset=loader.dataset"),
        ],
    )
    def test_what_is_no_map_style_dataset(self, dataset: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            DatasetSamples(dataset)
        with pytest.raises(DataError, match="^eval_dataset is "):
            DatasetSamples(PLAIN, eval_dataset=dataset)

    def test_a_collate_function_that_is_none(self) -> None:
        with pytest.raises(DataError, match="collate: got a str, needed a function"):
            DatasetSamples(PLAIN, "stack")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "collated, message",
        [
            (X, "a micro-batch is a torch.Tensor; needed a pair"),
            ([X, X, Y], "a micro-batch is a list of 3 values; needed a pair"),
            ({"x": X}, "a dictionary with the keys 'x'; needed one of 'labels' or 'label'"),
            ({"label": Y, "labels": Y}, "a dictionary with the keys 'label', 'labels'; needed one of"),
            (({"text": ["a", "b"]}, Y), r"inputs\['text'\]\[0\] of a micro-batch is a str; needed a tensor"),
            ((X, np.zeros(3)), "targets of a micro-batch is a numpy.ndarray; needed a tensor"),
            ((X, (Y, 3)), r"targets\[1\] of a micro-batch is a int"),
            ((X.to_sparse(), Y), "inputs of a micro-batch is a tensor of layout torch.sparse_coo on cpu"),
            ((X.to("meta"), Y), "inputs of a micro-batch is a tensor of layout torch.strided on meta"),
        ],
    )
    def test_what_is_no_micro_batch(self, collated: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            DatasetSamples(PLAIN, lambda rows: collated).batch(draws(1), "train")

    @pytest.mark.filterwarnings("ignore")  # torch's own about quantized tensors
    def test_quantized_samples_are_refused_and_eight_bit_floats_are_taken(self) -> None:
        special = X.float().to(torch.float8_e4m3fn)
        assert as_pair((special, Y))[0] is special and hash_batch((special, Y))
        with pytest.raises(DataError, match=r"inputs\[0\] of a micro-batch is quantized \(qint8\): use tensor"):
            as_pair(([torch.quantize_per_tensor(X.float(), 0.1, 0, torch.qint8)], Y))

    def test_structures_that_are_taken(self) -> None:
        Pair = namedtuple("Pair", "x y")
        for collated in ((X, Y), [X, Y], Pair(X, Y), (Pair(X, None), {"b": (Y, [Y])})):
            found = as_pair(collated)
            assert found == (collated[0], collated[1]) and type(found[0]) is type(collated[0])
        inputs, _ = as_pair((OrderedDict(a=[OrderedDict(b=X)]), Y))
        assert type(inputs) is type(inputs["a"][0]) is dict, "a library's dictionary becomes a plain one"
        assert as_pair({"a": X, "labels": Y}) == ({"a": X}, Y)

    def test_an_exception_is_named_by_its_sample(self) -> None:
        class Broken(Noisy):
            def __getitem__(self, index: int) -> Any:
                if index == 3:
                    raise OSError("no such image")
                return X[index], Y[index] if index < 9 else X

        with pytest.raises(UserDataError, match=r"OSError: no such image \(in dataset\[3\]\)") as caught:
            DatasetSamples(Broken()).batch(draws(2, 3), "train")
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(UserDataError, match=r"\(in dataset\['b'\]\[3\]\)"):
            DatasetSamples({"a": (PLAIN, 1), "b": (Broken(), 1)}).batch(draws(23), "train")
        with pytest.raises(UserDataError, match=r"RuntimeError: stack .*\(in collate of dataset\[1\], dataset\[10\]\)"):
            DatasetSamples(Broken()).batch(draws(1, 10), "train")


class TestFingerprint:
    def of(self, dataset: Any, num_hashes: int = 8) -> DatasetFingerprint:
        samples = DatasetSamples(dataset)
        sizes = {"dataset": samples.num_samples("train")}
        return DatasetFingerprint(num_samples=sizes, hashes=list(samples.hashes(num_hashes)))

    def test_the_same_data_are_known_again(self) -> None:
        once, again = self.of(Noisy()), self.of(Noisy())
        assert once == again and check_same_dataset(once, again) == ""
        assert {each.sample for each in once.hashes} >= {0, 19} and len(once.hashes) == 8
        assert {each.sample for each in self.of(Noisy(), 100).hashes} == set(range(20))
        assert len(self.of([(X[0], Y[0])]).hashes) == 1
        kept = msgspec.to_builtins(once)
        assert dataset_fingerprint_in({"data": kept}) == once
        assert dataset_fingerprint_in({}) is dataset_fingerprint_in({"data": {"num_bytes": 3}}) is None

    def test_other_data_are_refused(self) -> None:
        once = self.of(PLAIN)
        with pytest.raises(DataError, match="it had 20 samples in dataset and now has 19 samples in dataset"):
            check_same_dataset(once, self.of(TensorDataset(X[:19], Y[:19])))
        changed = X.clone()
        changed[19, 1] += 1
        with pytest.raises(DataError, match="of 8 samples that were compared 1 have changed, the first is number 19"):
            check_same_dataset(once, self.of(TensorDataset(changed, Y)))

    def test_what_cannot_be_compared_is_said(self) -> None:
        once = self.of(PLAIN)
        assert "does not say what the dataset was like" in check_same_dataset(None, once)
        nothing = DatasetFingerprint(num_samples=once.num_samples, hashes=[])
        assert "no sample of the dataset could be compared" in check_same_dataset(once, nothing)

    def test_samples_that_cannot_be_had_are_left_out(self) -> None:
        class Broken(Noisy):
            def __getitem__(self, index: int) -> Any:
                if index % 2:
                    raise ValueError(index)
                return X[index], Y[index]

        assert [each.sample % 2 for each in self.of(Broken(), 100).hashes] == [0] * 10


def test_the_hash_covers_place_type_shape_and_bytes() -> None:
    pairs: list[tuple[Any, Any]] = [
        (X, Y), (X + 1, Y), (X.T, Y), (X.double(), Y), (Y, X), ({"a": X}, Y), ({"b": X}, Y), ((X,), Y),
        (X.bfloat16(), Y), (X > 3, Y), (X[:0], Y), (X[0, 0], Y), (X, (Y, Y)),
    ]  # fmt: skip
    assert len({hash_batch(pair) for pair in pairs}) == len(pairs)
    assert hash_batch((X, Y)) == hash_batch((X.T.contiguous().T, Y.clone()))
