"""State really is sharded and really is copied, and the digest says what it holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import flip_bit, run_job

from elaswave.blocks.placement import ReplicaRole
from elaswave.coordinator.records.run_state import add_digests
from elaswave.errors import RecoveryError, StateError
from elaswave.state.flat import BlockStore

SHORT: dict[str, Any] = {"run.steps": 4}


class DigestWriter:
    """Before step 4, every worker writes its part of every tensor digest, from the blocks that it follows.

    Args:
        folder: for the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.step, machine.attempt, phase, index) == (4, 1, "forward", 0):
            for role in ReplicaRole:
                parts = json.dumps(BlockStore(machine.copies).digest_parts(role))
                (self.folder / f"{role.name}-{machine.worker}.json").write_text(parts)


@pytest.mark.parametrize("widths", [pytest.param([2, 2], marks=pytest.mark.slow), [2, 1, 2]], ids=str)
def test_a_digest_from_followers_alone_is_that_of_the_owners(widths: list[int], tmp_path: Path) -> None:
    settings = {"optimizer.schedule": "constant", "layout.widths": widths}
    expected = run_job(tmp_path / "three", settings | {"run.steps": 3}).digests
    run_job(tmp_path / "four", settings | {"run.steps": 4}, probe=DigestWriter(tmp_path))
    for role in ReplicaRole:
        parts = [json.loads(file.read_text()) for file in tmp_path.glob(f"{role.name}-*.json")]
        assert len(parts) == sum(widths)
        assert all(hexadecimal(part) != expected for part in parts)  # no worker holds everything
        assert hexadecimal(add_digests(parts)) == expected


def hexadecimal(digests: dict[str, int]) -> dict[str, str]:
    return {name: f"{value:016x}" for name, value in digests.items()}


@pytest.mark.parametrize(
    ("verify", "error", "told"),
    [
        (True, RecoveryError, "a checkpoint after step 4 was refused: block .* differs between its owner"),
        (False, StateError, r"the followers' copy of exp_avg\.embedding\.token\.weight is not the owners'"),
    ],
)
def test_a_copy_that_differs_after_the_last_step_is_found(
    verify: bool, error: type[Exception], told: str, tmp_path: Path
) -> None:
    class FlipAtTheEnd:
        def reached(self, phase: str, index: int, machine: Any) -> None:
            if (machine.worker, machine.step, phase, index) == (1, 4, "apply", len(machine.copies) - 1):
                flip_bit(next(BlockStore(machine.copies).with_role(ReplicaRole.FOLLOWER)).slots["exp_avg"], 0, 0)

    with pytest.raises(error, match=told):
        run_job(tmp_path, SHORT | {"layout.widths": [2, 2], "elastic.verify": verify}, probe=FlipAtTheEnd())
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    "num_followers", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_optimizer_bytes_of_a_worker_are_its_share(num_followers: int, tmp_path: Path) -> None:
    default_model = {
        "model.num_layers": 4,
        "model.hidden_size": 128,
        "model.num_heads": 4,
        "model.context_length": 64,
        "batch.num_microbatches": 2,
        "elastic.block_size": 16384,
        "run.steps": 1,
    }
    layout = {"layout.widths": [2, 2], "elastic.num_followers": num_followers}
    memory = run_job(tmp_path, default_model | layout).result.memory
    alone = run_job(tmp_path / "alone", default_model | {"layout.widths": [1]}).result.memory[0].optimizer_bytes
    total = sum(worker.optimizer_bytes for worker in memory.values())
    assert total == (1 + num_followers) * alone
    assert max(worker.optimizer_bytes for worker in memory.values()) <= 1.1 * (1 + num_followers) / 4 * alone


@pytest.mark.slow
def test_another_seed_is_another_computation(tmp_path: Path) -> None:
    one, same, other = (
        run_job(tmp_path / name, SHORT | {"layout.widths": [1, 1], "run.seed": seed})
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one.computation == same.computation
    assert one.result.state_digest != other.result.state_digest
    assert set(one.digests.values()).isdisjoint(other.digests.values())
    assert set(one.result.losses).isdisjoint(other.result.losses)


@pytest.mark.slow
def test_verification_off_gives_the_same_bits(tmp_path: Path) -> None:
    on, off = (
        run_job(tmp_path / str(on), SHORT | {"elastic.verify": on, "layout.widths": [2, 2]}) for on in (True, False)
    )
    assert on.computation == off.computation
