"""The result of a run and the description of a checkpoint, made from what the coordinator knows of the run. No IO."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from elaswave._version import __version__
from elaswave.channel.messages.worker import TrainingStanding
from elaswave.checkpoints.format import UPDATER, CheckpointMeta, TensorInfo, stored_name
from elaswave.coordinator.records.run_state import RunState, as_series
from elaswave.data.sampler import Sampler
from elaswave.errors import StateError
from elaswave.fences import changing, fence_ratio_of
from elaswave.job.plan import RunPlan
from elaswave.observability.result import CheckpointRecord, JsonFloat, RunResult, WorkerMemory, to_json_float
from elaswave.state.digests import add_digests, state_digest


def describe_checkpoint(
    plan: RunPlan, state: RunState, sampler: Sampler, standing: TrainingStanding, facts: dict[str, object]
) -> CheckpointMeta:
    """The run at the step of a standing, the losses up to which are known.

    Args:
        plan, state, sampler: of the run.
        standing: of the workers that have written the checkpoint.
        facts: about the data.
    """
    step = standing.step
    tensors = plan.tensors
    val = [(at, loss) for at, loss in state.val_losses.items() if at <= step]
    return CheckpointMeta(
        step=step,
        losses=[loss if loss - loss == 0 else "nan" for loss in state.losses[:step]],
        grids={slot.name: exponent for slot, exponent in zip(tensors, standing.exponents, strict=True)},
        seed=plan.config.run.seed,
        data_cursor=sampler.cursor(step),
        config=plan.config.to_dict(),
        tensors={
            stored_name(stored.slot, stored.tensor): TensorInfo(stored.shape, stored.dtype)
            for stored in plan.state.stored(standing.num_updates)
        },
        elaswave_version=__version__,
        extra={
            "num_updates": standing.num_updates,
            "calibrated": standing.calibrated,
            "val_steps": [at for at, _ in val],
            "val_losses": [loss for _, loss in val],
            "metrics": _as_json(as_series(state.metrics, range(1, step + 1))),
            "val_metrics": _as_json(as_series(state.val_metrics, [at for at, _ in val])),
            "data": facts,
            "fence_ratios": _ratios_until(plan, state, step),
        }
        | ({UPDATER: standing.optimizer} if standing.optimizer else {}),
    )


def make_result(
    plan: RunPlan, state: RunState, sampler: Sampler, checkpoints: Sequence[CheckpointRecord], duration_s: float
) -> tuple[RunResult, dict[str, str]]:
    """The result of the run and its digest per tensor, once every member has finished.

    Args:
        plan, state, sampler: of the run.
        checkpoints: those that are on the disk.
        duration_s: of the whole run.
    Raises:
        StateError: the followers' state is not the owners'.
    """
    assert state.all_finished
    reports = [state.finished[worker] for worker in state.members]
    standing = reports[0].standing
    digests = add_digests(report.owner_digests for report in reports)
    check_followers(
        add_digests(report.followed_digests for report in reports),
        add_digests(report.follower_digests for report in reports),
    )
    step = standing.step
    samples_per_s = state.samples_per_s(plan.config.batch.microbatch_size)
    tokens = plan.tokens_per_sample
    result = RunResult(
        steps=step,
        losses=list(state.losses),
        state_digest=state_digest(
            step=step,
            num_updates=standing.num_updates,
            data_cursor=sampler.cursor(step),
            grids=_grids_of(plan, standing.exponents),
            tensor_digests=digests,
            fences=(*changing(plan.config.model.fences), *_ratios_until(plan, state, step)),
        ),
        throughput_tokens_per_s=None if samples_per_s is None or tokens is None else samples_per_s * tokens,
        throughput_samples_per_s=samples_per_s,
        generations=list(state.generations),
        recoveries=list(state.recoveries),
        val_losses=list(state.val_losses.values()),
        val_steps=list(state.val_losses),
        metrics=_as_json(as_series(state.metrics, range(1, step + 1))),
        val_metrics=_as_json(as_series(state.val_metrics, state.val_losses)),
        memory={
            report.worker: WorkerMemory(peak_bytes=report.peak_bytes, optimizer_bytes=report.optimizer_bytes)
            for report in sorted(reports, key=lambda report: report.worker)
        },
        data_wait_s={report.worker: report.data_wait_s for report in reports},
        fence_ratios=_ratios_until(plan, state, step),
        fence_bypasses=_added(report.fence_bypasses for report in reports),
        checkpoints=list(checkpoints),
        start_up_s=state.start_up_s,
        duration_s=duration_s,
        config=plan.config.to_dict(),
    )
    return result, {name: f"{value:016x}" for name, value in digests.items()}


def _ratios_until(plan: RunPlan, state: RunState, step: int) -> list[str]:
    """The ratios of adaptive fences in the steps up to this one: given, or chosen by the run."""
    given = plan.config.model.fence_ratios
    recorded = map(fence_ratio_of, given) if given else state.fence_ratios
    return [str(each) for each in recorded if each.from_step <= step]


def _grids_of(plan: RunPlan, exponents: Sequence[int]) -> list[int]:
    """Exponents of all tensors in an order that tells nothing of layers: that in which a network's tensors stand
    depends on where `elaswave.split` has cut it."""
    if not plan.config.model.network:
        return list(exponents)
    return [exponent for _, exponent in sorted(zip((slot.name for slot in plan.tensors), exponents, strict=True))]


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = sum(map(Counter, counts), Counter[str]())
    return dict(sorted(total.items()))


def _as_json(series: dict[str, list[float]]) -> dict[str, list[JsonFloat]]:
    return {name: [to_json_float(value) for value in values] for name, values in series.items()}


def check_followers(followed: Mapping[str, int], followers: Mapping[str, int]) -> None:
    """What the followers hold must be what they follow, tensor by tensor.

    Args:
        followed: sums of the owners' digests, of each block as often as it has followers.
        followers: sums of the followers' digests.
    Raises:
        StateError: they differ.
    """
    for name in sorted({*followed, *followers}):
        if followers.get(name, 0) != followed.get(name, 0):
            raise StateError(
                f"the followers' copy of {name} is not the owners' after the last step; the result is not to be "
                "trusted. Resume from the last checkpoint, and look at the hardware"
            )
