"""REDUCE and GATHER: what of each block travels between which workers, as the placement says.

REDUCE: every worker of a layer's stage sends its partial sums of each block to the block's owner; the owner adds them
up, turns the total into the mean gradient, and forwards that to the followers. GATHER: owners send new parameters to
those workers of the stage that do not hold the block themselves. One frame per layer and pair of workers.
"""

from collections.abc import Callable, Sequence

import torch

from elaswave.comm.frames import Tag
from elaswave.comm.transport import Handle, Transport
from elaswave.runtime.channels import WAIT_TIMEOUT_S, Channel
from elaswave.state.flat import FlatLayer, LayerShape
from elaswave.state.placement import Block, Placement
from elaswave.state.store import BlockStore
from elaswave.state.sums import Accumulator, reduced_gradient
from elaswave.types import Layout

_Plan = dict[tuple[int, int], list[Block]]
"""(layer, peer) -> blocks, ascending."""


class Exchange:
    """The block traffic of one worker under one layout and placement.

    Args:
        worker: this worker's id.
        layout, placement, blocks, shapes: who runs, who holds, and what.
        store: the blocks held here.
        layers: the materialised layers here, by index.
        accumulators: their partial sums.
        transport: the worker's links.
    """

    def __init__(
        self,
        worker: int,
        *,
        layout: Layout,
        placement: Placement,
        blocks: Sequence[Block],
        shapes: Sequence[LayerShape],
        store: BlockStore,
        layers: dict[int, FlatLayer],
        accumulators: dict[int, Accumulator],
        transport: Transport,
    ) -> None:
        self._worker = worker
        self._shapes = shapes
        self._store = store
        self._layers = layers
        self._accumulators = accumulators
        self._transport = transport
        self._num_microbatches = layout.num_microbatches
        self._partials_out: _Plan = {}
        self._partials_in: _Plan = {}
        self._reduced_out: _Plan = {}
        self._reduced_in: _Plan = {}
        self._parameters_out: _Plan = {}
        self._parameters_in: _Plan = {}
        self._owned: dict[int, list[Block]] = {}
        stage_workers = {layer: stage.workers for stage in layout.stages for layer in range(stage.start, stage.stop)}
        for block in blocks:
            self._plan_block(block, stage_workers[block.layer], placement)
        sum_dtype = next(iter(accumulators.values())).sum.dtype if accumulators else torch.int64
        self._buffers = {key: _buffers(plan, sum_dtype) for key, plan in self._partials_in.items()}
        self._partial_handles: dict[int, list[Handle]] = {}
        self._reduced_handles: list[Handle] = []

    def _plan_block(self, block: Block, stage_workers: tuple[int, ...], placement: Placement) -> None:
        owner, followers = placement.owner[block.id], placement.followers[block.id]
        readers = [worker for worker in stage_workers if worker != owner and worker not in followers]
        if owner == self._worker:
            self._owned.setdefault(block.layer, []).append(block)
            for peers, plan in (
                ([worker for worker in stage_workers if worker != owner], self._partials_in),
                (followers, self._reduced_out),
                (readers, self._parameters_out),
            ):
                for peer in peers:
                    plan.setdefault((block.layer, peer), []).append(block)
        else:
            if self._worker in stage_workers:
                self._partials_out.setdefault((block.layer, owner), []).append(block)
            if self._worker in followers:
                self._reduced_in.setdefault((block.layer, owner), []).append(block)
            if self._worker in readers:
                self._parameters_in.setdefault((block.layer, owner), []).append(block)

    def begin(self, step: int, attempt: int) -> None:
        """Posts the receives of REDUCE, so that frames that arrive early land where they belong."""
        self._partial_handles = {layer: [] for layer in self._owned}
        for (layer, peer), buffers in self._buffers.items():
            tag = Tag(Channel.PARTIAL_SUM, step, attempt, layer, 0)
            self._partial_handles[layer].append(self._transport.recv(peer, tag, buffers))
        self._reduced_handles = []
        for (layer, peer), blocks in self._reduced_in.items():
            gradients = [torch.empty(block.stop - block.start, dtype=torch.float32) for block in blocks]
            for block, gradient in zip(blocks, gradients, strict=True):
                self._store[block.id].gradient = gradient
            tag = Tag(Channel.REDUCED, step, attempt, layer, 0)
            self._reduced_handles.append(self._transport.recv(peer, tag, gradients))

    def send_partials(self, layer: int, step: int, attempt: int) -> list[Handle]:
        """Sends this worker's complete partial sums of a layer to the owners of its blocks."""
        tag = Tag(Channel.PARTIAL_SUM, step, attempt, layer, 0)
        total = self._accumulators[layer].sum
        return [
            self._transport.send(peer, tag, [total[block.start : block.stop] for block in blocks])
            for (sent_layer, peer), blocks in self._partials_out.items()
            if sent_layer == layer
        ]

    def reduce(self, step: int, attempt: int, exponents: Sequence[Sequence[int]]) -> list[Handle]:
        """Makes every held block's mean gradient complete; waits for the peers' partial sums.

        Args:
            exponents: grid exponents per layer of the model and tensor of the layer.
        Returns:
            Handles of the sends to followers.
        """
        sends = []
        for layer in sorted(self._owned, reverse=True):  # the order in which backward finishes layers
            self._transport.wait(self._partial_handles[layer], WAIT_TIMEOUT_S)
            peers = sorted(peer for sent_layer, peer in self._buffers if sent_layer == layer)
            own = self._accumulators.get(layer)
            for index, block in enumerate(self._owned[layer]):
                parts = [self._buffers[layer, peer][index] for peer in peers]
                if own is not None:
                    parts.insert(0, own.sum[block.start : block.stop])
                self._store[block.id].gradient = reduced_gradient(
                    _add_up(parts), self._shapes[layer], block.start, exponents[layer], self._num_microbatches
                )
            tag = Tag(Channel.REDUCED, step, attempt, layer, 0)
            for (sent_layer, peer), blocks in self._reduced_out.items():
                if sent_layer == layer:
                    gradients = [self._gradient(block) for block in blocks]
                    sends.append(self._transport.send(peer, tag, gradients))
        self._transport.wait(self._reduced_handles, WAIT_TIMEOUT_S)
        return sends

    def _gradient(self, block: Block) -> torch.Tensor:
        gradient = self._store[block.id].gradient
        assert gradient is not None
        return gradient

    def publish(self) -> None:
        """Copies the new masters of all held blocks into the layers that are materialised here."""
        for held in self._store:
            layer = self._layers.get(held.block.layer)
            if layer is not None:
                layer.flat[held.block.start : held.block.stop].copy_(held.slots["master"])

    def gather(self, step: int, attempt: int, before_send: Callable[[], None]) -> list[Handle]:
        """Sends new parameters to who needs them and waits for those needed here. To be called only after the own
        vote: until then a parameter frame stays in the transport's scratch memory.

        Args:
            before_send: called before each frame but the first is sent.
        Returns:
            Handles of the sends.
        """
        sends = []
        dtype = next(iter(self._layers.values())).flat.dtype
        for (layer, peer), blocks in self._parameters_out.items():
            tag = Tag(Channel.PARAMETERS, step, attempt, layer, 0)
            if sends:
                before_send()
            values = [self._store[block.id].slots["master"].to(dtype) for block in blocks]
            sends.append(self._transport.send(peer, tag, values))
        receives = [
            self._transport.recv(
                peer,
                Tag(Channel.PARAMETERS, step, attempt, layer, 0),
                [self._layers[layer].flat[block.start : block.stop] for block in blocks],
            )
            for (layer, peer), blocks in self._parameters_in.items()
        ]
        self._transport.wait(receives, WAIT_TIMEOUT_S)
        return sends


def _buffers(blocks: Sequence[Block], dtype: torch.dtype) -> list[torch.Tensor]:
    """Receive buffers of one frame: views into one allocation, never shared with what they will be added to, so that
    an owner can leave out a dead peer's part."""
    flat = torch.empty(sum(block.stop - block.start for block in blocks), dtype=dtype)
    return list(flat.split([block.stop - block.start for block in blocks]))


def _add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of partial sums, in a tensor of its own."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
