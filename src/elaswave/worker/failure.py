"""What a worker says of the error that ends it. Pure."""

from typing import NamedTuple

from elaswave.channel.messages.worker import Failed
from elaswave.devices.faults import DeviceFault, fault_of
from elaswave.engine.batches import BatchError
from elaswave.engine.compute import LayerError
from elaswave.errors import SpotCheckError, VoteError
from elaswave.protocol.step.activity import PHASES, action_kind
from elaswave.training.raised import readable, said, traceback_of

_ACTIONS = {"F": "forward", "B": "backward", "I": "backward, input half", "W": "backward, weight half"}


class FailureLocation(NamedTuple):
    """What a worker was at."""

    step: int = 0
    """0: before its first."""
    label: str = ""
    """What its heartbeat tells: an action, a phase, or another word."""


UNKNOWN_LOCATION = FailureLocation()


def failure_message(worker: int, error: BaseException, at: FailureLocation = UNKNOWN_LOCATION) -> Failed:
    """What is said of an error.

    Args:
        worker: its id.
        error: that ends it.
        at: where it was raised.
    """
    if isinstance(error, BatchError):
        return Failed(
            worker=worker,
            kind=error.kind,
            signature=f"{error.kind} at {error.name}",
            summary=readable(str(error)),
            traceback_text=error.traceback_text,
        )
    cause = error.__cause__ if isinstance(error, LayerError) and error.__cause__ is not None else error
    fault = fault_of(error)
    if fault is not None:
        return Failed(
            worker=worker,
            kind=type(cause).__name__,
            signature=_fault_signature(worker, error, type(cause).__name__, fault, at),
            summary=readable(_fault_summary(error, fault, at)),
            traceback_text=traceback_of(cause),
        )
    summary = readable(str(error)) if isinstance(error, LayerError) else said(error)
    place = f"step {at.step}"
    if isinstance(error, LayerError):
        place = _microbatch(error)
        if isinstance(cause, SpotCheckError):  # workers of one stage look at the same layer in the same step
            place = f"step {error.position.step}, layer {error.position.layer}"
    elif at.step and not isinstance(error, VoteError):
        summary += f" (in step {at.step})"
    return Failed(
        worker=worker,
        kind=type(cause).__name__,
        signature=f"{type(cause).__name__} at {place}",
        summary=summary,
        # The vote's finding says all; the place in this code where it was raised does not help the user.
        traceback_text="" if isinstance(error, VoteError) else traceback_of(cause),
        is_common=isinstance(error, VoteError),
        is_wrong=isinstance(cause, SpotCheckError),
    )


def _microbatch(error: LayerError) -> str:
    return f"step {error.position.step}, micro-batch {error.position.microbatch}"


def _fault_signature(worker: int, error: BaseException, kind: str, fault: DeviceFault, at: FailureLocation) -> str:
    """Equal for what would strike whoever computes the same.

    A fault that shows late has the step for its place: one worker may have met it in an action, another in the next. A
    lost device is this worker's alone, so that several that are lost at once do not pass for a fault of the program.
    """
    if fault.is_exact:
        return f"{kind} at " + (_microbatch(error) if isinstance(error, LayerError) else f"step {at.step}")
    whose = f" of worker {worker}" if fault.is_of_the_device else ""
    return f"{fault.words} at step {at.step}{whose}"


def _fault_summary(error: BaseException, fault: DeviceFault, at: FailureLocation) -> str:
    """The class of the fault, the device's own words, and where they came."""
    if not at.step:
        return f"{fault.kind.value}: {fault.words}"
    where = str(error.position) if isinstance(error, LayerError) else f"step {at.step}"
    doing = _doing(at.label)
    where += f", in {doing}" if doing else ""
    if fault.is_exact:
        return f"{fault.kind.value}: {fault.words} (at {where})"
    return f"{fault.kind.value}: {fault.words} (met at {where}; what failed may have been queued before)"


def _doing(label: str) -> str:
    """An action or phase as people read it; empty for anything else."""
    kind = action_kind(label)
    if kind in _ACTIONS:
        stage, microbatch = label.split(kind)
        return f"{_ACTIONS[kind]} of micro-batch {microbatch} in stage {stage}"
    return label if kind in PHASES else ""
