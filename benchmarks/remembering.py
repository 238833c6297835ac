"""A planner that is asked once about each change of a scenario, however often that scenario is simulated."""

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policy.policy_metadata import policy_metadata_of


class Remembering:
    """A planner's answers, in order.

    The questions of a simulation follow from its scenario and from the answers alone: neither what is lost nor how
    often checkpoints are taken changes them.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self.metadata = planner, policy_metadata_of(planner)
        self._answers: list[Plan | InfeasiblePlan] = []
        self._next = 0

    def again(self) -> "Remembering":
        """From the first question on."""
        self._next = 0
        return self

    def __call__(self, cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        """The plan.

        Raises:
            InfeasiblePlan: as the planner has.
        """
        if self._next == len(self._answers):
            try:
                self._answers.append(self._planner(cluster, costs, allocation, event))
            except InfeasiblePlan as problem:
                self._answers.append(problem)
        answer = self._answers[self._next]
        self._next += 1
        if isinstance(answer, InfeasiblePlan):
            raise answer
        return answer
