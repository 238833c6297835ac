"""The coordinator of a job with thousands of agents, in virtual time: messages a second, and the time from a host's
loss until everybody has the decision.

    python benchmarks/many_agents.py [--agents 128 1024 10000] [--workers-each 1] [--round-trip-ms 1.3] [--json]

The product's code from the bytes of a connection on (frames with their authentication, agents and hosts, detector,
coordinator's machine, recovery plan), with all agents and workers of the job, in one process. The network is virtual:
every message takes half a round trip. The coordinator's processor is real: what it does takes as long as it takes here,
in virtual time too, and what comes meanwhile waits. So a figure is one of a coordinator with a processor like this one.
Left out: the kernel's part of sockets, writing the run's files, and what members do before they answer.

One host is killed, whose kernel lives and closes its connections. Workers beside the lost ones tell of their links,
the loss is decided on, and `decided` is when the last survivor has the decision. Meanwhile heartbeats go on.
"""

import argparse
import gc
import heapq
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from agreement import SCATTER_WIDTH, Job, make_job, report_of
from harness import machine, print_header

from elaswave.channel.messages.agent import FromAgent, ToAgent
from elaswave.channel.messages.worker import Heartbeat, LinkLost
from elaswave.channel.wire import ControlFrameKind, Session, agent_id, encode_payload
from elaswave.coordinator.agents import Agents
from elaswave.launcher.forkserver.worker_main import HEARTBEAT_S as WORKER_HEARTBEAT_S
from elaswave.launcher.local_job import HEARTBEAT_S as AGENT_HEARTBEAT_S
from elaswave.protocol.coordinator.decisions import MemberEnd, plan_survivors
from elaswave.protocol.coordinator.driver import CoordinatorDriver
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.detection.active_time import TICK_S
from elaswave.protocol.detection.detector import Detector
from elaswave.protocol.events import (
    Decided,
    End,
    FindCheckpoint,
    NewGeneration,
    Note,
    PendingWork,
    PlanRecovery,
    Record,
    Resumed,
    Suspected,
)
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.effects import StartFirst, WriteDown
from elaswave.protocol.membership.hosts import Hosts
from elaswave.protocol.messages import CoreToWorker, Decision, InForce, Prepare, Registered, Report
from elaswave.protocol.step.activity import WorkerActivity

FROM_PEERS = FromAgent | Heartbeat | LinkLost | Report | Registered
COORDINATOR = 1
"""Its id on the one real connection over which all messages are measured."""
WARM_UP_S = 1.0
"""Virtual seconds before the loss."""
NUM_PARTNERS = 4
"""Workers with links to a worker that tell of its end, at most."""


class Row(NamedTuple):
    """Of one number of agents."""

    agents: int
    workers: int
    arrive_s: float
    """Processor time of the coordinator to take all agents in."""
    messages_per_s: float
    """That come while nothing happens."""
    load: float
    """Share of one processor that they take."""
    noticed_s: float
    """From the loss until the coordinator holds the host for lost."""
    prepared_s: float
    """Until the last survivor is asked to report."""
    reported_s: float
    """Until the coordinator has the last report."""
    decided_s: float
    """Until the last survivor has the decision."""
    messages: int
    """Both ways, for the loss."""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[128, 1024, 10_000], help="multiples of 8")
    parser.add_argument("--workers-each", type=int, default=1, help="of each agent")
    parser.add_argument("--model", default="gpt2-small", help="a preset: its parameters are the blocks")
    parser.add_argument("--round-trip-ms", type=float, default=1.3)
    parser.add_argument("--store-ms", type=float, default=0.1, help="until the store has taken a record")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    where = machine()
    rows = []
    for number in options.agents:
        world = World(number, options.workers_each, options.model, options.round_trip_ms / 2e3, options.store_ms / 1e3)
        rows.append(world.lose_a_host())
        print(f"{number:,} agents: done", file=sys.stderr)
    if options.json:
        print(json.dumps({"machine": where, "rows": [row._asdict() for row in rows]}, indent=2))
    else:
        print_header(where)
        print_table(rows, options)
    return 0


class World(CoordinatorDriver):
    """A coordinator, and all who send to it.

    Args:
        num_agents, workers_each: of the job.
        model: whose parameters are the blocks.
        link_s: that a message takes.
        store_s: that a record takes.
    """

    def __init__(self, num_agents: int, workers_each: int, model: str, link_s: float, store_s: float) -> None:
        self.job: Job = make_job(model, num_agents * workers_each)
        self.workers = self.job.layout.active
        self._num_agents, self._each = num_agents, workers_each
        self._link_s, self._store_s = link_s, store_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._free_s = 0.0
        """Virtual time at which the processor has nothing more to do."""
        self._began_s = self._extra_s = 0.0
        """Processor time at which the present work has begun, and what it has waited for."""
        self._start_s = 0.0
        """Virtual time at which it has begun."""
        self._random = random.Random(1)
        self._dead: set[int] = set()
        self.received = self.sent = 0
        self.busy_s = 0.0
        self.at: dict[str, float] = {}
        """What was seen last, and when."""
        self._peer, self._own = connected_pair()
        self._prepare: Prepare | None = None
        self.core = Coordinator(
            InForce(self.job.layout, self.job.placement),
            blocks=self.job.blocks,
            scatter_width=SCATTER_WIDTH,
        )
        self._detector = Detector(can_look=lambda worker: True)
        self._last_heartbeat_s: dict[int, float] = {}
        hosts = Hosts(
            [self.agent_of(worker) for worker in self.workers],
            [f"h{number}" for number in range(num_agents)] if num_agents > 1 else [],
            home=1,
        )
        self._agents = HostAgents(hosts, (), self._heard_of_agent, now_s=0.0)
        self._told = Agents(self._agents, self._send_to_agent, lambda peer: None, spec=None, checkpoint=None)

    def agent_of(self, worker: int) -> int:
        """The number of a worker's host; incarnations are one more."""
        return worker // self._each

    # ------------------------------------------------------------------------------------------------- what is measured

    def lose_a_host(self) -> Row:
        """Creates the job, lets it train for a while, kills a host."""
        begin_s = time.process_time()
        for number in range(self._num_agents):
            for effect in self._agents.came(f"h{number}", number + 1, self._each)[0]:
                if isinstance(effect, WriteDown):
                    self._wait(self._store_s)
                elif isinstance(effect, StartFirst):
                    self._told.tell(effect)
        arrive_s = time.process_time() - begin_s
        assert self._agents.is_complete
        for worker in self.workers:
            self._detector.expect(worker, 0.0)
        self.core.begin()
        for worker in self.workers:
            self._detector.joined(worker, 0.0)
            self.core.handle(
                Registered(worker=worker, address=f"tcp:10.0.0.1:{worker}", generation=1, report=None), 0.0
            )
        for number in range(self._num_agents):
            phase = self._random.random()
            self._call(phase * AGENT_HEARTBEAT_S, lambda number=number: self._agent_beats(number))  # type: ignore[misc]
            for worker in range(number * self._each, min((number + 1) * self._each, len(self.workers))):
                self._call(phase * WORKER_HEARTBEAT_S, lambda worker=worker: self._worker_beats(worker))  # type: ignore[misc]
        self._call(TICK_S, self._on_timer)
        gc.collect()
        gc.freeze()  # what this world consists of is no part of the coordinator's heap
        self._run(lambda: self._queue[0][0] > WARM_UP_S)
        quiet, load, sent_before = self.received / WARM_UP_S, self.busy_s / WARM_UP_S, self.sent
        self.received = 0
        struck_s = WARM_UP_S
        lost = self._num_agents // 2
        self._call(0.0, lambda: self._kill(lost))
        self._is_counting = True
        members = len(self.workers) - self._each
        self._awaited = members
        self._run(lambda: self._awaited == 0)
        return Row(
            agents=self._num_agents,
            workers=len(self.workers),
            arrive_s=arrive_s,
            messages_per_s=quiet,
            load=load,
            noticed_s=self.at["noticed"] - struck_s,
            prepared_s=self.at["prepared"] - struck_s,
            reported_s=self.at["reported"] - struck_s,
            decided_s=self.at["decided"] - struck_s,
            messages=self._for_the_loss + self.sent - sent_before,
        )

    _awaited = -1
    _for_the_loss = 0
    _now_s = 0.0

    # ------------------------------------------------------------------------------------------------ the virtual world

    def _call(self, delay_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self._now_s + delay_s, self._sequence, call))

    def _at(self, when_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when_s, self._sequence, call))

    def _run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._now_s, _, call = heapq.heappop(self._queue)
            call()

    def _work(self, do: Callable[[], None]) -> None:
        """The coordinator does something once it has done what came before."""
        self._start_s = max(self._now_s, self._free_s)
        self._extra_s, self._began_s = 0.0, time.process_time()
        do()
        self._free_s = self._time_s()
        self.busy_s += self._free_s - self._start_s

    def _time_s(self) -> float:
        """Virtual time by the coordinator's clock."""
        return self._start_s + time.process_time() - self._began_s + self._extra_s

    def _wait(self, seconds: float) -> None:
        self._extra_s += seconds

    def _comes(self, message: msgspec.Struct | None, handle: Callable[[Any], None]) -> None:
        """A message is under way to the coordinator."""
        self._peer.write(
            ControlFrameKind.HEARTBEAT if message is None else ControlFrameKind.MESSAGE,
            0,
            b"" if message is None else encode_payload(message),
        )
        data = self._peer.take()

        def do() -> None:
            (frame,) = self._own.feed(data)
            self.received += 1
            handle(frame.message)

        self._work(do)

    # ----------------------------------------------------------------------------------------------- agents and workers

    def _agent_beats(self, number: int) -> None:
        if number in self._dead:
            return
        self._call(AGENT_HEARTBEAT_S, lambda: self._agent_beats(number))
        self._comes(None, lambda message: self._last_heartbeat_s.__setitem__(agent_id(number + 1), self._time_s()))

    def _worker_beats(self, worker: int) -> None:
        if self.agent_of(worker) in self._dead:
            return
        self._call(WORKER_HEARTBEAT_S, lambda: self._worker_beats(worker))
        step = 10 + int(self._now_s)
        beat = Heartbeat(
            worker=worker,
            generation=1,
            step=step,
            attempt=1,
            label="vote",
            computing=False,
            waiting_on=(),
            since_s=0.1,
            moved_bytes=int(self._now_s * 1e6),
        )
        self._comes(beat, self._on_heartbeat)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        position = WorkerActivity(
            generation=message.generation,
            step=message.step,
            attempt=message.attempt,
            label=message.label,
            computing=message.computing,
            waiting_on=message.waiting_on,
            since_s=message.since_s,
            moved_bytes=message.moved_bytes,
            starved_s=message.starved_s,
        )
        self._detector.heartbeat(message.worker, position, self._time_s())

    def _kill(self, number: int) -> None:
        """A host is killed: its kernel closes all connections."""
        self._dead.add(number)
        gone = [worker for worker in self.workers if self.agent_of(worker) == number]
        self._gone = set(gone)
        self._call(self._link_s, lambda: self._work(lambda: self._agents.went(number + 1, self._time_s())))
        for worker in gone:
            self._call(
                self._link_s,
                lambda worker=worker: self._work(lambda: self._detector.disconnected(worker, self._time_s())),  # type: ignore[misc]
            )
            for peer in self._partners(worker):
                lost = LinkLost(worker=peer, peer=worker, generation=1, detail="the peer has closed it")
                self._call(2 * self._link_s, lambda lost=lost: self._loses_link(lost))  # type: ignore[misc]

    def _partners(self, worker: int) -> list[int]:
        """Who has a link to a worker and is alive: those that hold copies of its blocks."""
        found: dict[int, None] = {}
        for block in self.job.held[worker].blocks:
            found.update(dict.fromkeys(self.job.placement.holders(block)))
        return [peer for peer in found if self.agent_of(peer) not in self._dead][:NUM_PARTNERS]

    def _loses_link(self, message: LinkLost) -> None:
        self._for_the_loss += 1
        self._comes(message, self._on_link_lost)

    def _on_link_lost(self, message: LinkLost) -> None:
        if self.core.believes(message.worker, message.peer, message.generation):
            self._detector.link_lost(message.worker, message.peer, self._time_s())
            self._tick()

    # -------------------------------------------------------------------------------------------------- the coordinator

    def _on_timer(self) -> None:
        self._call(TICK_S, self._on_timer)
        self._work(self._look)

    def _look(self) -> None:
        """Eight times a second."""
        self._agents.tick(self.core.members, self._time_s())
        self._tick()

    def _tick(self) -> None:
        now_s = self._time_s()
        found = self._detector.tick(now_s)
        suspicions = [Suspected(each.worker, each.detected_by, each.reason) for each in found]
        if suspicions:
            lost = self._agents.with_their_hosts(suspicions, self.core.members)
            assert {each.worker for each in lost} <= getattr(self, "_gone", set()), lost
            self.at.setdefault("noticed", self._time_s())
            self.suspect(lost)
        else:
            due_s = self._detector.next_tick_s(now_s) - now_s
            if due_s < TICK_S:
                self._at(now_s + max(0.005, due_s), lambda: self._work(self._tick))

    def _heard_of_agent(self, incarnation: int) -> float | None:
        if incarnation - 1 in self._dead:
            return None
        return self._time_s() - self._last_heartbeat_s.get(agent_id(incarnation), 0.0)

    def _send_to_agent(self, peer: int, message: ToAgent) -> bool:
        self._own.write(ControlFrameKind.MESSAGE, 0, encode_payload(message))
        self._own.take()
        return True

    def send(self, worker: int, message: CoreToWorker) -> None:
        """Over a connection; what is for many is encoded once, as the server has it."""
        if self._newest is None or self._newest[0] is not message:
            self._newest = (message, encode_payload(message))
        self._own.write(ControlFrameKind.MESSAGE, 0, self._newest[1])
        self._own.take()
        self.sent += 1
        if worker in self._gone:
            return
        arrives_s = self._time_s() + self._link_s
        if isinstance(message, Prepare):
            self.at["prepared"] = arrives_s
            self._at(arrives_s, lambda: self._prepared(worker, message.generation))
        elif isinstance(message, Decision):
            self.at["decided"] = max(arrives_s, self.at.get("decided", 0.0))
            self._awaited -= 1

    _newest: tuple[Any, bytes] | None = None

    def _prepared(self, worker: int, generation: int) -> None:
        report = msgspec.structs.replace(report_of(self.job, worker), generation=generation)
        self._call(self._link_s, lambda: self._reports(report))

    def _reports(self, report: Report) -> None:
        self._for_the_loss += 1
        self._comes(report, self._on_report)

    def _on_report(self, message: Report) -> None:
        self.at["reported"] = self._time_s()
        self.feed(message)

    def plan_recovery(self, question: PlanRecovery) -> None:
        """Survivors keep their stages."""
        self.answer_plan(question, plan_survivors(question, self.job.blocks, SCATTER_WIDTH))

    def now_s(self) -> float:
        """Virtual time."""
        return self._time_s()

    def persist(self, record: Record) -> None:
        """Encodes it, and waits for the store."""
        encode_payload(record)
        self._wait(self._store_s)

    def pending_work(self, step: int, asked: bool) -> PendingWork:
        """Nothing."""
        return PendingWork(evaluate=False, checkpoint=False)

    def on_new_generation(self, effect: NewGeneration) -> None:
        """As the product's driver."""
        self._detector.new_generation(self._time_s())
        for suspicion in effect.suspicions:
            self._detector.left(suspicion.worker)

    def on_decided(self, effect: Decided) -> None:
        """Nothing is shown."""

    def on_resumed(self, effect: Resumed) -> None:
        """Nothing is shown."""

    def note(self, effect: Note) -> None:
        """Nothing is shown."""

    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """All have registered before."""

    def find_checkpoint(self, question: FindCheckpoint) -> None:
        """Followers hold all that was lost."""
        raise AssertionError(question)

    def ends(self) -> Mapping[int, MemberEnd]:
        """Nobody has finished."""
        return {}

    def published_step(self) -> int:
        """Of no interest."""
        return 0

    def give_up_missing_parts(self) -> None:
        """There are no checkpoints."""

    def is_committing(self) -> bool:
        """There are no checkpoints."""
        return False

    def on_finished(self) -> None:
        """Does not come."""
        raise AssertionError

    def on_end(self, effect: End) -> None:
        """Does not come."""
        raise AssertionError(effect)


def connected_pair() -> tuple[Session[Any], Session[Any]]:
    """A peer's end of a control connection, and the coordinator's."""
    key = bytes(32)
    peer: Session[Any] = Session.dialling(key, 0, COORDINATOR, ToAgent)
    own: Session[Any] = Session.listening(key, COORDINATOR, FROM_PEERS)
    while not (peer.open and own.open):
        own.feed(peer.take())
        peer.feed(own.take())
    return peer, own


def print_table(rows: list[Row], options: argparse.Namespace) -> None:
    """For people."""
    print(
        f"round trip {options.round_trip_ms} ms, {options.store_ms} ms for a record, blocks of {options.model}; one "
        "host is killed; ms from then on"
    )
    print(
        f"{'agents':>7} {'workers':>8} {'taken in s':>10} {'messages/s':>10} {'of a core':>9} {'noticed':>8} "
        f"{'asked':>8} {'reported':>8} {'decided':>8} {'messages':>8}"
    )
    for row in rows:
        times = "".join(
            f"{each * 1e3:>9.0f}" for each in (row.noticed_s, row.prepared_s, row.reported_s, row.decided_s)
        )
        print(
            f"{row.agents:>7,} {row.workers:>8,} {row.arrive_s:>10.2f} {row.messages_per_s:>10,.0f} {row.load:>9.2f}"
            f"{times} {row.messages:>8,}"
        )


if __name__ == "__main__":
    sys.exit(main())
