"""The trace of a simulated step: the same rows, actions and arrows as the trace of a real run.

Apart from the simulator, which knows no files.
"""

from pathlib import Path

from elaswave.observability.trace import ACTION, PHASE, Span, TracePart, Transfer, write_trace
from elaswave.planning.costs.step_time.contended import SimulatedStep


def step_trace(step: SimulatedStep) -> list[TracePart]:
    """What the workers of a simulated step would have recorded, as `elaswave.observability.trace.TraceRecorder` does.

    Args:
        step: any.
    Returns:
        One part per worker, in the order of ids; nanoseconds from the beginning of the step.
    """
    timeline = step.timeline
    transfers: dict[int, list[Transfer]] = {worker: [] for worker in timeline.layout.workers}
    for each in step.transfers:
        tag = (int(each.is_gradient), each.microbatch, each.stage)
        size, start_ns = round(each.num_bytes), _ns(each.start_s)
        transfers[each.source].append(Transfer(True, each.target, size, start_ns, _ns(each.sent_s), tag))
        transfers[each.target].append(Transfer(False, each.source, size, start_ns, _ns(each.end_s), tag))
    end_ns = _ns(timeline.step_s)
    parts = []
    for index, stage in enumerate(timeline.layout.stages):
        for worker in stage.workers:
            spans = [Span("RUN", PHASE, 0, end_ns)]
            before_ns = 0
            for action, start_s, end_s in zip(
                timeline.programs.get(worker, ()), timeline.start_s[worker], timeline.end_s[worker], strict=True
            ):
                if _ns(start_s) > before_ns:
                    spans.append(Span("wait", "wait", before_ns, _ns(start_s), {"for": str(action)}))
                before_ns = _ns(end_s)
                spans.append(Span(str(action), ACTION, _ns(start_s), before_ns))
            parts.append(TracePart(worker=worker, stage=index, num_dropped=0, spans=spans, transfers=transfers[worker]))
    return sorted(parts, key=lambda part: part.worker)


def write_step_trace(path: Path, step: SimulatedStep) -> None:
    """Writes a simulated step as a trace for https://ui.perfetto.dev.

    Raises:
        RunFolderError: the file cannot be written.
    """
    write_trace(path, step_trace(step), {"simulated_step_s": step.step_s})


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
