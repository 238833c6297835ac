"""What every driver of the coordinator's machine does with effects."""

from tests.protocol.machines import FIVE, registered, report, started, suspicion, vote

from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.protocol.coordinator.decisions import MemberEnd, plan_survivors
from elaswave.protocol.coordinator.driver import CoordinatorDriver
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import PendingWork, PlanRecovery
from verify.simulator.job import model_of


class WritingDriver(CoordinatorDriver):
    """Writes down what it is asked to do; its planner answers when the test lets it."""

    def __init__(self) -> None:
        self.core = started(FIVE, Coordinator)
        self.done: list[str] = []
        self.question: PlanRecovery | None = None
        self.pending_asked: list[tuple[int, bool]] = []
        self.ended: dict[int, MemberEnd] = {}
        self.published = 0
        self.committing = False

    def now_s(self):
        return 0.0

    def persist(self, record):
        self.done.append(f"persist {type(record).__name__}")

    def send(self, worker, message):
        self.done.append(f"send {type(message).__name__} to {worker}")

    def tell_addresses(self, addresses):
        self.done.append(f"tell {len(addresses)} addresses")

    def find_checkpoint(self, question):
        self.done.append("find a checkpoint")

    def plan_recovery(self, question):
        self.done.append(f"plan {question.sequence}")
        self.question = question

    def pending_work(self, step, asked):
        self.pending_asked.append((step, asked))
        return PendingWork(evaluate=True, checkpoint=asked, published=step)

    def ends(self):
        return self.ended

    def published_step(self):
        return self.published

    def give_up_missing_parts(self):
        self.done.append("give up what is missing")

    def is_committing(self):
        return self.committing

    def on_finished(self):
        self.done.append("finish")

    def on_new_generation(self, effect):
        self.done.append(f"show generation {effect.generation}")

    def on_decided(self, effect):
        self.done.append(f"show decision {effect.decision.generation}")

    def on_resumed(self, effect):
        self.done.append(f"show that generation {effect.generation} goes on")

    def on_end(self, effect):
        self.done.append("end")

    def note(self, effect):
        self.done.append("note")


def planning(**options) -> WritingDriver:
    driver = WritingDriver()
    driver.feed(suspicion(1))
    for worker in driver.core.members:
        driver.feed(report(worker, 2, job=FIVE, **options))
    assert driver.core.state is CoordinatorState.PLANNING
    driver.done.clear()
    return driver


def test_effects_are_carried_out_in_their_order():
    driver = WritingDriver()
    driver.feed(registered(0))
    driver.feed(suspicion(1))
    for worker in driver.core.members:
        driver.feed(report(worker, 2, job=FIVE))
    assert driver.done == [
        "tell 5 addresses",
        "persist NewGenerationRecord",
        *(f"send Prepare to {worker}" for worker in (0, 2, 3, 4)),
        "send FencedOff to 1",
        "show generation 2",
        "plan 1",
    ]


def test_an_answer_brings_the_work_that_is_pending_when_it_comes():
    driver = planning(evidence=vote(2, checkpoint=2), step=3)
    assert driver.question is not None
    assert not driver.pending_asked, "a checkpoint may become durable while the planner is busy"
    driver.answer_plan(driver.question, plan_survivors(driver.question, model_of(FIVE).blocks, scatter_width=EVERYBODY))
    assert driver.pending_asked == [(2, True)]
    assert driver.core.decision is not None and driver.core.decision.checkpoint and driver.core.decision.evaluate
    assert driver.done[0] == "persist Decision" and driver.done[-1] == "show decision 2"


def test_without_a_request_no_checkpoint_is_asked_for():
    driver = planning(evidence=vote(2, checkpoint=1), step=3)
    assert driver.question is not None
    driver.answer_plan(driver.question, plan_survivors(driver.question, model_of(FIVE).blocks, scatter_width=EVERYBODY))
    assert driver.pending_asked == [(2, False)]


def test_a_planner_that_fails_is_answered_for():
    driver = planning()
    assert driver.question is not None
    driver.answer_plan(driver.question, "no recovery is planned within 10 s")
    assert driver.core.state is CoordinatorState.TRAINING
    assert driver.core.decision is not None
    assert driver.core.decision.plan == "no recovery is planned within 10 s: survivors keep their stages"


def test_other_effects():
    driver = planning()
    driver.feed(suspicion(9))
    assert driver.done == ["note"]
    for worker in (2, 3, 4, 0):
        driver.feed(suspicion(worker))
    assert driver.done[-1] == "end"


def test_the_job_ends_when_every_member_has_ended_in_this_generation_and_nothing_is_being_committed():
    driver = WritingDriver()
    driver.done.clear()
    driver.published = 3

    def ends() -> list[str]:
        driver.done.clear()
        driver.end_if_finished()
        return driver.done

    driver.ended = {worker: MemberEnd(generation=1, step=3) for worker in (0, 1, 2, 3)}
    assert ends() == [], "worker 4 still trains"
    driver.ended[4] = MemberEnd(generation=1, step=3)
    driver.published = 2
    assert ends() == [], "the loss of the last step is not known"
    driver.published, driver.committing = 3, True
    assert ends() == ["give up what is missing"], "a checkpoint would be lost"
    driver.committing = False
    assert ends() == ["give up what is missing", "finish"]
    driver.feed(suspicion(1))
    assert ends() == [], "members may still be asked for what they hold"
    for worker in (0, 2, 3, 4):
        driver.feed(report(worker, 2, job=FIVE))
    assert driver.question is not None
    driver.answer_plan(driver.question, plan_survivors(driver.question, model_of(FIVE).blocks, scatter_width=EVERYBODY))
    assert ends() == [], "the ends are of an older generation"
    driver.ended = {worker: MemberEnd(generation=2, step=3) for worker in (0, 2, 3, 4)}
    assert ends() == ["give up what is missing", "finish"]


def test_an_excluded_workers_vote_counts_until_the_decision_and_nothing_else_of_it():
    driver = planning(prepared=True)
    assert driver.question is not None and driver.question.base == 0
    assert driver.hears(0) and driver.done == []
    assert not driver.hears(1)
    assert driver.done == ["send FencedOff to 1"]
    driver.done.clear()
    assert not driver.hears_vote(1, vote(1), 1), "its step is not published"
    assert driver.done == ["plan 2", "send FencedOff to 1"]
    assert driver.question.base == 1, "it is committed: every member is prepared"
    driver.answer_plan(driver.question, plan_survivors(driver.question, model_of(FIVE).blocks, scatter_width=EVERYBODY))
    driver.done.clear()
    driver.hears_vote(1, vote(2), 1)
    assert driver.done == ["note", "send FencedOff to 1"]


def test_losses_that_come_together_begin_one_generation():
    driver = WritingDriver()
    driver.suspect([suspicion(1), suspicion(4)])
    assert driver.core.members == (0, 2, 3) and driver.core.generation == 2
