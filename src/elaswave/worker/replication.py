"""Base copies: how a block gets another follower while training goes on.

The owner sends the block's state as of the last committed step at the beginning of an attempt; it travels while the
step runs. The new follower takes part in that attempt's vote with the copy and the step's reduced gradient, so the
copy counts from the commit on, with its hash checked, and never before.
"""

from collections.abc import Sequence

import torch

from elaswave.state.placement import Block, Placement
from elaswave.state.shapes import LayerShape
from elaswave.state.store import BlockStore, HeldBlock, Role
from elaswave.transport.frames import Tag
from elaswave.transport.interface import Handle, Transport
from elaswave.worker.channels import Channel


class Replication:
    """The base copies of one attempt, as one worker sees them.

    Args:
        worker: this worker's id.
        before: the placement at the last committed step.
        after: the same with the new followers.
        blocks, shapes: of the model.
        store: the blocks held here at the last committed step.
        slots: names of the optimizer's states.
    """

    def __init__(
        self,
        worker: int,
        before: Placement,
        after: Placement,
        blocks: Sequence[Block],
        shapes: Sequence[LayerShape],
        store: BlockStore,
        slots: Sequence[str],
    ) -> None:
        self._outgoing: list[tuple[int, HeldBlock]] = []
        self._incoming: list[tuple[int, HeldBlock]] = []
        names = ("master", *slots)
        for block in blocks:
            for follower in set(after.followers[block.id]) - set(before.followers[block.id]):
                owner = after.owner[block.id]
                if owner == worker:
                    self._outgoing.append((follower, store[block.id]))
                elif follower == worker:
                    empty = {name: torch.empty(block.num_elements, dtype=torch.float32) for name in names}
                    copy = HeldBlock(block, Role.FOLLOWER, shapes[block.layer], empty, version=-1)
                    self._incoming.append((owner, copy))
        self.store = BlockStore({**store.held, **{copy.block.id: copy for _, copy in self._incoming}})
        """What this worker holds once the copies are here."""

    def start(self, transport: Transport, step: int, attempt: int) -> tuple[list[Handle], list[Handle]]:
        """Begins the transfers.

        Returns:
            Handles of the sends and of the receives. The state that is sent must not change before they are done.
        """
        sends = [
            transport.send(follower, Tag(Channel.BASE_COPY, step, attempt, held.block.id, 0), list(held.slots.values()))
            for follower, held in self._outgoing
        ]
        receives = []
        for owner, copy in self._incoming:
            tag = Tag(Channel.BASE_COPY, step, attempt, copy.block.id, 0)
            receives.append(transport.recv(owner, tag, list(copy.slots.values())))
            copy.version = step - 1
        return sends, receives
