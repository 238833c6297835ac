"""Kills from outside: drawn jobs run as a person runs them, struck as a person strikes.

A case is a pure function of (seed, index), as in `verify.chaos.cases`; it differs from a fault inside a worker in
that no process of the job knows of it. A strike waits for a moment of the run that can be seen from outside (its
processes appear, a step is logged), then for some milliseconds, finds its victims in ``processes.json``, and sends them
a signal: one that kills, one that stops, or a notice upon which a worker leaves. What it hits in the end depends on the
machine, so a case that is run again is the same attempt, not the same run.

A job may end as one of `chaos` may: with its reference run's bits, or, where so many workers were struck that all
copies of a block can be gone, with an error that names what was lost. One whose forkserver was killed may end with an
error that says that, and how the run can go on. Processes are another module's (`trial`), and what befalls a job as a
whole is `weather`'s.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from elaswave.planning.costs.layers import num_copies
from verify.chaos.cases import (
    NUM_MODELS,
    ChaosCase,
    Draw,
    Ending,
    Judgement,
    compare_with_reference,
    draw_case,
    draw_model,
    reference_settings,
    without_cause,
)
from verify.chaos.weather import Weather, draw_weather, is_expected

NUM_STEPS = 40
MAX_STRIKES = 3
COORDINATOR, FORKSERVER, COMMITTER = "coordinator", "forkserver", "committer"
HARMLESS_MS = 1000
"""A stop shorter than this is none that may end a worker."""

Action = Literal["kill", "stop", "notify"]
Moment = Literal["start", "step", "evaluation", "checkpoint", "end"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "evaluation", "checkpoint", "end")


class Strike(NamedTuple):
    """A signal from outside, such as ``kill:3+coordinator@evaluation:8+12ms`` or ``stop:1@start+400ms~1500ms``."""

    action: Action
    victims: tuple[str, ...]
    """Ids of workers, or `COORDINATOR`, `FORKSERVER`, `COMMITTER`; struck in one go."""
    moment: Moment
    """start: when the processes are there; else when `step` is in the log, named after what follows it."""
    step: int
    delay_ms: int
    """After the moment."""
    resume_ms: int | None
    """Of a stop: when SIGCONT follows; None: never."""

    def __str__(self) -> str:
        when = self.moment if self.moment == "start" else f"{self.moment}:{self.step}"
        again = "" if self.resume_ms is None else f"~{self.resume_ms}ms"
        return f"{self.action}:{'+'.join(self.victims)}@{when}+{self.delay_ms}ms{again}"

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers among its victims."""
        return workers_of(self.victims)

    @property
    def may_end(self) -> bool:
        """Whether a worker that is struck may be lost by it."""
        return self.action != "stop" or self.resume_ms is None or self.resume_ms >= HARMLESS_MS


def workers_of(victims: Iterable[str]) -> tuple[int, ...]:
    """The workers among what was struck."""
    return tuple(int(victim) for victim in victims if victim.isdigit())


_STRIKE = re.compile(
    r"(?P<action>kill|stop|notify):(?P<victims>[a-z0-9+]+)@(?P<moment>[a-z]+)(:(?P<step>\d+))?\+(?P<delay>\d+)ms(~(?P<again>\d+)ms)?"
)


def parse_strike(text: str) -> Strike:
    """The inverse of ``str(strike)``.

    Raises:
        ValueError: it is none.
    """
    found = _STRIKE.fullmatch(text)
    if found is None or found["moment"] not in MOMENTS:
        raise ValueError(f"{text!r} is no strike: write action:victims@moment+delay, such as kill:3@evaluation:8+12ms")
    return Strike(
        action=found["action"],  # type: ignore[arg-type]
        victims=tuple(found["victims"].split("+")),
        moment=found["moment"],
        step=int(found["step"] or 0),
        delay_ms=int(found["delay"]),
        resume_ms=None if found["again"] is None else int(found["again"]),
    )


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A strike that has hit a process."""

    strike: str
    victim: str
    after_s: float
    """Seconds after the job's command was given."""


def draw_outside(seed: int, index: int) -> ChaosCase:
    """Draws a case: models and layouts as `draw_case` does, longer, with evaluations and checkpoints on.

    Args:
        seed: of the bench.
        index: of the case, from 0.
    """
    base = draw_case(seed, index)
    draw = Draw(seed, "outside", index)
    model = {**draw_model(seed, index % NUM_MODELS), "run.steps": NUM_STEPS, "run.eval_every": 4}
    settings = {**base.settings, **model, "run.checkpoint_every": draw.one_of((3, 5, 8))}
    every = settings["run.checkpoint_every"]
    strikes = [
        *_draw_strikes(draw, sum(base.config.widths), every),
        *_draw_helpers(Draw(seed, "helpers", index), every),
    ]
    return msgspec.structs.replace(
        base,
        settings=settings,
        faults=(),
        strikes=tuple(map(str, strikes)),
        weather=draw_weather(seed, index, NUM_STEPS),
        reference=reference_settings(model),
    )


def _draw_strikes(draw: Draw, num_workers: int, checkpoint_every: int) -> Iterator[Strike]:
    """Up to `MAX_STRIKES`; at least one worker is never struck."""
    left = list(range(num_workers))
    for _ in range(1 + draw.below(MAX_STRIKES)):
        victims = []
        if len(left) > 1 and not draw.chance(20):
            victims.append(str(left.pop(draw.below(len(left)))))
        if not victims or draw.chance(30):
            victims.append(COORDINATOR)
        moment = draw.one_of(MOMENTS)
        step, delay_ms = 0, draw.below(60)
        if moment == "start":
            delay_ms = draw.below(2500)
        elif moment == "step":
            step = 1 + draw.below(NUM_STEPS - 2)
        elif moment == "evaluation":
            step = 4 * (1 + draw.below(NUM_STEPS // 4))
        elif moment == "checkpoint":
            step = checkpoint_every * (1 + draw.below(NUM_STEPS // checkpoint_every))
        else:
            step = NUM_STEPS - draw.below(4)
        action: Action = draw.one_of(("kill", "kill", "kill", "stop", "stop", "notify", "notify"))
        resume_ms = draw.one_of((50, 300, 900, 2500, 7000, None)) if action == "stop" else None
        if COORDINATOR in victims and action == "stop" and resume_ms is None:
            resume_ms = 7000  # for good it costs a quarter of a minute each time, and is a kill then
        yield Strike(action, tuple(victims), moment, step, delay_ms, resume_ms)


def _draw_helpers(draw: Draw, checkpoint_every: int) -> Iterator[Strike]:
    """Strikes on the processes beside workers and coordinator: in two of five cases on a committer, in one of eight on
    the forkserver. None is stopped for good: a job waits ten minutes for a commit, and for ever for a forkserver that
    it does not need."""
    for victim, percent, deaths in ((COMMITTER, 40, 3), (FORKSERVER, 12, 1)):
        if not draw.chance(percent):
            continue
        action: Action = "kill" if draw.below(deaths + 1) < deaths else "stop"
        resume_ms = draw.one_of((50, 900, 2500, 7000)) if action == "stop" else None
        if victim == COMMITTER:  # it lives for some milliseconds, as soon as the parts are written
            step = checkpoint_every * (1 + draw.below(NUM_STEPS // checkpoint_every))
            yield Strike(action, (victim,), "checkpoint", step, 0, resume_ms)
        elif draw.chance(40):
            yield Strike(action, (victim,), "start", 0, draw.below(2500), resume_ms)
        else:
            yield Strike(action, (victim,), "step", 1 + draw.below(NUM_STEPS), draw.below(60), resume_ms)


def judge_outside(
    case: ChaosCase, ending: Ending, reference: Ending, struck: Sequence[Struck], weather: Weather | None = None
) -> Judgement:
    """Judges how a case has ended.

    Args:
        case: what was run.
        ending: how it ended.
        reference: how its reference run ended.
        struck: what has hit.
        weather: that has come.
    """
    if ending.hung_s is not None:
        return Judgement("hung", f"not over after {ending.hung_s:.0f} s")
    if ending.left_behind:
        return Judgement("left behind", "; ".join(ending.left_behind))
    if ending.bad_checkpoints:
        return Judgement("error", f"checkpoints that it said were complete: {'; '.join(ending.bad_checkpoints)}")
    if weather is not None and ending.result is None and is_expected(weather, ending):
        return Judgement("ended by weather", f"{weather}: {ending.error}")
    expected_code = 0 if ending.error is None else 1
    if ending.exit_code != expected_code or (ending.result is None) == (ending.error is None):
        what = "a result" if ending.result is not None else "no result"
        return Judgement("error", f"exit code {ending.exit_code} with {what} and the error {ending.error!r}")
    hit = {each.victim for each in struck if each.victim.isdigit() and parse_strike(each.strike).may_end}
    if ending.error is not None and _names_forkserver(ending.error):
        return _judge_forkserver(ending.error, struck)
    if ending.error is not None:
        return _judge_error(case, ending, hit)
    differs = compare_with_reference(ending, reference, NUM_STEPS)
    if differs is not None:
        return differs
    alarms = without_cause(ending, workers_of(each.victim for each in struck))
    return Judgement("same bits", f"held for lost without a signal: {alarms}" if alarms else "")


def _names_forkserver(error: str) -> bool:
    return error.startswith("the forkserver, from which")


def _judge_forkserver(error: str, struck: Sequence[Struck]) -> Judgement:
    """A forkserver that was killed takes the workers along; the job says so, and how the run can go on."""
    if not any(each.victim == FORKSERVER and parse_strike(each.strike).action == "kill" for each in struck):
        return Judgement("error", f"the forkserver was not killed: {error}")
    if "was killed by SIGKILL" not in error:
        return Judgement("error", f"the error does not say how the forkserver ended: {error}")
    # Before it had loaded the model there was nothing to go on with.
    if "--resume" not in error and "--overwrite" not in error and "cannot load torch and the model" not in error:
        return Judgement("error", f"the error says no way on: {error}")
    return Judgement("forkserver lost", error)


def _judge_error(case: ChaosCase, ending: Ending, hit: set[str]) -> Judgement:
    error = ending.error
    assert error is not None
    if "all copies of" not in error:
        return Judgement("error", error)
    copies = num_copies(case.config.elastic.planned_followers, sum(case.config.widths))
    if len(hit) < copies:
        return Judgement("unexplained loss", f"{len(hit)} workers were struck, a block has {copies} copies: {error}")
    if ending.num_checkpoints:
        return Judgement("unexplained loss", f"there were {ending.num_checkpoints} checkpoints to go back to: {error}")
    named = {worker for names in re.findall(r"workers? \[?([\d, ]+)", error) for worker in re.findall(r"\d+", names)}
    if not named & hit:
        return Judgement("error", f"the error names none of the workers {sorted(hit)} that were lost: {error}")
    return Judgement("blocks lost", error)
