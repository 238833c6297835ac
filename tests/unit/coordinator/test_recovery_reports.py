"""Recoveries are shown first and entered then, each once, and the next coordinator goes on with what was begun."""

from types import SimpleNamespace

import msgspec

from elaswave.blocks.placement import Placement
from elaswave.coordinator.records.recorder import RecoveryReports
from elaswave.coordinator.records.run_state import RunState
from elaswave.observability.events import Recovered
from elaswave.observability.result import Recovery
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.search.recovery import survivor_layout
from elaswave.protocol.events import NewGeneration, Suspected
from elaswave.protocol.messages import Decision
from elaswave.store.store import Entered

LAYOUT = make_layout(widths=(2, 1), layers_per_stage=[1, 1], num_microbatches=4)
LOST = Recovery(
    kind="lost", worker=1, step=2, phase="any", detected_by="exit", generation=2, attempt=1, outcome="retried",
    detect_s=None, agree_s=0.0, plan_s=0.0, edit_s=0.0, promote_s=0.0, redo_s=0.0, total_s=0.1, critical_bytes=0,
    num_microbatches_recomputed=0,
)  # fmt: skip


class Log:
    """A recovery log that has one recovery to tell of, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def __getattr__(self, name):
        return lambda *arguments: self.told.append((name, *arguments)) or [LOST]

    def describe(self, recovery):
        return f"worker {recovery.worker} lost"

    def restarted(self, ended_s, now_s, step, generation):
        return msgspec.structs.replace(
            LOST, kind="coordinator", worker=None, step=step, generation=generation, total_s=now_s - ended_s
        )


def reports(ends_s=(), records=()) -> tuple[RecoveryReports, Log, list[str]]:
    said: list[str] = []
    state = RunState(LAYOUT)
    for record in records:
        state.apply(record)
    recorder = SimpleNamespace(state=state, recovered=lambda recovery: said.append(f"entered {recovery.kind}"))
    log, terminal = Log(), SimpleNamespace(say=said.append)
    made = RecoveryReports(log, recorder, terminal, num_steps=5, coordinator_ends_s=ends_s)  # type: ignore[arg-type]
    return made, log, said


def decision(generation, lost, **changes):
    return Decision(
        term=1, generation=generation, members=(0, 2), lost=lost, evidence=None, resume_step=1, resume_attempt=1,
        layout=survivor_layout(LAYOUT, [1]), placement=Placement.of((0,), ((),)), deliver=(), rollback=None,
        evaluate=False, checkpoint=False, published=0, promoted=0, reason="it has ended", **changes,
    )  # fmt: skip


def test_a_line_is_shown_before_the_entry_is_made():
    """A coordinator that dies in between leaves a successor that says it again."""
    made, _, said = reports()
    for tell in (lambda: made.resumed(1.0), lambda: made.committed(None, 1.0), made.flush):
        said.clear()
        tell()
        assert said == ["worker 1 lost", "entered lost"]


def test_losses_are_reported_under_the_layout_that_they_have_struck():
    made, log, _ = reports()
    effect = NewGeneration(2, (Suspected(1, "exit", "it has ended"),))
    made.new_generation(effect, 7.0)
    assert log.told == [("new_generation", effect, LAYOUT, 7.0)]


def test_a_successor_takes_over_what_has_no_entry_yet():
    made, log, said = reports(records=[Entered(event=Recovered(recovery=LOST))])
    undecided = NewGeneration(4, (Suspected(2, "exit", "it has ended"),))
    made.restore([decision(2, (1,)), decision(3, (0,))], undecided, 9.0)
    assert [entry[0] for entry in log.told] == ["new_generation", "decided", "resumed", "new_generation"]
    assert log.told[0][1] == NewGeneration(3, (Suspected(0, "exit", "it has ended"),))
    assert log.told[3][1] == undecided
    assert said == [], "nothing is shown before a step has been committed"


def test_a_successor_takes_over_joins_and_leaves_that_have_no_entry_yet():
    entered = (msgspec.structs.replace(LOST, kind=kind, worker=worker) for kind, worker in (("joined", 3), ("lost", 4)))
    made, log, _ = reports(records=[Entered(event=Recovered(recovery=recovery)) for recovery in entered])
    made.restore([decision(2, (), joined=(3,)), decision(3, (), joined=(4,)), decision(4, (), left=(3,))], None, 9.0)
    assert [entry[1] for entry in log.told if entry[0] == "new_generation"] == [
        NewGeneration(3, (), (4,), ()),
        NewGeneration(4, (), (), (3,)),
    ]


def test_a_coordinators_end_is_told_once():
    made, _, said = reports(ends_s=(4.0,))
    made.coordinator_found(4.5, 1)
    assert said == [
        "entered coordinator",
        "the coordinator was lost in step 1: a new one took over after 500 ms, training went on meanwhile",
    ]
    made.coordinator_found(5.0, 1)
    assert len(said) == 2
