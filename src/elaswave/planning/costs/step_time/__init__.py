"""How long a step takes: one model, three fidelities. Pure.

A worker runs the actions of its program in order and begins each one as soon as its input is there; sends never keep it
from computing. That is what an executor does, and every fidelity is about it:

- ``bound``: closed form over stages and workers, without programs; for ranking, and for any size;
- ``exact``: the programs, each worker run until it lacks an input, every transfer with its link to itself; for plans;
- ``contended``: the same, transfers that leave a worker over one link at the same time sharing it; needs events.

The last two share the actions of a step with their seconds (`StepGraph`). `elaswave.planning.programs.prediction` asks
for the step of an allocation by the fidelity's name.
"""

from typing import Literal

Fidelity = Literal["bound", "exact", "contended"]
