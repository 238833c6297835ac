"""Strikes from outside: drawn the same everywhere, carried out on the very processes that are meant, judged right."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.chaos.test_cases import recovery, result

from elaswave.observability.processes import process_entry, write_processes
from verify.chaos.cases import ChaosCase, Ending
from verify.chaos.external_faults import ExternalFaults
from verify.chaos.outside import (
    COMMITTER,
    COORDINATOR,
    FORKSERVER,
    MOMENTS,
    NUM_STEPS,
    Strike,
    Struck,
    draw_outside,
    judge_outside,
    parse_strike,
)

CASES = [draw_outside(seed, index) for seed in (0, 1, 99) for index in range(60)]
STRIKES = [parse_strike(strike) for case in CASES for strike in case.strikes]


def test_drawing_is_a_function_of_seed_and_index() -> None:
    assert CASES == [draw_outside(case.seed, case.index) for case in CASES]
    assert CASES[7].replay == "python -m verify chaos --outside --seed 0 --only 7"
    assert not any(case.faults for case in CASES)
    assert all(case.settings["run.steps"] == case.reference["run.steps"] == NUM_STEPS for case in CASES)
    assert all(case.reference["layout.widths"] == [1] and case.settings["run.checkpoint_every"] for case in CASES)


def test_strikes_are_varied_and_leave_somebody() -> None:
    assert [str(strike) for strike in STRIKES] == [strike for case in CASES for strike in case.strikes]
    for key, least in ((lambda s: s.action, 60), (lambda s: s.moment, 30)):
        assert min(Counter(map(key, STRIKES)).values()) > least
    assert {strike.moment for strike in STRIKES} == set(MOMENTS)
    both = [strike for strike in STRIKES if COORDINATOR in strike.victims and strike.workers]
    assert len(both) > 20
    for case in CASES:
        struck = {worker for text in case.strikes for worker in parse_strike(text).workers}
        assert len(struck) < sum(case.config.widths)


def test_committer_and_template_are_struck_too_and_never_stopped_for_good() -> None:
    for victim, least in ((COMMITTER, 40), (FORKSERVER, 10)):
        strikes = [strike for strike in STRIKES if victim in strike.victims]
        assert len(strikes) >= least and {strike.action for strike in strikes} == {"kill", "stop"}
        assert all(strike.victims == (victim,) and not strike.workers for strike in strikes)
        assert all(strike.resume_ms is not None for strike in strikes if strike.action == "stop")


@pytest.mark.parametrize("text", ["kill:3", "kill:3@lunch+1ms", "poke:1@start+5ms", "stop:1@start+5ms~ms"])
def test_what_is_no_strike(text: str) -> None:
    with pytest.raises(ValueError, match="is no strike: write action:victims@moment"):
        parse_strike(text)


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_a_strike_waits_for_its_moment_and_its_victim(tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]) -> None:
    worker, coordinator = sleepers
    stop = Strike("stop", ("1",), "start", 0, 0, 1)
    kill = Strike("kill", (COORDINATOR, "1"), "evaluation", 4, 0, None)
    never = Strike("kill", ("2",), "step", 3, 0, None)
    external_faults = ExternalFaults(tmp_path, [kill, stop, never])
    external_faults()
    assert external_faults.struck == [], "there is no run yet"
    write_processes(tmp_path, [process_entry("worker", 1, worker.pid)])
    external_faults()
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
    assert [each.victim for each in external_faults.struck] == ["1"]
    while external_faults._resume:
        time.sleep(external_faults())
    os.waitid(os.P_PID, worker.pid, os.WCONTINUED)
    log = tmp_path / "events.jsonl"
    log.write_bytes(b'{"kind":"step","time":"","elapsed_s":1.0,"step":3}\n{"kind":"step","ti')
    external_faults()
    assert len(external_faults.struck) == 1, "half a line says nothing, and worker 2 is not there"
    write_processes(
        tmp_path, [process_entry("worker", 1, worker.pid), process_entry("coordinator", 1, coordinator.pid)]
    )
    log.write_bytes(log.read_bytes() + b'me":"","elapsed_s":1.0,"step":4}\n')
    external_faults()
    assert {each.victim for each in external_faults.struck[1:]} == {"1", COORDINATOR}
    assert [strike for _, strike in external_faults._due] == [never]
    for process in sleepers:
        assert process.wait(60) == -signal.SIGKILL
    assert external_faults.left == []


CASE: ChaosCase = msgspec.structs.replace(
    CASES[0], settings={**CASES[0].settings, "layout.widths": [2, 2], "elastic.num_followers": 1}
)
GOOD_RESULT = result(steps=NUM_STEPS, losses=[1.0] * NUM_STEPS)
REFERENCE = Ending(result=GOOD_RESULT, digests={"a": "1"}, checkpoint_step=NUM_STEPS)
WELL = msgspec.structs.replace(REFERENCE, exit_code=0)
LOST = "all copies of 3 blocks (1, 2, 3) were lost with workers [0, 1], and there is no valid durable checkpoint"

GONE = (
    "the forkserver, from which the workers are forked, was killed by SIGKILL, and all workers have ended with "
    "it (see run/logs/forkserver.log); its newest checkpoint is of step 8, to go on from there: elaswave train --resume"
)
EARLY = (
    "the forkserver, from which workers are forked, cannot load torch and the model: it was killed by SIGKILL; "
    "see run/logs/forkserver.log"
)


def hits(*victims: str, strike: str = "kill:0@start+1ms") -> list[Struck]:
    return [Struck(strike=strike, victim=victim, after_s=1.0) for victim in victims]


@pytest.mark.parametrize(
    ("ending", "struck", "outcome", "detail"),
    [
        (WELL, hits("0"), "same bits", ""),
        (msgspec.structs.replace(WELL, recoveries=[recovery(2)]), hits("0"), "same bits", "lost without a signal: [2]"),
        (Ending(hung_s=9.0), [], "hung", "not over after 9 s"),
        (msgspec.structs.replace(WELL, left_behind=["process 7 (S)"]), [], "left behind", "process 7"),
        (msgspec.structs.replace(WELL, bad_checkpoints=["step 4: no manifest"]), [], "error", "said were complete"),
        (msgspec.structs.replace(WELL, checkpoint_step=32), [], "error", "newest valid checkpoint is of step 32"),
        (msgspec.structs.replace(WELL, digests={"a": "2"}), [], "different", "of single tensors"),
        (msgspec.structs.replace(WELL, exit_code=1), [], "error", "exit code 1 with a result"),
        (msgspec.structs.replace(WELL, result=None), [], "error", "exit code 0 with no result"),
        (Ending(exit_code=-9, error="x"), [], "error", "exit code -9"),
        (Ending(exit_code=1, error="a traceback was shown: KeyError: 3"), hits("0"), "error", "KeyError"),
        (Ending(exit_code=1, error=LOST), hits("0", "1"), "blocks lost", "all copies"),
        (Ending(exit_code=1, error=LOST), hits("2", "3"), "error", "names none of the workers"),
        (Ending(exit_code=1, error=LOST), hits("0", COORDINATOR), "unexplained loss", "1 workers were struck"),
        (Ending(exit_code=1, error=LOST), hits("0", "1", strike="stop:0@start+1ms~50ms"), "unexplained loss", "0 work"),
        (Ending(exit_code=1, error=LOST, num_checkpoints=2), hits("0", "1"), "unexplained loss", "2 checkpoints"),
        (WELL, hits(FORKSERVER, COMMITTER), "same bits", ""),
        (Ending(exit_code=1, error=GONE), hits("0", FORKSERVER), "forkserver lost", "was killed by SIGKILL"),
        (Ending(exit_code=1, error=GONE), hits("0", COMMITTER), "error", "the forkserver was not killed"),
        (Ending(exit_code=1, error=GONE), hits(FORKSERVER, strike="stop:template@start+1ms~50ms"), "error",
        "not killed"),
        (Ending(exit_code=1, error=GONE.replace("--resume", "")), hits(FORKSERVER), "error", "says no way on"),
        (Ending(exit_code=1, error=GONE.replace("SIGKILL", "x")), hits(FORKSERVER), "error", "how the forkserver"),
        (Ending(exit_code=1, error=EARLY), hits(FORKSERVER), "forkserver lost", "cannot load torch"),
        (Ending(exit_code=1, error=LOST), hits("0", FORKSERVER), "unexplained loss", "1 workers were struck"),
    ],
)  # fmt: skip
def test_endings_are_judged(ending: Ending, struck: list[Struck], outcome: str, detail: str) -> None:
    verdict = judge_outside(CASE, ending, REFERENCE, struck)
    assert verdict.outcome == outcome
    assert detail in verdict.detail
