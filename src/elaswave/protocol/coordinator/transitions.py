"""How a job goes on when a worker is lost: the theory of the coordinator, and the table that drives it.

A step is committed by the vote of its workers, without a coordinator (`elaswave.protocol.step.loop`). The coordinator
decides who takes part, and from which step those go on. It must not be wrong about the one question that a loss opens:
did the vote pass that was under way? Two survivors that answered it differently would never hold the same state again.

**From a loss to the next step.**

1. A detector suspects a worker. The coordinator persists a **new generation** without it and asks the members to
   report.
2. A member first moves its data plane to the new generation, and only then answers. The answer is a **promise**: until
   the decision, the member learns nothing of the old generation, begins nothing and discards nothing.
3. When all members have reported, the newest evidence among them (the coordinator's own log counts) says which step is
   committed, and the valid copies say which blocks have a holder left. The coordinator asks its planner how the members
   go on (**`PlanRecovery`**), and waits.
4. With the answer it **decides**: it persists the decision and sends it.
5. A member catches up (applies what is still old), takes its roles, gets the parameters it lacks, and goes on.

Another loss at any of these moments begins another new generation, at 1.

**Why the answer is right.** *Evidence* is a complete certificate. If any member's report has it, the step is committed,
and all members can apply it, since a vote that passed proves that they were prepared. If no report has it, no member
will ever have it: each has promised to learn nothing more of the old generation, and its links do not take frames of it
any more. A suspected worker may have it, and may even be alive. Until the decision its word for a vote still counts
(P2); from then on nobody takes a frame or a message of it, and what it has made of the certificate is worth nothing. So
a suspicion may be false: that costs a worker, and never a wrong state. What the coordinator has heard itself counts
like a report: a loss that was published must stay published.

**Why a coordinator may be lost.** Of a generation there are two records, `NewGenerationRecord` and `Decision`, and
nothing is sent of either before it is durable (`Persist` stands before `Send` in every row). A successor reads them and
stands where the last one stood. After the first record it asks again, and gets the same answers, because answers are
promises. After the second it sends the same decision to whoever lacks it, in its own term; members ignore older terms.
What a coordinator knows without a record (addresses, joiners, who has paused) is said again by those that know it.

**Where no copy of a block is left**, or the policy is to restart, all go back to the newest checkpoint that can be
trusted: the decision says so, and a member that has missed an earlier return is sent back once more before any vote of
its counts.

**Planning.** A planner may be slow, so it runs outside of the state machine: the product calls a quick one in the same
turn and a slow one in a thread. Each question has a **sequence** number, which the answer carries.

- P1. A loss while a recovery is planned begins a new generation. Once all members have reported, the coordinator asks
  the planner again, with a larger sequence.
- P2. The coordinator also asks again when it learns of a newer vote: the committed step may be another one.
- P3. An answer counts only if it carries the newest sequence.
- P4. A planner that fails, or has not answered within its bound (10 s), is replaced by the layout in which survivors
  keep their stages and micro-batches.
- P5. The decision says which work of the committed step is still to be done (an evaluation, a checkpoint), as known
  when the answer arrives.
- P6. A coordinator that takes over asks the members for their reports, and then the planner, again.
- P7. Until the decision all members wait for the coordinator: none is suspected for standing still.
- P8. Losses until the decision are one event: one decision answers them all, and it counts once against
  `elastic.max_failures_per_hour`.

**The table.** `TRANSITIONS` drives the machine (`elaswave.protocol.coordinator.machine`): it determines what has
happened, looks up the row of its state, takes the next state and carries out the responses in their order. It can do
nothing that is not in the table.
"""

from enum import Enum

from elaswave.protocol.coordinator.table import Transition, TransitionTable


class CoordinatorState(Enum):
    """What the coordinator is waiting for."""

    STARTING = "starting"
    TRAINING = "training"
    COLLECTING = "collecting"
    PLANNING = "planning"
    ROLLING_BACK = "rolling back"
    ENDED = "ended"


class Cause(Enum):
    """What has happened."""

    BEGUN = "this coordinator begins"
    NO_MEMBER = "a worker that is no member registers or reports"
    REGISTERED = "every worker has registered"
    START_IN_DOUBT = "a member registers, and the start may not have reached it"
    NOT_ASKED = "a member registers that has not reported"
    DECISION_MISSED = "a member registers that lacks the decision"
    CHANGE_IN_DOUBT = "a member registers, and a planned change may not have reached it"
    CHANGE_PLANNED = "a better layout is planned"
    SUSPECTED = "a member is suspected"
    UNSOUND = "a member says that copies of the state are wrong"
    LEAVE_WANTED = "a member is asked to leave"
    CALLED = "there are other joiners than before"
    CALL_IN_DOUBT = "a member registers, and may not have heard which joiners there are"
    PAUSE_IN_DOUBT = "a member registers, and may not have heard that it is to ask for a pause"
    MEMBERSHIP_READY = "a joiner's links stand, or a member that is to leave holds nothing"
    ALL_PAUSED = "every member waits at the boundary"
    PAUSED_IN_VAIN = "members wait, or were asked to, and the membership stays as it is"
    ROLLBACK_MISSED = "every member has reported, and one has missed an earlier return to a checkpoint"
    NO_COPY_LEFT = "every member has reported, and a block has no copy left"
    RESTART_POLICY = "every member has reported, and the policy is to restart"
    REPORTED = "every member has reported"
    NEWER_EVIDENCE = "a newer vote is reported"
    FOUND = "a checkpoint is found"
    PLANNED = "the recovery is planned"
    PLANNER_FAILED = "the planner fails or exceeds its bound"
    INSTALLED = "every member has installed the decision"
    TOO_MANY_LOSSES = "workers are lost more often within an hour than the job allows"
    TOO_FEW_LEFT = "fewer workers are left than the job needs"
    ERROR_REPEATED = "the same error of its own ends a second worker"
    ERROR_COMMON = "a worker ends with an error that a vote has shown to all"
    LAST_FAILED = "an error of its own ends a worker that cannot be spared"
    NO_CHECKPOINT = "no checkpoint is found"


class Response(Enum):
    """What the coordinator does about it."""

    PERSIST_TERM = "persist the term"
    DISMISS = "fence it off, or let it go once more if it was asked to leave"
    PERSIST_START = "persist the start"
    TELL_ADDRESSES = "tell the addresses"
    TELL_UNTOLD_ADDRESSES = "tell the addresses if they are still to be told"
    ASK_AGAIN = "ask it again"
    SEND_DECISION_AGAIN = "send it the decision again"
    SEND_CHANGE_AGAIN = "send it the change again"
    PERSIST_CHANGE = "persist the change"
    SEND_CHANGE = "send the change"
    PERSIST_LEAVE = "persist the request"
    CALL = "tell members and joiners each other's addresses"
    CALL_AGAIN = "tell it and the joiners each other's addresses"
    ASK_PAUSE = "have the members ask for a pause"
    ASK_PAUSE_AGAIN = "have it ask for a pause"
    LET_GO_ON = "let the members go on"
    RELEASE = "let those go that leave"
    PERSIST_GENERATION = "persist the new generation"
    ASK = "ask the members"
    FENCE_OFF = "fence the others off"
    SHOW_GENERATION = "show the losses"
    FIND_CHECKPOINT = "look for a checkpoint"
    PLAN = "plan the recovery"
    PERSIST_DECISION = "persist the decision"
    SEND_DECISION = "send the decision"
    SHOW_DECISION = "show the decision"
    SHOW_RESUMED = "show that training goes on"
    END = "end the job with the reason"


_ALIVE = (
    CoordinatorState.STARTING,
    CoordinatorState.TRAINING,
    CoordinatorState.COLLECTING,
    CoordinatorState.PLANNING,
    CoordinatorState.ROLLING_BACK,
)
_BEGUN = (
    CoordinatorState.TRAINING,
    CoordinatorState.COLLECTING,
    CoordinatorState.PLANNING,
    CoordinatorState.ROLLING_BACK,
)
_REPORTED = (CoordinatorState.COLLECTING, CoordinatorState.PLANNING)
_DECIDE = (Response.PERSIST_DECISION, Response.SEND_DECISION, Response.SHOW_DECISION)
_NEW_GENERATION = (
    Response.PERSIST_GENERATION,
    Response.TELL_UNTOLD_ADDRESSES,
    Response.ASK,
    Response.FENCE_OFF,
    Response.SHOW_GENERATION,
)
TRANSITIONS: TransitionTable[CoordinatorState, Cause, Response] = TransitionTable(
    CoordinatorState.STARTING,
    Transition((CoordinatorState.STARTING, CoordinatorState.TRAINING), Cause.BEGUN, None, (Response.PERSIST_TERM,)),
    Transition((CoordinatorState.COLLECTING,), Cause.BEGUN, None, (Response.PERSIST_TERM, Response.ASK)),
    Transition(
        (CoordinatorState.STARTING,),
        Cause.REGISTERED,
        CoordinatorState.TRAINING,
        (Response.PERSIST_START, Response.TELL_ADDRESSES),
    ),
    Transition(_BEGUN, Cause.START_IN_DOUBT, None, (Response.TELL_ADDRESSES,)),
    Transition((CoordinatorState.COLLECTING,), Cause.NOT_ASKED, None, (Response.ASK_AGAIN,)),
    Transition(
        (CoordinatorState.TRAINING,), Cause.DECISION_MISSED, None, (Response.ASK_AGAIN, Response.SEND_DECISION_AGAIN)
    ),
    Transition((CoordinatorState.TRAINING,), Cause.CHANGE_IN_DOUBT, None, (Response.SEND_CHANGE_AGAIN,)),
    Transition(_ALIVE, Cause.NO_MEMBER, None, (Response.DISMISS,)),
    Transition(
        (CoordinatorState.TRAINING,), Cause.CHANGE_PLANNED, None, (Response.PERSIST_CHANGE, Response.SEND_CHANGE)
    ),
    Transition(_ALIVE, Cause.SUSPECTED, CoordinatorState.COLLECTING, _NEW_GENERATION),
    Transition(
        (CoordinatorState.TRAINING,),
        Cause.UNSOUND,
        CoordinatorState.COLLECTING,
        (Response.PERSIST_GENERATION, Response.ASK, Response.SHOW_GENERATION),
    ),
    Transition(_ALIVE, Cause.LEAVE_WANTED, None, (Response.PERSIST_LEAVE,)),
    Transition((CoordinatorState.TRAINING,), Cause.CALLED, None, (Response.CALL,)),
    Transition((CoordinatorState.TRAINING,), Cause.CALL_IN_DOUBT, None, (Response.CALL_AGAIN,)),
    Transition((CoordinatorState.TRAINING,), Cause.PAUSE_IN_DOUBT, None, (Response.ASK_PAUSE_AGAIN,)),
    Transition((CoordinatorState.TRAINING,), Cause.MEMBERSHIP_READY, None, (Response.ASK_PAUSE,)),
    Transition(
        (CoordinatorState.TRAINING,),
        Cause.ALL_PAUSED,
        CoordinatorState.COLLECTING,
        (Response.PERSIST_GENERATION, Response.ASK, Response.RELEASE, Response.SHOW_GENERATION),
    ),
    Transition((CoordinatorState.TRAINING,), Cause.PAUSED_IN_VAIN, None, (Response.LET_GO_ON,)),
    Transition((CoordinatorState.COLLECTING,), Cause.REPORTED, CoordinatorState.PLANNING, (Response.PLAN,)),
    Transition(
        (CoordinatorState.COLLECTING,),
        Cause.ROLLBACK_MISSED,
        CoordinatorState.ROLLING_BACK,
        (Response.FIND_CHECKPOINT,),
    ),
    Transition(_REPORTED, Cause.NO_COPY_LEFT, CoordinatorState.ROLLING_BACK, (Response.FIND_CHECKPOINT,)),
    Transition(
        (CoordinatorState.COLLECTING,), Cause.RESTART_POLICY, CoordinatorState.ROLLING_BACK, (Response.FIND_CHECKPOINT,)
    ),
    Transition((CoordinatorState.ROLLING_BACK,), Cause.FOUND, CoordinatorState.PLANNING, (Response.PLAN,)),
    Transition((CoordinatorState.PLANNING,), Cause.NEWER_EVIDENCE, CoordinatorState.PLANNING, (Response.PLAN,)),
    Transition((CoordinatorState.PLANNING,), Cause.PLANNED, CoordinatorState.TRAINING, _DECIDE),
    Transition((CoordinatorState.PLANNING,), Cause.PLANNER_FAILED, CoordinatorState.TRAINING, _DECIDE),
    Transition((CoordinatorState.TRAINING,), Cause.INSTALLED, None, (Response.CALL, Response.SHOW_RESUMED)),
    Transition(_ALIVE, Cause.TOO_MANY_LOSSES, CoordinatorState.ENDED, (Response.END,)),
    Transition(_ALIVE, Cause.TOO_FEW_LEFT, CoordinatorState.ENDED, (Response.END,)),
    Transition(_ALIVE, Cause.ERROR_REPEATED, CoordinatorState.ENDED, (Response.END,)),
    Transition(_ALIVE, Cause.ERROR_COMMON, CoordinatorState.ENDED, (Response.END,)),
    Transition(_ALIVE, Cause.LAST_FAILED, CoordinatorState.ENDED, (Response.END,)),
    Transition((CoordinatorState.ROLLING_BACK,), Cause.NO_CHECKPOINT, CoordinatorState.ENDED, (Response.END,)),
)
"""All that the machine can do. A coordinator that is started again begins in the state that its newest record tells:
TRAINING after a start or a decision, COLLECTING after a new generation. After the end every event is ignored."""
