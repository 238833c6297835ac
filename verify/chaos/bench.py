"""Runs drawn jobs one after the other against their reference runs, and keeps what a failing one has left."""

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from elaswave.faults.injection import parse_faults
from verify.chaos.cases import (
    GOOD,
    ChaosCase,
    Ending,
    Judgement,
    Outcome,
    config_of,
    false_alarms,
    judge,
    without_cause,
)
from verify.chaos.changing import draw_any
from verify.chaos.external_faults import ExternalFaults
from verify.chaos.growth import Growth, GrowthWatch
from verify.chaos.outside import Struck, draw_outside, judge_outside, parse_strike, workers_of
from verify.chaos.trial import RUN_FOLDER, placed, run_command, run_trial
from verify.chaos.weather import Sky, parse_weather


class ChaosRun(msgspec.Struct, frozen=True, kw_only=True):
    """One case and what became of it."""

    index: int
    outcome: Outcome
    detail: str
    layout: str
    model: str
    settings: dict[str, object]
    faults: tuple[str, ...]
    """Faults, or strikes from outside."""
    num_struck: int
    """Of them that have struck; one may wait for an action that its worker does not have."""
    struck: list[Struck] = []
    """What strikes from outside have hit."""
    num_recoveries: int
    num_false_alarms: int
    """Workers that were held for lost without a fault."""
    going_on_s: list[float]
    """Of every lost worker: seconds from the fault until all others computed again."""
    duration_s: float
    command: str
    """Trains the same job."""
    replay: str
    """Draws and judges the same case."""
    folder: str | None
    """What the job has left, if it was kept."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.outcome in GOOD

    @property
    def median_going_on_s(self) -> float | None:
        """The median of `going_on_s`."""
        return statistics.median(self.going_on_s) if self.going_on_s else None


def judge_growth(growth: Sequence[Growth], verdict: Judgement) -> Judgement:
    """The verdict on a job that has ended well, beside what its processes held as time went on."""
    large = [str(each) for each in growth if each.is_large]
    if large:
        return Judgement("grown", "; ".join(large))
    seen = f"no growth of {', '.join(each.name for each in growth)}" if growth else "too short to judge growth"
    return verdict._replace(detail="; ".join(filter(None, (verdict.detail, seen))))


class ChaosBench:
    """The cases of one seed.

    Args:
        seed: decides the cases.
        folder: for the jobs' folders; must exist.
        timeout_s: of each job.
        keep: also keep the folders of jobs that went well.
        outside: strike from outside, with signals, instead of injecting faults; the environment that the jobs'
            commands get.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        timeout_s: float,
        keep: bool = False,
        outside: Mapping[str, str] | None = None,
    ) -> None:
        self._seed = seed
        self._outside = outside
        self._folder = folder
        self._timeout_s = timeout_s
        self._keep = keep
        self._references: dict[str, Ending] = {}
        """By model and length."""

    def run(self, index: int) -> ChaosRun:
        """Runs and judges one case.

        Args:
            index: of the case.
        """
        case = draw_any(self._seed, index) if self._outside is None else draw_outside(self._seed, index)
        config = case.config
        begin_s = time.monotonic()
        folder = self._folder / f"{index:05d}"
        name = f"{case.model}-{config.run.steps}-steps"
        if name not in self._references:
            reference_folder = self._folder / f"reference-{name}"
            reference = run_trial(reference_folder, config_of(case.reference), (), self._timeout_s)
            if reference.result is None or reference.left_behind:
                problem = reference.error or "; ".join(reference.left_behind) or "it did not come to an end"
                return self._record(
                    case,
                    reference,
                    Judgement("error", f"the reference run failed: {problem}"),
                    begin_s,
                    reference_folder,
                )
            self._references[name] = reference
            self._tidy(reference_folder)
            begin_s = time.monotonic()
        if self._outside is not None:
            return self._run_outside(case, self._references[name], self._outside, begin_s, folder)
        workers = range(sum(config.widths))
        faults = parse_faults(
            case.faults,
            seed=config.run.seed,
            workers=workers,
            num_steps=config.run.steps,
            respawns=config.elastic.respawns,
        )
        watch = GrowthWatch(folder / RUN_FOLDER) if case.watches_growth else None
        ending = run_trial(folder, config, faults, self._timeout_s, watch)
        where = None if case.keeps_blocks else placed(config)
        verdict = judge(case, ending, self._references[name], where)
        if verdict.outcome in GOOD and watch is not None:
            verdict = judge_growth(watch.growth(), verdict)
        if verdict.outcome == "different":
            verdict = self._told_apart(case, self._references[name], verdict)
        return self._record(case, ending, verdict, begin_s, folder)

    def _run_outside(
        self, case: ChaosCase, reference: Ending, environment: Mapping[str, str], begin_s: float, folder: Path
    ) -> ChaosRun:
        run_dir = folder / RUN_FOLDER
        weather = parse_weather(case.weather) if case.weather else None
        folder.mkdir(parents=True)
        sky = Sky(run_dir, weather)
        external_faults = ExternalFaults(run_dir, [parse_strike(strike) for strike in case.strikes], sky)
        try:
            ending = run_command(folder, case.arguments(str(run_dir)), self._timeout_s, external_faults, environment)
        finally:
            stays = sky.is_there
            sky.close()
        left = [each for each in ending.left_behind if not stays or not each.startswith("file ")]  # nor removed
        ending = msgspec.structs.replace(ending, left_behind=left + external_faults.left)
        came = weather if sky.has_come else None
        verdict = judge_outside(case, ending, reference, external_faults.struck, came)
        run = self._record(case, ending, verdict, begin_s, folder)
        hit = workers_of(each.victim for each in external_faults.struck)
        return msgspec.structs.replace(
            run,
            faults=(*case.strikes, *([case.weather] if case.weather else [])),
            num_struck=len({each.strike for each in external_faults.struck}) + sky.has_come,
            num_false_alarms=len(without_cause(ending, hit)),
            going_on_s=[],  # when a signal from outside struck the job does not know
            struck=external_faults.struck,
        )

    def _told_apart(self, case: ChaosCase, reference: Ending, verdict: Judgement) -> Judgement:
        """Says whether the faults made the difference, or the layout alone makes it too."""
        folder = self._folder / f"{case.index:05d}-undisturbed"
        ending = run_trial(folder, case.config, (), self._timeout_s)
        again = judge(case, ending, reference, placed(case.config))
        cause = (
            "without faults it has the reference run's bits"
            if again.outcome == "same bits"
            else "without faults it has too"
        )
        return verdict._replace(detail=f"{verdict.detail}; {cause}")

    def _record(self, case: ChaosCase, ending: Ending, verdict: Judgement, begin_s: float, folder: Path) -> ChaosRun:
        kept = self._keep or verdict.outcome not in GOOD
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        recoveries = [recovery for recovery in ending.recoveries if recovery.kind == "lost"]
        widths = case.config.widths
        equal = len(set(widths)) == 1
        return ChaosRun(
            index=case.index,
            outcome=verdict.outcome,
            detail=verdict.detail,
            layout=f"{len(widths)}x{widths[0]}" if equal else "[" + ",".join(map(str, widths)) + "]",
            model=case.model_name,
            settings=case.settings,
            faults=case.faults,
            num_struck=len(ending.struck),
            num_recoveries=sum(recovery.is_failure for recovery in ending.recoveries),
            num_false_alarms=len(false_alarms(ending)),
            going_on_s=[recovery.total_s - recovery.redo_s for recovery in recoveries],
            duration_s=time.monotonic() - begin_s,
            command=case.command,
            replay=case.replay,
            folder=str(folder) if kept else None,
        )

    def _tidy(self, folder: Path) -> None:
        """Of a reference run the result is in memory."""
        if not self._keep:
            shutil.rmtree(folder / RUN_FOLDER / "checkpoints", ignore_errors=True)
