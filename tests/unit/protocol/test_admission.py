"""Whom a job admits: one case for each thing in which a joiner can differ."""

import msgspec
import pytest

from elaswave.protocol.membership.admissions import Founders, admission_problem, determinism_hashes_in, libraries
from elaswave.protocol.messages import Joining
from elaswave.protocol.step.ballot import Ballot, BufferTensor, Request, Scores, VoteShape, pairs_of

NAMES = ("embedding", "block.0", "block.1", "head")
FOUNDERS = Founders(
    protocol=3,
    libraries="numpy 2.1.0, torch 2.7.0",
    environment="torch 2.7.0, AVX2, Processor A",
    config_hash=11,
    model_hash=12,
    data_hash=13,
    determinism_hashes={0: 100, 1: 101, 2: 102, 3: 103, 4: 104},
)
JOINING = Joining(
    worker=5,
    address="unix:/tmp/5.sock",
    protocol=3,
    libraries="numpy 2.1.0, torch 2.7.0",
    environment="torch 2.7.0, AVX2, Processor A",
    config_hash=11,
    model_hash=12,
    data_hash=13,
    determinism_hashes={0: 100, 1: 101, 2: 102, 4: 104},
)


def problem(**differs: object) -> str | None:
    return admission_problem(msgspec.structs.replace(JOINING, **differs), FOUNDERS, NAMES)


def test_one_that_has_everything_in_common_may_join():
    assert problem() is None
    assert problem(worker=9, address="unix:/elsewhere", environment="the same bits on Processor B") is None


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({"protocol": 4}, "it speaks protocol 4 and the job 3: install the job's elaswave"),
        (
            {"libraries": "numpy 2.1.0, torch 2.8.0"},
            "it has numpy 2.1.0, torch 2.8.0, and the job numpy 2.1.0, torch 2.7.0: install the same versions",
        ),
        ({"config_hash": 1}, "its configuration is another one: start it with the config.toml of the run's folder"),
        (
            {"model_hash": 1, "determinism_hashes": {0: 100, 1: 7}},
            "its model or optimizer has other tensors: give it the script that the run was started with",
        ),
        ({"data_hash": 1}, "its data are others: give it the files that the run trains on"),
        (
            {"environment": "torch 2.7.0, AVX512, Processor B", "determinism_hashes": {0: 99, 1: 1}},
            "it computes other bits: it has torch 2.7.0, AVX512, Processor B, and the job torch 2.7.0, AVX2, "
            "Processor A. All machines of a job need processors of one kind and the same libraries",
        ),
        (
            {"determinism_hashes": {0: 100, 1: 101, 2: 7, 4: 8}},
            "layers of the same kind as block.0, head give other bits there, forward or backward, or begin with other "
            "values: a layer must give the same bits in every process, and its code must be the job's",
        ),
        (
            {"determinism_hashes": {}},
            "it does not say what bits it computes, and the job compares them: set elastic.verify=true",
        ),
        (
            {"protocol": 4, "data_hash": 1},
            "it speaks protocol 4 and the job 3: install the job's elaswave; "
            "its data are others: give it the files that the run trains on",
        ),
    ],
)
def test_what_differs_is_told_with_what_to_do(differs, told):
    assert problem(**differs) == told


def test_a_job_that_compares_no_bits_admits_without_them():
    founders = msgspec.structs.replace(FOUNDERS, determinism_hashes={})
    assert admission_problem(msgspec.structs.replace(JOINING, determinism_hashes={}), founders, NAMES) is None
    assert admission_problem(JOINING, founders, NAMES) is None


def test_a_layer_that_no_vote_has_told_of_is_not_compared():
    founders = msgspec.structs.replace(FOUNDERS, determinism_hashes={0: 100, 1: 101})
    assert admission_problem(JOINING, founders, NAMES) is None


def test_versions_have_one_order():
    assert libraries({"torch": "2.7.0", "numpy": "2.1.0"}) == libraries({"numpy": "2.1.0", "torch": "2.7.0"})
    assert libraries({"torch": "2.7.0", "numpy": "2.1.0"}) == "numpy 2.1.0, torch 2.7.0"


def test_founders_are_durable():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FOUNDERS), type=Founders) == FOUNDERS


@pytest.mark.parametrize("num_buffers", [0, 2])
def test_what_founders_have_in_common_is_read_off_a_vote(num_buffers):
    buffers = [BufferTensor(3 + index, is_whole=False) for index in range(num_buffers)]
    shape = VoteShape(2, 5, num_metrics=1, num_determinism_hashes=1 + len(NAMES), buffers=buffers)
    ballots = [
        Ballot(
            coverage=0,
            residency=0,
            agreement=0,
            partial_sums=0,
            next_state=17,
            scores=Scores({}),
            square_sums=(),
            maxima={0: 1.5},
            nonfinite=None,
            request=Request.NONE,
            determinism_hashes=pairs_of({}, own),
            writes={3: (1, 0)},
        )
        for own in ({0: 100, 1: 101, 3: 7}, {0: 100, 2: 102, 3: 8})
    ]
    vector = shape.merge(*map(shape.vector_of, ballots))
    found = determinism_hashes_in(vector, num_layers=len(NAMES), num_tensors=5, num_buffers=num_buffers)
    assert found == {0: 100, 1: 101, 2: 102}, "they differ in layer 2, which ends the job anyway"


def test_foreign_parts_must_be_of_the_founders_kinds():
    founders = msgspec.structs.replace(FOUNDERS, foreign=("a: numpy 2.4", "b: jax 0.10"))
    for there, told in (
        (("a: numpy 2.4", "b: jax 0.10"), None),
        (
            ("a: numpy 2.5", "b: jax 0.10"),
            "its foreign part a is served by numpy 2.5, and the job's by numpy 2.4: install the same software, with "
            "the same code of the part",
        ),
        (
            ("a: numpy 2.4",),
            "its foreign part b is served by nothing, and the job's by jax 0.10: install the same software, with "
            "the same code of the part",
        ),
        (("b: jax 0.10", "a: numpy 2.4"), "its foreign parts stand in another order than the job's"),
    ):
        determinism_hashes = (
            JOINING.determinism_hashes if told is None else {}
        )  # it does not run servers of other kinds
        joining = msgspec.structs.replace(JOINING, foreign=there, determinism_hashes=determinism_hashes)
        assert admission_problem(joining, founders, NAMES) == told
