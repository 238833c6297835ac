"""A training job on virtual time, as a detector hears it: steps, heartbeats, noise, faults. Real detector, no sleeping.

Each worker runs the actions of its step, then reduce, vote, apply and gather, waiting where the others are slower. Its
heartbeats leave every 250 ms plus a delay drawn from a `Noise`. A worker that hangs, loops or is cut off at some time
stops in the corresponding way, and the others then wait for it, as they would.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from elaswave.protocol.detection.active_time import TICK_S
from elaswave.protocol.detection.detector import Detector, Suspicion, WorkerActivity

INTERVAL_S = 0.25
Draw = Callable[[random.Random], float]


class Noise(NamedTuple):
    """What disturbs the job."""

    heartbeat_s: Draw = lambda rng: rng.expovariate(1 / 0.001)
    """Delay of each heartbeat."""
    action: Draw = lambda rng: rng.uniform(0.9, 1.2)
    """Factor on the duration of each action."""
    slow_step: Draw = lambda rng: 1.0
    """Factor on all actions of one worker in one step."""
    coordinator_s: Draw = lambda rng: 0.0
    """How long the coordinator is not scheduled, drawn about every second."""
    machine_s: Draw = lambda rng: 0.0
    """How long no worker is heard, drawn about every second."""
    starved_s: Draw = lambda rng: 0.0
    """How long a worker gets no processor in a step: it neither gets on, nor is it heard."""


class Stop(NamedTuple):
    """How a worker stops."""

    at_s: float
    how: str
    """silent: no heartbeats, no work (SIGSTOP, a lost host). loops: computes for ever. stuck: its frames are lost."""


class Stay(NamedTuple):
    """A position and the time at which it is entered."""

    at_s: float
    step: int
    label: str
    computing: bool
    waiting_on: tuple[int, ...] = ()


class Fleet:
    """A job and its detector.

    Args:
        num_workers: all in one group, each waits for all.
        seed: of the noise.
        noise: what disturbs.
        action_s: usual duration of one action; a step has ten.
        stops: by worker.
        agent_looks: whether an agent says of silent workers whether they wait for a processor.
    """

    def __init__(
        self,
        num_workers: int,
        seed: int,
        noise: Noise,
        *,
        action_s: float = 0.03,
        stops: Mapping[int, Stop] | None = None,
        agent_looks: bool = True,
    ) -> None:
        self._agent_looks = agent_looks
        self.detector = Detector(can_look=lambda worker: agent_looks)
        self._rng = random.Random(seed)
        self._workers = range(num_workers)
        self._noise = noise
        self._action_s = action_s
        self._stops = dict(stops or {})
        self._stays: dict[int, list[Stay]] = {worker: [Stay(0.0, 0, "start", False)] for worker in self._workers}
        self._at = dict.fromkeys(self._workers, 0)
        self._step = 0
        self._step_end_s = 1.0
        self._starved = dict.fromkeys(self._workers, (0.0, 0.0))
        """By worker: from when until when it gets no processor, the last time."""
        self.standstill = False
        """No worker can end the present step any more."""

    def _plan_step(self) -> None:
        """The stays of all workers' next step."""
        rng, noise = self._rng, self._noise
        self._step += 1
        start_s, step = self._step_end_s, self._step
        done_s = {}
        for worker in self._workers:
            now_s, factor = start_s, noise.slow_step(rng)
            stays = self._stays[worker]
            starved_s = noise.starved_s(rng)
            starved_in = rng.randrange(10) if starved_s else -1
            for index in range(10):
                if index == starved_in:
                    self._starved[worker] = (now_s, now_s + starved_s)
                    now_s += starved_s
                stays.append(Stay(now_s, step, f"0{'FB'[index % 2]}{index // 2}", True))
                now_s += self._action_s * factor * noise.action(rng)
            stop = self._stops.get(worker)
            if stop is not None and stop.at_s < now_s:
                while stays[-1].at_s > stop.at_s:
                    stays.pop()
                if stop.how == "stuck":
                    others = tuple(other for other in self._workers if other != worker)
                    stays.append(Stay(stop.at_s, step, "reduce", False, others))
                now_s = math.inf
                self.standstill = True
            done_s[worker] = now_s
        meet_s = max(done_s.values())
        missing = tuple(worker for worker in self._workers if done_s[worker] == math.inf)
        for worker, at_s in done_s.items():
            if at_s == math.inf:
                continue
            stays = self._stays[worker]
            stays.append(Stay(at_s, step, "reduce", False, missing))
            if meet_s < math.inf:
                stays.append(Stay(meet_s, step, "vote", False))
                stays.append(Stay(meet_s + 0.002, step, "apply", True))
                stays.append(Stay(meet_s + 0.02, step, "gather", False))
        self._step_end_s = meet_s + 0.025

    def _position(self, worker: int, at_s: float) -> WorkerActivity:
        while self._step_end_s <= at_s:
            self._plan_step()
        stays = self._stays[worker]
        index = self._at[worker]
        while index + 1 < len(stays) and stays[index + 1].at_s <= at_s:
            index += 1
        if index > 1000:
            del stays[:index]
            index = 0
        self._at[worker] = index
        stay = stays[index]
        return WorkerActivity(1, stay.step, 1, stay.label, stay.computing, stay.waiting_on, at_s - stay.at_s)

    def _starved_until(self, worker: int, at_s: float) -> float:
        from_s, until_s = self._starved[worker]
        return until_s if from_s <= at_s else 0.0

    def run(self, duration_s: float) -> Iterator[tuple[float, Suspicion]]:
        """Suspicions and their times, until there is one or the time is over."""
        detector, rng, noise = self.detector, self._rng, self._noise
        # (time of arrival, worker, time of sending); no worker's heartbeats overtake each other
        beats: list[tuple[float, int, float]] = []
        for worker in self._workers:
            detector.joined(worker, 0.0)
            heapq.heappush(beats, (rng.uniform(0, INTERVAL_S), worker, 0.0))
        tick_s, active_s, next_draw_s, hushed_until_s, looked_s = 0.0, 0.0, 1.0, 0.0, 0.0
        while tick_s < duration_s:
            if beats and beats[0][0] <= tick_s:
                arrival_s, worker, _ = heapq.heappop(beats)
                stop = self._stops.get(worker)
                if stop is not None and stop.how == "silent" and arrival_s >= stop.at_s:
                    self._position(worker, arrival_s)
                    continue
                self._position(worker, arrival_s)  # whether it is starved then is known now
                sent_s = max(arrival_s, hushed_until_s, self._starved_until(worker, arrival_s))
                if sent_s == arrival_s:
                    detector.heartbeat(worker, self._position(worker, sent_s), max(sent_s, active_s))
                    sent_s += INTERVAL_S + noise.heartbeat_s(rng)
                heapq.heappush(beats, (sent_s, worker, 0.0))
                continue
            now_s = max(tick_s, active_s)
            if now_s >= next_draw_s:
                next_draw_s = now_s + 1.0
                active_s = now_s + noise.coordinator_s(rng)
                hushed_until_s = now_s + noise.machine_s(rng)
            if self._agent_looks:
                for worker in detector.quiet:
                    is_starved = self._starved_until(worker, now_s) > now_s
                    detector.looked(worker, now_s - looked_s if is_starved else 0.0, now_s)
                looked_s = now_s
            for suspicion in detector.tick(now_s):
                yield now_s, suspicion
            tick_s = detector.next_tick_s(now_s)
            assert now_s <= tick_s <= now_s + TICK_S + 0.01
