"""How a job collects its checkpoints: parts that count no more, and files that are not needed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from elaswave.config.load import load_config
from elaswave.control.checkpoints import Checkpoints
from elaswave.observability.result import CheckpointRecord
from elaswave.state.checkpoint import shard_folder, shard_name
from elaswave.state.checkpoint_format import MASTER, CheckpointMeta, TensorInfo, stored_name
from elaswave.state.checkpoint_shards import write_shard
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.materialise import materialise, owned_pieces
from elaswave.worker.messages import ShardWritten, Standing
from elaswave.worker.optimizer import OPTIMIZERS

SMALL = ("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "layout.widths=[1,1]")


class Job:
    """Workers that write parts of checkpoints, and the coordinator's side of it."""

    def __init__(self, run_dir: Path, describe: Callable[[Standing], CheckpointMeta | None] | None = None) -> None:
        self.run_dir = run_dir
        self.blueprint = Blueprint(load_config(None, list(SMALL)))
        self.optimizer = OPTIMIZERS["adamw"](self.blueprint.config.optimizer)
        self.written: list[CheckpointRecord] = []
        self.checkpoints = Checkpoints(
            self.blueprint,
            run_dir,
            describe=describe or self.meta,
            begun_s=lambda step: None,
            on_written=self.written.append,
            on_given_up=lambda step, worker, reason: None,
            say=lambda text: None,
        )

    def meta(self, standing: Standing) -> CheckpointMeta:
        return CheckpointMeta(
            step=standing.step,
            losses=[],
            grids={},
            seed=0,
            data_cursor=(0, 0),
            config={},
            tensors={
                stored_name(name, slot.name): TensorInfo(slot.shape)
                for name in (MASTER, *self.optimizer.slots)
                for slot in self.blueprint.tensors
            },
            elaswave_version="",
            extra={},
        )

    def write(self, step: int, epoch: int, worker: int) -> ShardWritten:
        layout, placement = self.blueprint.layout, self.blueprint.placement
        _, store, progress = materialise(self.blueprint, worker, self.optimizer, layout, placement, None)
        folder = shard_folder(self.run_dir, step)
        standing = Standing(
            epoch=epoch, step=step, num_updates=0, exponents=list(progress.grids.exponents), calibrated=True
        )
        items = write_shard(folder, shard_name(worker, epoch), list(owned_pieces(store)))
        return ShardWritten(worker=worker, standing=standing, items=items)

    def decide(self, epoch: int, *, resume_step: int, again: bool = False, rollback: int | None = None) -> None:
        decision = SimpleNamespace(
            epoch=epoch, members=(0, 1), resume_step=resume_step, checkpoint=again, rollback=rollback
        )
        self.checkpoints.decided(decision)  # type: ignore[arg-type]

    def folders(self) -> list[str]:
        return sorted(folder.name for folder in (self.run_dir / "checkpoints").iterdir())


def test_a_part_that_a_rollback_has_made_void_describes_nothing(tmp_path: Path) -> None:
    """Repeated steps need not come to the same grids where the batch has shrunk."""
    described: list[int] = []
    job = Job(tmp_path, lambda standing: described.append(standing.epoch))
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
    job.checkpoints.part(second)  # it was under way when the epoch rose
    assert [record.step for record in job.written] == [4]
    again = [job.write(4, 2, worker) for worker in (0, 1)]
    assert job.folders() == ["step-00000004", "step-00000004.tmp"]
    for part in again:
        job.checkpoints.part(part)
    assert job.folders() == ["step-00000004"]
    assert [record.step for record in job.written] == [4]
