"""What happens to a cluster's machines over days: losses, repairs, stragglers. A list of changes, drawn once.

A scenario does not depend on what a job does, so every policy meets the same one. It is drawn from rates (Poisson
processes per machine, or lives whose hazard falls with age), from named public rates, or read from a trace
(``elaswave.sim.cluster.traces``). The same seed gives the same scenario: each kind of change draws from a generator of
its own, so that adding stragglers or racks does not move the losses.

Losses that come together are those of a whole node, and those of a whole rack (its switch, its power). Left out: rates
that follow the time of day or the load, and failures that spread from one machine to others.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import gamma

import msgspec

from elaswave.errors import UsageError
from elaswave.planning.costs.machines import ClusterEvent

DAY_S = 86_400.0
SHAPE_MIN = 0.2
"""Of Weibull distributions: there, half of all newcomers are lost within a thousandth or so of the mean time."""
CHANGES_MAX = 1_000_000
"""Most changes that scenarios may be expected to have together: all are held in memory, some hundred bytes each."""


RACK_LOSSES_PER_DAY = 20 / 365 / (1_800 / 60)
"""Of each rack, from one operator's experience, for comparison; nothing uses it unasked. Dean, Handling Large Datasets
at Google: Current Systems and Future Directions (Data-Intensive Computing Symposium, 2008), slide "Typical first year
for a new cluster": about 20 rack failures of 40 to 80 machines, back after 1 to 6 hours. Clusters of 1,800 servers
(Data Center Knowledge, Failure Rates in Google Data Centers, 30 May 2008); racks of 60, the middle of the range, are
our assumption."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How often machines fail and how long that lasts."""

    name: str = "custom"
    losses_per_worker_day: float
    """Interruptions, divided by workers and days."""
    whole_nodes: bool = False
    """An interruption takes the whole node of its worker, not just the worker."""
    weibull_shape: float = 1.0
    """Of the time from a worker's (or node's) arrival to its loss. 1: as likely at any age. Below 1: newcomers fail
    more often (infant mortality); the mean stays what `losses_per_worker_day` says, and those there at the beginning
    have been there for long. Schroeder and Gibson, A large-scale study of failures in high-performance computing
    systems (DSN 2006), find that a Weibull distribution with decreasing hazard fits the time between failures well."""
    rack_losses_per_day: float = 0.0
    """How often each rack is lost with all workers in it; compare `RACK_LOSSES_PER_DAY`."""
    repair_s: float | None = 4 * 3600.0
    """Mean time (exponential) until what was lost is back, or replaced; None means never."""
    stragglers_per_worker_day: float = 0.0
    """How often a worker becomes slow."""
    straggler_speed: tuple[float, float] = (0.5, 0.95)
    """Its speed then, uniform between the two."""
    straggler_s: float = 3600.0
    """Mean time (exponential) until it is as fast as before."""
    source: str = ""
    """Where the figures are published, and which of them are assumptions."""

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: with every figure that cannot be.
        """
        problems = [
            f"{name} is {value}, needed: finite, at least 0"
            for name, value in (
                ("losses_per_worker_day", self.losses_per_worker_day),
                ("stragglers_per_worker_day", self.stragglers_per_worker_day),
                ("rack_losses_per_day", self.rack_losses_per_day),
            )
            if not 0 <= value < float("inf")
        ]
        if not SHAPE_MIN <= self.weibull_shape <= 1:
            problems.append(f"weibull_shape is {self.weibull_shape}, needed: at least {SHAPE_MIN} and at most 1")
        if self.repair_s is not None and not 0 < self.repair_s < float("inf"):
            problems.append(f"repair_s is {self.repair_s}, needed: above 0 and finite, or none for never")
        if not 0 < self.straggler_s < float("inf"):
            problems.append(f"straggler_s is {self.straggler_s}, needed: above 0 and finite")
        if not 0 < self.straggler_speed[0] <= self.straggler_speed[1] < 1:
            problems.append(f"straggler_speed is {self.straggler_speed}, needed: two of 0 < low <= high < 1")
        if problems:
            raise ValueError(f"rates {self.name!r} are impossible: " + "; ".join(problems))

    def expected_changes(self, num_workers: int, duration_s: float, num_racks: int = 0) -> float:
        """Computes how many changes a scenario has on average, at most: each loss has its repair, each slow-down its
        end."""
        losses_per_day = self.losses_per_worker_day * num_workers + self.rack_losses_per_day * num_racks
        of_losses = losses_per_day * (1 if self.repair_s is None else 2)
        return (of_losses + 2 * self.stragglers_per_worker_day * num_workers) * duration_s / DAY_S

    @property
    def described(self) -> str:
        """Where the losses come from, for people."""
        infants = "" if self.weibull_shape == 1 else f"; Weibull shape {self.weibull_shape:g}"
        racks = f"; each rack lost {self.rack_losses_per_day:g} times a day" if self.rack_losses_per_day else ""
        return (self.source or self.name) + infants + racks


_ASSUMED = "repair time: our assumption, not published"

RATES: dict[str, Rates] = {
    rates.name: rates
    for rates in (
        Rates(
            name="llama3",
            losses_per_worker_day=419 / 54 / 16_384,
            source="The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54 "
            f"days on 16,384 H100; {_ASSUMED}",
        ),
        Rates(
            name="opt-175b",
            losses_per_worker_day=100 / 60 / 992,
            whole_nodes=True,
            source="OPT (arXiv 2205.01068), section 2.5: over 100 hosts cycled in two months on 992 A100 in hosts of "
            f"8, here one interruption each; {_ASSUMED}",
        ),
        Rates(
            name="bloom",
            losses_per_worker_day=1.5 / 7 / 384,
            source="The technology behind BLOOM training (Hugging Face, 2022): 1 to 2 GPU failures a week on 384 A100; "
            f"here 1.5; {_ASSUMED}",
        ),
        Rates(
            name="rsc-1",
            losses_per_worker_day=6.5 / 1000 / 8,
            whole_nodes=True,
            source="Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv 2410.21680), "
            f"section III: 6.50 failures per 1,000 node-days, nodes of 8 A100; {_ASSUMED}",
        ),
    )
}
"""Public rates by name."""


def rates_named(name: str) -> Rates:
    """Finds the public rates of this name.

    Raises:
        UsageError: there are none.
    """
    if name not in RATES:
        raise UsageError(
            f"unknown failure rates {name!r}, and there is no file of that name: choose one of "
            f"{', '.join(sorted(RATES))}, or give a number per worker and day, or Acme's trace of jobs"
        )
    return RATES[name]


class ClusterChange(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens to a cluster at one instant."""

    at_s: float
    """Seconds from the scenario's beginning."""
    event: ClusterEvent
    nodes: tuple[int, ...] = ()
    """joined: the node of each of the event's workers."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster's life: with whom it begins, and what happens."""

    initial: tuple[int, ...]
    """Workers at the beginning, ascending."""
    nodes: tuple[int, ...]
    """Node of each of them."""
    racks: tuple[int, ...] = ()
    """Rack of node 0, 1, ..., of every node that is ever there. Empty: each node is a rack of its own."""
    changes: tuple[ClusterChange, ...]
    """In order of time. Ids are given once: a worker that is repaired comes back under a new one."""
    duration_s: float
    source: str = ""

    def rack_of(self, node: int) -> int:
        """Returns the rack that a node is in."""
        return self.racks[node] if self.racks else node

    @property
    def num_workers_max(self) -> int:
        """The most workers that are there at once."""
        alive = most = len(self.initial)
        for change in self.changes:
            alive += {"joined": 1, "lost": -1, "drained": -1}.get(change.event.kind, 0) * len(change.event.workers)
            most = max(most, alive)
        return most

    @property
    def mtbf_s(self) -> float:
        """Mean time between losses; the duration where there is none."""
        return self.duration_s / max(1, self.counts.get("lost", 0))

    @property
    def counts(self) -> dict[str, int]:
        """Number of changes by kind."""
        return dict(sorted(Counter(change.event.kind for change in self.changes).items()))


def racks_of(num_nodes: int, nodes_per_rack: int) -> tuple[int, ...]:
    """Lists the rack of each node, where neighbouring nodes share one; the list is empty where every node has its
    own."""
    return () if nodes_per_rack == 1 else tuple(node // nodes_per_rack for node in range(num_nodes))


def draw(
    rates: Rates,
    *,
    num_workers: int,
    duration_s: float,
    seed: int,
    workers_per_node: int = 8,
    nodes_per_rack: int = 1,
    progress: Callable[[float], None] = lambda done: None,
) -> Scenario:
    """Draws a scenario.

    Workers are slots 0 to num_workers - 1 in nodes of neighbours. Each slot's losses are a Poisson process while
    a worker is in it, or a renewal process that begins anew with each worker where newcomers fail more often; a slot
    that was lost is filled again, by a worker with a new id, when its repair is done.

    Args:
        rates: how often, how long.
        num_workers: at the beginning.
        duration_s: of the scenario.
        seed: equal seeds give equal scenarios.
        workers_per_node: neighbours that a whole node's loss takes together.
        nodes_per_rack: neighbouring nodes that share a rack.
        progress: told now and then what share of the scenario is drawn.
    Raises:
        ValueError: no worker, or a duration that is not above 0.
    """
    if min(num_workers, workers_per_node, nodes_per_rack) < 1 or not 0 < duration_s < float("inf"):
        raise ValueError(
            f"a scenario of {num_workers} workers, {workers_per_node} per node, {nodes_per_rack} nodes per rack, over "
            f"{duration_s} s cannot be drawn: all four must be above 0"
        )
    return _Drawing(rates, num_workers, duration_s, seed, workers_per_node, nodes_per_rack).run(progress)


class _Drawing:
    """One scenario while it is drawn."""

    def __init__(
        self, rates: Rates, num_workers: int, duration_s: float, seed: int, workers_per_node: int, nodes_per_rack: int
    ) -> None:
        self._rates = rates
        self._num_slots = num_workers
        self._duration_s = duration_s
        self._workers_per_node = workers_per_node
        self._nodes_per_rack = nodes_per_rack
        self._num_nodes = -(-num_workers // workers_per_node)
        self._losses = random.Random(f"{seed} losses")
        self._racks = random.Random(f"{seed} racks")
        self._repairs = random.Random(f"{seed} repairs")
        self._stragglers = random.Random(f"{seed} stragglers")
        self._occupant: dict[int, int | None] = {}
        """Slots whose worker is not the first one: its id, or None while no worker is there."""
        self._slow: set[int] = set()
        self._next_id = num_workers
        self._pending: list[tuple[float, int, str, tuple[int, ...]]] = []
        """What is to come as a heap of (time, order of drawing, kind, slots or workers)."""
        self._num_drawn = 0
        self._changes: list[ClusterChange] = []

    def run(self, progress: Callable[[float], None]) -> Scenario:
        if self._rates.weibull_shape < 1:
            self._draw_lives(0.0, range(self._num_slots), in_service=True)
        else:
            self._draw_next("lost", 0.0)
        self._draw_next("rack lost", 0.0)
        self._draw_next("slowed", 0.0)
        while self._pending:
            now, _, kind, who = heappop(self._pending)
            progress(min(1.0, now / self._duration_s))
            if kind == "lost":
                if self._worker_in(who[0]) is not None:
                    self._lose(now, self._lost_with(who[0]))
                self._draw_next("lost", now)
            elif kind == "worn":
                slot, worker = who
                if self._worker_in(slot) == worker:  # else it was lost with its rack before
                    self._lose(now, self._lost_with(slot))
            elif kind == "rack lost":
                self._lose(now, self._slots_of_rack(who[0]))
                self._draw_next("rack lost", now)
            elif kind == "slowed":
                self._slow_down(now, who[0])
                self._draw_next("slowed", now)
            elif kind == "repaired":
                self._repair(now, who)
            else:
                self._speed_up(now, *who)
        return Scenario(
            initial=tuple(range(self._num_slots)),
            nodes=tuple(slot // self._workers_per_node for slot in range(self._num_slots)),
            racks=racks_of(self._num_nodes, self._nodes_per_rack),
            changes=tuple(self._changes),
            duration_s=self._duration_s,
            source=self._rates.described,
        )

    def _draw_next(self, kind: str, now: float) -> None:
        """Draws the next strike on any slot or rack; whom it finds there is seen when it comes (thinning, which is
        exact)."""
        num_racks = -(-self._num_nodes // self._nodes_per_rack)
        rng, per_day, number = {
            "lost": (self._losses, self._rates.losses_per_worker_day, self._num_slots),
            "rack lost": (self._racks, self._rates.rack_losses_per_day, num_racks),
            "slowed": (self._stragglers, self._rates.stragglers_per_worker_day, self._num_slots),
        }[kind]
        per_s = per_day * number / DAY_S
        if per_s > 0:  # which the smallest rates are not
            at_s = now + rng.expovariate(per_s)
            self._push(at_s, kind, (rng.randrange(number),))

    def _draw_lives(self, now: float, slots: Iterable[int], *, in_service: bool) -> None:
        """Draws when the workers in these slots fail, for lives whose hazard falls with age.

        Args:
            now: seconds.
            slots: whose workers' lives are drawn; of whole nodes, the first slot stands for all.
            in_service: they have been there for long: what is left of a life is drawn that goes on at any moment, so
                that the cluster loses as many workers a day as later.
        """
        shape = self._rates.weibull_shape
        for slot in slots:
            unit = self._lost_with(slot)
            worker, per_s = self._worker_in(slot), self._rates.losses_per_worker_day * len(unit) / DAY_S
            if slot != unit[0] or worker is None or not per_s > 0:
                continue
            scale_s = 1 / (per_s * gamma(1 + 1 / shape))
            if in_service:
                # A life that goes on at a given moment is long with a chance that grows with its length.
                whole_s = scale_s * self._losses.gammavariate(1 + 1 / shape, 1.0) ** (1 / shape)
                left_s = self._losses.random() * whole_s
            else:
                left_s = self._losses.weibullvariate(scale_s, shape)
            self._push(now + left_s, "worn", (slot, worker))

    def _lost_with(self, slot: int) -> range:
        """Lists the slots that are lost when one of them is."""
        if not self._rates.whole_nodes:
            return range(slot, slot + 1)
        first = slot - slot % self._workers_per_node
        return range(first, min(first + self._workers_per_node, self._num_slots))

    def _slots_of_rack(self, rack: int) -> range:
        size = self._nodes_per_rack * self._workers_per_node
        return range(rack * size, min((rack + 1) * size, self._num_slots))

    def _push(self, at_s: float, kind: str, who: tuple[int, ...]) -> None:
        if at_s < self._duration_s:
            self._num_drawn += 1
            heappush(self._pending, (at_s, self._num_drawn, kind, who))

    def _worker_in(self, slot: int) -> int | None:
        return self._occupant.get(slot, slot)

    def _lose(self, now: float, slots: Iterable[int]) -> None:
        """Loses the workers that are in these slots."""
        found = [(slot, worker) for slot in slots if (worker := self._worker_in(slot)) is not None]
        if not found:
            return
        hit, workers = tuple(slot for slot, _ in found), tuple(sorted(worker for _, worker in found))
        for slot in hit:
            self._occupant[slot] = None
        self._slow.difference_update(workers)
        self._changes.append(ClusterChange(at_s=now, event=ClusterEvent(kind="lost", workers=workers)))
        if self._rates.repair_s is not None:
            self._push(now + self._repairs.expovariate(1 / self._rates.repair_s), "repaired", hit)

    def _repair(self, now: float, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._occupant[slot] = self._next_id
            self._next_id += 1
        workers = tuple(worker for slot in slots if (worker := self._worker_in(slot)) is not None)
        nodes = tuple(slot // self._workers_per_node for slot in slots)
        self._changes.append(ClusterChange(at_s=now, event=ClusterEvent(kind="joined", workers=workers), nodes=nodes))
        if self._rates.weibull_shape < 1:
            self._draw_lives(now, slots, in_service=False)

    def _slow_down(self, now: float, slot: int) -> None:
        speed = self._stragglers.uniform(*self._rates.straggler_speed)
        lasts_s = self._stragglers.expovariate(1 / self._rates.straggler_s)
        worker = self._worker_in(slot)
        if worker is None or worker in self._slow:
            return
        self._slow.add(worker)
        self._changes.append(ClusterChange(at_s=now, event=ClusterEvent(kind="slowed", workers=(worker,), speed=speed)))
        self._push(now + lasts_s, "restored", (slot, worker))

    def _speed_up(self, now: float, slot: int, worker: int) -> None:
        if worker in self._slow and self._worker_in(slot) == worker:
            self._slow.remove(worker)
            self._changes.append(
                ClusterChange(at_s=now, event=ClusterEvent(kind="slowed", workers=(worker,), speed=1.0))
            )
