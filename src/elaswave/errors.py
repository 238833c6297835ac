"""Every exception that elaswave raises on purpose.

ElaswaveError
├── UsageError                 bad input from a person: exit code 2
│   ├── ConfigError            a configuration with one or more violated rules, all of them listed
│   ├── DataError              a data file that is missing, too short or holds impossible tokens
│   ├── OptimizerError         an optimizer, or a scheduler of it, that cannot work on blocks: names it and the tensor
│   └── RunFolderError         a run folder that cannot be written, or holds another run
├── InfeasiblePlan             no plan keeps to the limits: names the violated limit and by how much
├── InvalidProgramError        a program that is incomplete, deadlocks or needs too much memory
├── CommError
│   ├── AuthenticationError    the other side does not hold the job's key
│   ├── FrameError             malformed, oversized or unexpected bytes on a link
│   ├── PeerLostError          the connection to a peer has ended
│   ├── InterruptedWaitError   a wait was woken on purpose (a new generation, the end of the job)
│   ├── WaitTimeoutError       a bounded wait has run out
│   ├── BacklogError           more is waiting to be acknowledged than may be kept
│   └── ProbeError             a link between two sites that cannot be measured
├── ForeignError               a foreign part's server that is late, has ended, or answers what it must not
│   └── ForeignPartError       what the code of a foreign part has raised there
├── DeviceError                a device that is not there, or cannot be used
├── FrequencyError             a device whose speed cannot be set here
├── StoreError                 a coordinator's store that is damaged, held by another one, or cannot be written
│   ├── StoreGoneError         it does not answer: exit code 75
│   └── SupersededError        another coordinator has taken over: this one must end, and says nothing
│       └── DisplacedError     nobody has taken over, but this one may not write any more: the next one claims anew
├── StateError                 blocks, sums or placements that contradict each other
├── CheckpointError            a checkpoint that is damaged, half-written or of another model
├── VoteError                  a step that cannot be committed; says which part of the certificate failed
│   ├── NonFiniteError         a loss or gradient that is not finite: names step, micro-batch and layer
│   └── UnequalBufferError     a buffer of whole numbers in which the micro-batches of a step do not agree
├── SpotCheckError             a layer or the loss that gives other bits when it is run again, later than at the start
├── WorkerError                a worker ended with an error: names worker, step, micro-batch and layer
├── ControlError               a running job cannot be talked to, or refuses what it was asked for
├── LaunchError                the system refuses a process or a folder that a job needs
├── RecoveryError              too much was lost to go on; says what
├── RetryError                 this agent's part has ended, and another one may take it: exit code 75
├── FencedOffError                a worker that was declared lost has learned of it
└── StoppedBySignalError       the job was asked to end: exit code 128 + signal
EndedBySignal                  no error: a signal that unwinds a command, as KeyboardInterrupt does
"""

from collections.abc import Sequence

from elaswave.visible import visible


class ElaswaveError(Exception):
    """Base of all of elaswave's own errors. Names and words of others in its message are visible, also in a traceback
    that Python shows."""

    def __str__(self) -> str:
        return visible(super().__str__())


class UsageError(ElaswaveError):
    """Bad input from a person. The message says what was seen, what was needed and what to do."""


class ConfigError(UsageError):
    """A configuration that breaks one or more rules.

    Args:
        problems: every problem found, one line each, such as ``"batch.num_microbatches: 0 is below 1"``.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(UsageError):
    """A data source that is missing, too short, or holds tokens outside the vocabulary."""


class OptimizerError(UsageError):
    """An optimizer that is not elementwise or lacks a parameter, or a scheduler that cannot be kept."""


class RunFolderError(UsageError):
    """A run folder that cannot be written, or that already holds a run."""


class InfeasiblePlan(ElaswaveError):
    """No plan keeps to the limits of memory, power or workers. The message names the limit and by how much it fails."""


class InvalidProgramError(ElaswaveError):
    """A program that is incomplete, would deadlock, or exceeds its memory bound."""


class CommError(ElaswaveError):
    """Base of everything that can go wrong between two workers."""


class AuthenticationError(CommError):
    """The other side of a connection does not hold the key of this job."""


class FrameError(CommError):
    """Bytes on a link that are malformed, too long, or do not fit the receive that waits for them."""


class PeerLostError(CommError):
    """The connection to a peer has ended.

    Args:
        worker: id of the peer.
        detail: what was seen on the connection.
    """

    def __init__(self, worker: int, detail: str) -> None:
        self.worker = worker
        super().__init__(f"lost the connection to worker {worker}: {detail}")


class InterruptedWaitError(CommError):
    """A wait that was woken on purpose before it had what it waited for."""


class WaitTimeoutError(CommError):
    """A bounded wait that has run out. The message names what was waited for."""


class BacklogError(CommError):
    """More messages wait for the coordinator's acknowledgement than may be kept."""


class ProbeError(CommError):
    """A link between two sites that cannot be measured: nobody answers there, or not in time."""


class ForeignError(ElaswaveError):
    """The server of a foreign part is late, has ended, or answers what it must not. It is its worker's loss."""


class ForeignPartError(ForeignError):
    """The code of a foreign part has raised an exception, in its server."""


class DeviceError(ElaswaveError):
    """The device that a worker is to compute on is not there or cannot be used. The message says what was seen."""


class FrequencyError(ElaswaveError):
    """The speed of a device cannot be set here: no controller, no right, no library or no device."""


class StoreError(ElaswaveError):
    """A coordinator's store that is damaged, held by another coordinator, or cannot be written."""


class StoreGoneError(StoreError):
    """A coordinator's store that has not answered for as long as may be waited: the job may be begun again later."""


class SupersededError(StoreError):
    """Another coordinator has taken over: this one must end, and has no right to say anything to anybody."""


class DisplacedError(SupersededError):
    """What a coordinator holds of its store was changed by nobody who has followed it. It ends and says nothing, and
    another one claims the job anew."""


class StateError(ElaswaveError):
    """Blocks, sums or placements that contradict each other."""


class CheckpointError(ElaswaveError):
    """A checkpoint that is damaged, half-written, or belongs to another model."""


class VoteError(ElaswaveError):
    """A step whose certificate did not hold, so that it cannot be committed."""


class NonFiniteError(VoteError):
    """A loss or gradient that is not finite."""


class UnequalBufferError(VoteError):
    """A buffer of whole numbers in which the micro-batches of a step have left different values."""


class SpotCheckError(ElaswaveError):
    """What a worker computes has other bits when it is computed again. Nobody knows since when: what the worker has
    made of the step counts nowhere."""


class WorkerError(ElaswaveError):
    """A worker that has ended with an error; carries its own traceback as text.

    Args:
        worker: id of the worker.
        summary: one line: what happened, and at which step, micro-batch and layer.
        traceback_text: the worker's traceback, or "".
    """

    def __init__(self, worker: int, summary: str, traceback_text: str = "") -> None:
        self.worker = worker
        self.summary = summary
        self.traceback_text = traceback_text
        super().__init__(f"worker {worker}: {summary}")


class StoppedBySignalError(ElaswaveError):
    """The job was asked to end by a signal, and has ended.

    Args:
        signal_number: SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.
        detail: how far it came, and from which checkpoint it can go on.
    """

    def __init__(self, signal_number: int, detail: str) -> None:
        self.signal_number = signal_number
        super().__init__(detail)


class EndedBySignal(SystemExit):
    """A signal that ends a command unwinds it. It may come while a person's code runs, and is no mistake of that."""


SIGNALS = (KeyboardInterrupt, EndedBySignal, StoppedBySignalError)
"""What signals raise: ends whatever it meets as itself."""


class LaunchError(ElaswaveError):
    """The system refuses what a job is made of: a process, a folder. The message says what, and what to do."""


class ControlError(ElaswaveError):
    """`elaswave ctl`: no job runs there, it cannot be talked to, or what was asked for is not done. Says why."""


class FencedOffError(ElaswaveError):
    """This worker was declared lost; the others go on without it, and nothing that it does counts."""


class RetryError(ElaswaveError):
    """An agent has ended for a reason that another one, started later on the same host, may not meet: a coordinator or
    store that is not reached, too few hosts, a notice that its host is taken away."""


class NeedlessError(ElaswaveError):
    """An agent has nothing to do: its node has another one."""


class RecoveryError(ElaswaveError):
    """Too much was lost for the job to go on. The message says what, and what to do."""
