"""What torchrun needs to start agents of `elaswave agent` without getting in their way; see docs/agents.md.

torchrun's own rendezvous ends the agents of all nodes when one leaves, and starts all anew when one joins. Here each
node is a world of its own to torchrun, in which nobody ever waits: who takes part is the job's own business. The entry
point `torchrun.handlers` names `handler`, for ``--rdzv-backend=elaswave``. ``--rdzv-endpoint`` is where the agents dial
their coordinator, if they are not told otherwise.
"""

import os
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elaswave.api.environment import COORDINATOR_VARIABLE

BACKEND = "elaswave"


class OneNode(RendezvousHandler):
    """A rendezvous of this node alone.

    Args:
        run_id: of torchrun's job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._is_closed = False

    def get_backend(self) -> str:
        """Returns the name by which torchrun knows it."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """This node is there: at once."""
        nowhere = RendezvousStoreInfo(master_addr="127.0.0.1", master_port=0)  # for process groups, which nobody makes
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=nowhere)

    def is_closed(self) -> bool:
        """Tells whether torchrun has said that this node's part is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """This node's part is over."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Counts none: torchrun would end this node's agent for them."""
        return 0

    def get_run_id(self) -> str:
        """Returns torchrun's ``--rdzv-id``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is open."""
        return True


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Serves as the entry point: gives what makes the rendezvous of a node."""
    return _one_node


def _one_node(parameters: Any) -> RendezvousHandler:
    if parameters.endpoint:  # torchrun's children inherit it
        os.environ.setdefault(COORDINATOR_VARIABLE, parameters.endpoint)
    return OneNode(parameters.run_id)
