"""How a job collects its checkpoints: parts that count no more, and files that are not needed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from elaswave.channel.messages.agent import BreakOffCommit, CommitCheckpoint
from elaswave.channel.messages.worker import ShardFailed, ShardWritten, TrainingStanding
from elaswave.checkpoints.checkpoint import (
    CHECKPOINTS,
    SPARE,
    checkpoint_of_step,
    find_newest_checkpoint,
    link_spare,
    newest_committed_step,
    shard_folder,
    shard_name,
    verify_checkpoint,
)
from elaswave.checkpoints.commit import commit_in_one_of
from elaswave.checkpoints.format import MASTER, CheckpointMeta, CommitRequest, TensorInfo, stored_name
from elaswave.checkpoints.shards import write_shard
from elaswave.config.load import load_config
from elaswave.coordinator.records import checkpoints
from elaswave.coordinator.records.checkpoints import BREAK_OFF_S_MAX, COMMIT_S_MAX, PATIENCE_S, RETRY_S, Checkpoints
from elaswave.engine.blueprint import Blueprint, materialise, owned_pieces
from elaswave.observability.result import CheckpointRecord

SMALL = ("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "layout.widths=[1,1]")


class Job:
    """Workers that write parts of checkpoints, and the coordinator's side of it."""

    def __init__(
        self, run_dir: Path, describe: Callable[[TrainingStanding], CheckpointMeta | None] | None = None
    ) -> None:
        self.run_dir = run_dir
        self.blueprint = Blueprint(load_config(None, list(SMALL)))
        self.written: list[CheckpointRecord] = []
        self.given_up: list[tuple[int, str]] = []
        self.asked: list[tuple[int, bytes]] = []
        """Commits that have been asked for, as far as `answer` has not made them."""
        self.said: list[str] = []
        self.broken_off: list[int] = []
        """Commits whose end has been asked for."""
        self.describe = describe or self.meta
        terminal: Any = SimpleNamespace(say=self.said.append)
        self.checkpoints = Checkpoints(self.blueprint, run_dir, self, terminal, self.tell)

    def tell(self, message: CommitCheckpoint | BreakOffCommit) -> None:
        if isinstance(message, CommitCheckpoint):
            self.asked.append((message.number, message.request))
        else:
            self.broken_off.append(message.number)

    def committed_s(self, step: int) -> float | None:
        return None

    def checkpoint_written(self, record: CheckpointRecord) -> None:
        self.written.append(record)

    def checkpoint_given_up(self, step: int, worker: int | None, reason: str) -> None:
        self.given_up.append((step, reason))

    def meta(self, standing: TrainingStanding) -> CheckpointMeta:
        return CheckpointMeta(
            step=standing.step,
            losses=[],
            grids={},
            seed=0,
            data_cursor=(0, 0),
            config={"format": 2},
            tensors={
                stored_name(name, slot.name): TensorInfo(slot.shape)
                for name in (MASTER, *self.blueprint.optimizer.slots)
                for slot in self.blueprint.tensors
            },
            elaswave_version="",
            extra={},
        )

    def write(self, step: int, generation: int, worker: int, place: str = CHECKPOINTS) -> ShardWritten:
        layout, placement = self.blueprint.layout, self.blueprint.placement
        _, store, progress = materialise(self.blueprint, worker, layout, placement, None)
        folder = shard_folder(self.run_dir, step, place)
        standing = TrainingStanding(
            generation=generation, step=step, num_updates=0, exponents=list(progress.grids.exponents), calibrated=True
        )
        items = write_shard(folder, shard_name(worker, generation), list(owned_pieces(store)))
        return ShardWritten(worker=worker, standing=standing, items=items)

    def decide(self, generation: int, *, resume_step: int, again: bool = False, rollback: int | None = None) -> None:
        decision = SimpleNamespace(
            generation=generation,
            members=(0, 1),
            resume_step=resume_step,
            checkpoint=again,
            rollback=rollback,
            joined=(),
        )
        self.checkpoints.decided(decision)  # type: ignore[arg-type]

    def answer(self) -> None:
        """Makes the commits that have been asked for, as a committer does."""
        while self.asked:
            number, request = self.asked.pop(0)
            asked = msgspec.msgpack.decode(request, type=CommitRequest)
            commit_in_one_of(list(map(Path, asked.folders)), asked.items, asked.meta, sizes=asked.sizes)
            self.checkpoints.committed(number, None, again=False)

    def folders(self) -> list[str]:
        return sorted(folder.name for folder in (self.run_dir / "checkpoints").iterdir())


def test_a_part_that_a_rollback_has_made_void_describes_nothing(tmp_path: Path) -> None:
    """Repeated steps need not come to the same grids where the batch has shrunk."""
    described: list[int] = []
    job = Job(tmp_path, lambda standing: described.append(standing.generation))
    late = job.write(4, 1, 0)
    job.decide(2, resume_step=3, rollback=2)
    job.checkpoints.part(late)
    for worker in (0, 1):
        job.checkpoints.part(job.write(4, 2, worker))
    assert described == [2]


def test_what_is_written_again_beside_a_checkpoint_that_is_complete_does_not_stay(tmp_path: Path) -> None:
    job = Job(tmp_path)
    first, second = job.write(4, 1, 0), job.write(4, 1, 1)
    job.checkpoints.part(first)
    job.decide(2, resume_step=5, again=True)
    job.checkpoints.part(second)  # it was under way when the new generation began
    job.answer()
    assert [record.step for record in job.written] == [4]
    again = [job.write(4, 2, worker) for worker in (0, 1)]
    assert job.folders() == ["step-00000004", "step-00000004.tmp"]
    for part in again:
        job.checkpoints.part(part)
    assert job.folders() == ["step-00000004"]
    assert [record.step for record in job.written] == [4]


def complete(job: Job, *steps: int) -> None:
    for step in steps:
        for worker in (0, 1):
            job.checkpoints.part(job.write(step, 1, worker))


def test_checkpoints_are_committed_one_after_the_other_and_are_settled_only_then(tmp_path: Path) -> None:
    job = Job(tmp_path)
    complete(job, 2, 4)
    assert len(job.asked) == 1 and job.checkpoints.is_committing
    assert not job.checkpoints.is_settled(2) and job.checkpoints.records == []
    job.checkpoints.part(job.write(2, 2, 0))  # said again: it must not disturb the commit
    job.answer()
    assert [record.step for record in job.written] == [2, 4] and not job.checkpoints.is_committing
    assert job.checkpoints.is_settled(2) and job.checkpoints.records[-1].step == 4
    assert job.folders() == ["step-00000002", "step-00000004"]


def test_a_question_whose_answer_is_lost_is_repeated_and_two_answers_count_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    complete(job, 2)
    job.checkpoints.ask_again()
    assert job.asked[0] == job.asked[1]
    job.answer()
    assert [record.step for record in job.written] == [2]
    job.checkpoints.ask_again()
    assert job.asked == []


def test_a_commit_whose_process_is_lost_is_tried_again_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    complete(job, 2)
    first, _ = job.asked.pop()
    job.checkpoints.committed(first, "the process that committed it was lost", again=True)
    assert job.given_up == [] and len(job.asked) == 1
    job.checkpoints.committed(first, "late", again=False)  # counts for nothing
    second, _ = job.asked.pop()
    assert second != first
    job.checkpoints.committed(second, "the process that committed it was lost", again=True)
    assert job.given_up == [(2, "the process that committed it was lost")]
    assert job.folders() == [] and job.checkpoints.is_settled(2)


def test_a_commit_that_fails_is_given_up_and_the_next_one_made(tmp_path: Path) -> None:
    job = Job(tmp_path)
    complete(job, 2, 4)
    number, _ = job.asked.pop()
    job.checkpoints.committed(number, "cannot write", again=False)
    assert job.given_up == [(2, "cannot write")]
    job.answer()
    assert [record.step for record in job.written] == [4]


def test_a_commit_of_the_last_checkpoint_is_tried_again_within_a_bound_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock[0])
    job = Job(tmp_path)
    last = job.blueprint.config.run.steps
    complete(job, last)
    for _ in range(3):
        (number, request), job.asked[:] = job.asked[0], []
        job.checkpoints.committed(number, "No space left on device", again=False)
        assert job.given_up == [] and job.checkpoints.is_committing and not job.asked
        job.checkpoints.committed(number, "again", again=False)  # an answer that comes twice
        job.checkpoints.ask_again()
        assert not job.asked and not job.checkpoints.tick(clock[0] + RETRY_S / 2)
        clock[0] += RETRY_S
        assert not job.checkpoints.tick(clock[0])
        assert job.asked[0][0] != number and job.asked[0][1] == request
    (said,) = job.said
    assert f"the last checkpoint, of step {last}, cannot be written and is tried again for 60 s: No space" in said
    job.answer()
    assert [record.step for record in job.written] == [last]

    job = Job(tmp_path / "stays full")
    complete(job, last)
    clock[0] += PATIENCE_S
    job.checkpoints.committed(job.asked[0][0], "No space left on device", again=False)
    assert job.given_up == [(last, "No space left on device")]
    assert job.checkpoints.given_up == {last: "No space left on device"}


def test_a_part_that_is_tried_again_is_said_and_still_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for again in (True, True, False):
        job.checkpoints.part(ShardFailed(worker=0, generation=1, step=4, reason="full", again=again))
        assert job.given_up == []
    assert len(job.said) == 1 and "step 4, cannot be written and is tried again" in job.said[0]
    job.checkpoints.part(job.write(4, 1, 1))
    assert job.given_up == [(4, "full")]


def test_a_checkpoint_goes_as_a_whole_to_the_spare_place_wherever_its_parts_are(tmp_path: Path) -> None:
    run_dir, spare = tmp_path / "run", tmp_path / "other disk" / "run"
    run_dir.mkdir()
    link_spare(run_dir, spare)
    job = Job(run_dir)
    first, second = job.write(4, 1, 0), job.write(4, 1, 1, SPARE)
    (run_dir / "checkpoints" / "step-00000004.tmp" / "worker-1-generation-1.distcp").mkdir()  # what cannot be written
    for part in (first, second):
        job.checkpoints.part(part)
    job.answer()
    (record,) = job.written
    assert record.path == "spare-checkpoints/step-00000004"
    assert find_newest_checkpoint(run_dir).newest == verify_checkpoint(run_dir / record.path)
    assert checkpoint_of_step(run_dir, 4).folder == run_dir / record.path and newest_committed_step(run_dir) == 4
    assert [folder.name for folder in spare.iterdir()] == ["step-00000004"] and job.folders() == []
    complete(job, 6, 8)
    job.answer()
    assert [record.path for record in job.checkpoints.records] == [f"checkpoints/step-0000000{step}" for step in (6, 8)]
    assert not list(spare.iterdir()), "the newest two are kept, wherever they are"


TOO_SLOW = "its commit has not ended within 600 s; is the disk too slow, or gone?"


def late_commit(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *steps: int) -> Job:
    """A job whose first commit was asked for at 100 s, and takes too long."""
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: 100.0)
    job = Job(run_dir)
    complete(job, *steps)
    assert not job.checkpoints.tick(100.0 + COMMIT_S_MAX) and job.broken_off == []
    for late_s in (0.1, 0.2):
        assert not job.checkpoints.tick(100.0 + COMMIT_S_MAX + late_s)
    assert job.broken_off == [job.asked[0][0]], "once"
    assert job.given_up == [] and job.checkpoints.is_committing, "until it has ended"
    return job


def test_a_commit_that_takes_too_long_is_given_up_once_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = late_commit(tmp_path, monkeypatch, 2, 4)
    job.checkpoints.ask_again()
    number, _ = job.asked.pop()
    assert job.broken_off == [number, number]
    job.asked.clear()
    job.checkpoints.committed(number, "the process that committed it was lost", again=True)
    assert job.given_up == [(2, TOO_SLOW)]
    assert job.folders() == ["step-00000004.tmp"]
    job.answer()
    assert [record.step for record in job.written] == [4]


def test_a_commit_that_was_to_be_broken_off_and_was_made_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = late_commit(tmp_path, monkeypatch, 2, 4)
    job.answer()
    assert [record.step for record in job.written] == [2, 4] and job.given_up == []
    assert not job.checkpoints.tick(1e9)


def test_files_stay_where_a_committer_may_be_at_work_that_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were they removed under it, it could give what is left the name of a whole checkpoint."""
    job = late_commit(tmp_path, monkeypatch, 2)
    assert not job.checkpoints.tick(100.0 + COMMIT_S_MAX + BREAK_OFF_S_MAX)
    assert job.checkpoints.tick(100.1 + COMMIT_S_MAX + BREAK_OFF_S_MAX)
    assert job.given_up == [(2, TOO_SLOW)] and not job.checkpoints.is_committing
    job.checkpoints.part(job.write(2, 2, 0))
    assert job.folders() == ["step-00000002.tmp"]
    number, request = job.asked.pop()
    asked = msgspec.msgpack.decode(request, type=CommitRequest)
    commit_in_one_of(list(map(Path, asked.folders)), asked.items, asked.meta, sizes=asked.sizes)
    job.checkpoints.committed(number, None, again=False)
    assert job.written == [], "it was given up"
    assert verify_checkpoint(tmp_path / "checkpoints" / "step-00000002").step == 2


def test_what_is_being_committed_at_the_end_is_not_given_up(tmp_path: Path) -> None:
    """A worker was lost when all parts of the last checkpoint had come: survivors are told to write it again, and what
    they say counts for nothing, since its commit has been asked for."""
    job = Job(tmp_path)
    complete(job, 4)
    job.decide(2, resume_step=5, again=True)
    for worker in (0, 1):
        job.checkpoints.part(job.write(4, 2, worker))
    job.checkpoints.end()
    assert job.given_up == [] and job.checkpoints.is_committing
    job.answer()
    assert [record.step for record in job.written] == [4]
    assert job.folders() == ["step-00000004"]
    job.checkpoints.end()
    assert job.given_up == []


def test_parts_that_survivors_write_once_more_during_a_commit_do_not_stay(tmp_path: Path) -> None:
    job = Job(tmp_path)
    complete(job, 4)
    job.decide(2, resume_step=5, again=True)
    number, request = job.asked.pop()
    asked = msgspec.msgpack.decode(request, type=CommitRequest)
    commit_in_one_of(list(map(Path, asked.folders)), asked.items, asked.meta, sizes=asked.sizes)
    job.checkpoints.part(job.write(4, 2, 0))  # before the answer has come
    assert job.folders() == ["step-00000004", "step-00000004.tmp"]
    job.checkpoints.committed(number, None, again=False)
    assert job.folders() == ["step-00000004"]


def test_no_checkpoint_becomes_durable_between_the_search_for_one_and_the_decision_to_go_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    complete(job, 2)
    job.answer()
    job.checkpoints.part(job.write(4, 1, 0))
    job.checkpoints.hold()
    job.checkpoints.part(job.write(4, 1, 1))  # it was under way
    assert job.asked == []
    job.decide(2, resume_step=3, rollback=2)
    assert job.asked == [] and job.folders() == ["step-00000002"]
    assert [record.step for record in job.written] == [2] and job.given_up == []


def test_a_checkpoint_that_was_complete_before_the_decision_is_committed_where_nothing_is_void(tmp_path: Path) -> None:
    """Another loss while the search's answer was considered may have made the decision another one."""
    job = Job(tmp_path)
    job.checkpoints.hold()
    complete(job, 4)
    assert job.asked == [] and not job.checkpoints.is_committing
    job.decide(2, resume_step=5)
    job.answer()
    assert [record.step for record in job.written] == [4]


def test_a_description_that_is_too_long_to_be_sent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "REQUEST_BYTES_MAX", 1000)
    job = Job(tmp_path)
    complete(job, 2)
    (given_up,) = job.given_up
    assert "bytes, and at most 1000 can be sent; use larger blocks" in given_up[1]
    assert job.asked == []


def test_a_part_that_is_another_workers_does_not_count(tmp_path: Path) -> None:
    job = Job(tmp_path)
    own, other = job.write(4, 1, 0), job.write(4, 1, 1)
    job.checkpoints.part(msgspec.structs.replace(own, items=[*own.items[1:], other.items[0]]))
    job.checkpoints.part(other)
    assert not job.asked
    job.checkpoints.part(own)
    assert job.asked
