"""Planted bugs in what is known of hosts (rules D of ``docs/protocol.md``) and of their agents (H2); see
`verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from typing import Any

import msgspec

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import CoordinatorEffect, JoinerCame, PlanRecovery, RecoveryPlan
from elaswave.protocol.leadership.vigil import Due
from elaswave.protocol.membership.hosts import Came, Host, Hosts
from elaswave.protocol.step.loop import StepLoop
from verify.planted_bugs.mutant import Mutant, with_part
from verify.simulator.agents import HostDesk, Placed, SimAgent
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.engine import ToyCopy
from verify.simulator.run import Build


class RefillsAnywhere(StepLoop[ToyCopy]):
    """Missing followers are chosen as if all workers were on one host."""

    def replicate(self) -> None:
        layout = self.execution.layout
        self.execution.layout = msgspec.structs.replace(layout, domains=())
        super().replicate()
        self.execution.layout = layout


class _ForgetsLabels(Coordinator):
    def _on_membership(self, event: Any, now_s: float) -> list[CoordinatorEffect]:
        if isinstance(event, JoinerCame):
            event = event._replace(domain="")
        return super()._on_membership(event, now_s)


class ForgetsWhereJoinersAre(SimCoordinator):
    """The host of a joiner is not taken down."""

    core_class = _ForgetsLabels


class DecidesWithoutLabels(SimCoordinator):
    """The decision after a loss does not say where survivors are."""

    def plan(self, question: PlanRecovery) -> RecoveryPlan:
        plan = super().plan(question)
        return plan._replace(layout=msgspec.structs.replace(plan.layout, domains=()))


class ForksAgain(SimAgent):
    """An agent that is asked again for a joiner starts it again."""

    def wanted(self, worker: int) -> None:
        self.machine.joiners.discard(worker)
        super().wanted(worker)


class OverlooksCommits(SimAgent):
    """An agent without a coordinator does not see that its workers go on."""

    def look(self) -> Due:
        self.num_commits = 0
        return super().look()


class WaitsForEver(SimAgent):
    """An agent without a coordinator, whose workers do nothing, stays."""

    def look(self) -> Due:
        due = super().look()
        return Due.NOTHING if due is Due.END else due


class _AsksTheNode(HostDesk):
    def ask(self, worker: int) -> None:
        number = self._placed[worker]
        for agent in self._crew.on_nodes:
            if agent.node == number and agent.coordinator is self._coordinator:
                self._crew.down(agent, worker)


class AsksAnotherIncarnation(SimCoordinator):
    """A joiner is asked for again from the agent that its node has now."""

    desk_class = _AsksTheNode


class _HostsByNumber(Hosts):
    def of(self, worker: int) -> Host | None:
        return self._hosts.get(self._number_of.get(worker, -1))


class _KnowsHostsByNumber(HostDesk):
    hosts_class = _HostsByNumber


class TakesTheNextAgentForTheLast(SimCoordinator):
    """The next agent that has a host's number gets the workers of the last one."""

    desk_class = _KnowsHostsByNumber


class _PlacesWithoutARecord(HostDesk):
    def _persist(self, record: Came | Placed) -> None:
        if isinstance(record, Came):
            super()._persist(record)


class AsksBeforeItIsDurable(SimCoordinator):
    """An agent is asked for a joiner whose id the next coordinator does not know."""

    desk_class = _PlacesWithoutARecord


HOST_MUTANTS = (
    Mutant(
        "refill-anywhere",
        "missing followers are chosen as if all workers were on one host",
        Build(machine=with_part(RefillsAnywhere)),
        "widths=2,2 blocks_per_round=8 num_hosts=2 kill:1@0",
    ),
    Mutant(
        "joiner-unlabelled",
        "the host of a joiner is not taken down",
        Build(coordinator=ForgetsWhereJoinersAre),
        "widths=1,1 num_microbatches=1 steps=14 join_step=1 num_hosts=2",
    ),
    Mutant(
        "survivors-unlabelled",
        "the decision after a loss does not say where survivors are",
        Build(coordinator=DecidesWithoutLabels),
        "widths=2,2 blocks_per_round=8 num_hosts=2 kill:1@0",
    ),
    Mutant(
        "fork-again",
        "an agent that is asked again for a joiner starts it again",
        Build(agent=ForksAgain),
        "widths=2,1 steps=9 join_step=1 agents=2 disconnect:a0@38+5",
    ),
    Mutant(
        "overlook-commits",
        "an agent without a coordinator ends its workers though they commit steps",
        Build(agent=OverlooksCommits),
        "widths=2,1 steps=9 agents=2 orphan_delay=60 disconnect:a1@10+150",
    ),
    Mutant(
        "orphan-stays",
        "an agent without a coordinator stays though its workers commit no step",
        Build(agent=WaitsForEver),
        "widths=2,1 steps=9 agents=2 restart_delay=150 orphan_delay=40 kill:1@20 kill:c@22",
    ),
    Mutant(
        "spawn-elsewhere",
        "a joiner is asked for again from another incarnation of its node's agent",
        Build(coordinator=AsksAnotherIncarnation),
        "widths=2,1 steps=9 join_step=1 agents=2 kill:a0@98",
    ),
    Mutant(
        "host-by-number",
        "workers of a host's last agent count as those of the next one that has its number",
        Build(coordinator=TakesTheNextAgentForTheLast),
        "widths=1,1,1 num_microbatches=1 steps=7 checkpoint_every=2 ask_step=2 join_step=1 stop_step=2 seed=33582902 "
        "exit_delay=1 link_delay=1 heartbeat_bound=80 restart_delay=8 slow_worker=2 slow_by=40 commit_delay=60 "
        "agents=2 usurp:c@1+150 hang:1@13+20 usurp:c@17+20 disconnect:a1@18+150 kill:a0@70",
    ),
    Mutant(
        "place-unwritten",
        "a joiner is started whose id the next coordinator does not know",
        Build(coordinator=AsksBeforeItIsDurable),
        "widths=2,1 steps=9 join_step=1 agents=2 kill:c@62 kill:a1@63",
    ),
)
