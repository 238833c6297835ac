"""Planted bugs in what is known of hosts (rules D of ``docs/protocol.md``) and of their agents (H2); see
`verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from typing import Any

import msgspec

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import CoordinatorEffect, JoinerCame, PlanRecovery, RecoveryPlan
from elaswave.protocol.membership.agent import TimeoutAction
from elaswave.protocol.membership.effects import AgentEffect, AnyRecord, PlaceTaken, SpawnJoiner, TellAgent
from elaswave.protocol.step.loop import StepLoop
from verify.planted_bugs.mutant import Mutant, with_part
from verify.simulator.agents import SimAgent
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

    def wanted(self, message: SpawnJoiner) -> None:
        self.machine.joiners.discard(message.worker)
        super().wanted(message)


class OverlooksCommits(SimAgent):
    """An agent without a coordinator does not see that its workers go on."""

    def look(self) -> TimeoutAction:
        self.num_commits = 0
        return super().look()


class WaitsForEver(SimAgent):
    """An agent without a coordinator, whose workers do nothing, stays."""

    def look(self) -> TimeoutAction:
        due = super().look()
        return TimeoutAction.NOTHING if due is TimeoutAction.END else due


class AsksAnotherIncarnation(SimCoordinator):
    """A joiner is asked for again from the agent that its node has now."""

    def tell_agent(self, effect: AgentEffect) -> None:
        agents = self.world.agents
        if isinstance(effect, TellAgent) and isinstance(effect.message, SpawnJoiner) and agents is not None:
            host = self.membership.agents.hosts.of(effect.message.worker)
            assert host is not None
            newest = next(agent for agent in agents.on_nodes if f"n{agent.node}" == host.node)
            effect = effect._replace(incarnation=newest.incarnation)
        super().tell_agent(effect)


class AsksBeforeItIsDurable(SimCoordinator):
    """An agent is asked for a joiner whose id the next coordinator does not know."""

    def persist(self, record: AnyRecord) -> None:
        if not isinstance(record, PlaceTaken):
            super().persist(record)
        else:
            self.world.see.given(record.worker, self.membership.agents.hosts.numbered(record.host).incarnation)


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
        "widths=1,1 num_microbatches=1 join_step=1 agents=2 disconnect:a1@22+1",
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
        "widths=1,1 num_microbatches=1 join_step=1 link_delay=5 restart_delay=1 agents=3 disconnect:a2@64+5 kill:a0@64",
    ),
    Mutant(
        "place-unwritten",
        "a joiner is started whose id the next coordinator does not know",
        Build(coordinator=AsksBeforeItIsDurable),
        "widths=2,1 steps=9 join_step=1 agents=2 kill:c@62 kill:a1@63",
    ),
)
