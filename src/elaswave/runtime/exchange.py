"""REDUCE and GATHER: what of each block travels between which workers, as the placement says.

REDUCE: every worker that holds a layer to run it (those of its stage, or of all stages that share it) sends its partial
sums of each block to the block's owner; the owner adds them up, turns the total into the mean gradient, and forwards
that to the followers. GATHER: owners send new parameters to those of them that do not hold the block themselves. One
frame per layer and pair of workers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from elaswave.comm.frames import Tag
from elaswave.comm.transport import Handle, Transport
from elaswave.runtime.activity import Activity
from elaswave.runtime.channels import WAIT_TIMEOUT_S, Channel
from elaswave.state.flat import FlatLayer, LayerShape
from elaswave.state.placement import Block, Placement, holders_of_layers
from elaswave.state.store import BlockStore
from elaswave.state.sums import Accumulator, reduced_gradient
from elaswave.types import Layout

_Plan = dict[tuple[int, int], list[Block]]
"""(layer, peer) -> blocks, ascending."""

_RUN_ELEMENTS = 1 << 17
"""Most elements of a run: a mebibyte of sums, which a core's own cache holds."""


class _Run(NamedTuple):
    """Adjacent blocks of one layer that are reduced in one go."""

    blocks: list[Block]
    sizes: list[int]
    """Elements of each block."""

    @property
    def start(self) -> int:
        """First element in the layer."""
        return self.blocks[0].start

    @property
    def stop(self) -> int:
        """One past the last element in the layer."""
        return self.blocks[-1].stop


class Exchange:
    """The block traffic of one worker under one layout and placement.

    Args:
        worker: this worker's id.
        layout, placement, blocks, shapes: who runs, who holds, and what.
        store: the blocks held here.
        layers: the materialised layers here, by index.
        accumulators: their partial sums.
        transport: the worker's links.
        activity: told for whom this worker waits.
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
        activity: Activity,
    ) -> None:
        self._worker = worker
        self._shapes = shapes
        self._store = store
        self._layers = layers
        self._accumulators = accumulators
        self._transport = transport
        self._activity = activity
        self._num_microbatches = layout.num_microbatches
        self._partials_out: _Plan = {}
        self._reduced_out: _Plan = {}
        self._reduced_in: _Plan = {}
        self._parameters_out: _Plan = {}
        self._parameters_in: _Plan = {}
        owned: dict[int, list[Block]] = {}
        members = holders_of_layers(layout)
        for block in blocks:
            self._plan_block(block, members[block.layer], placement)
            if placement.owner[block.id] == worker:
                owned.setdefault(block.layer, []).append(block)
        self._owned = {layer: _runs(held) for layer, held in owned.items()}
        sum_dtype = next(iter(accumulators.values())).sum.dtype if accumulators else torch.int64
        self._buffers = {
            (layer, peer): _buffers(runs, sum_dtype)
            for layer, runs in self._owned.items()
            for peer in members[layer]
            if peer != worker
        }
        self._partial_handles: dict[int, list[Handle]] = {}
        self._reduced_handles: list[Handle] = []

    def _plan_block(self, block: Block, members: tuple[int, ...], placement: Placement) -> None:
        owner, followers = placement.owner[block.id], placement.followers[block.id]
        readers = [worker for worker in members if worker != owner and worker not in followers]
        if owner == self._worker:
            for peers, plan in ((followers, self._reduced_out), (readers, self._parameters_out)):
                for peer in peers:
                    plan.setdefault((block.layer, peer), []).append(block)
        else:
            if self._worker in members:
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
            self._transport.send(peer, tag, [total[run.start : run.stop] for run in _runs(blocks)])
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
            self._wait(self._partial_handles[layer])
            peers = sorted(peer for sent_layer, peer in self._buffers if sent_layer == layer)
            own = self._accumulators.get(layer)
            for index, run in enumerate(self._owned[layer]):
                parts = [self._buffers[layer, peer][index] for peer in peers]
                if own is not None:
                    parts.insert(0, own.sum[run.start : run.stop])
                gradient = reduced_gradient(
                    _add_up(parts), self._shapes[layer], run.start, exponents[layer], self._num_microbatches
                )
                for block, part in zip(run.blocks, gradient.split(run.sizes), strict=True):
                    self._store[block.id].gradient = part
            tag = Tag(Channel.REDUCED, step, attempt, layer, 0)
            for (sent_layer, peer), blocks in self._reduced_out.items():
                if sent_layer == layer:
                    gradients = [self._gradient(block) for block in blocks]
                    sends.append(self._transport.send(peer, tag, gradients))
        self._wait(self._reduced_handles)
        return sends

    def _gradient(self, block: Block) -> torch.Tensor:
        gradient = self._store[block.id].gradient
        assert gradient is not None
        return gradient

    def publish(self, store: BlockStore) -> None:
        """Copies the masters of blocks into the layers that are materialised here, if those do not compute with the
        masters themselves.

        Args:
            store: the blocks held at the last committed step. Base copies under way are not among them: they are not
                parameters before the vote that counts them.
        """
        for held in store:
            layer = self._layers.get(held.block.layer)
            if layer is not None:
                parameters, master = layer.flat[held.block.start : held.block.stop], held.slots["master"]
                if parameters.data_ptr() != master.data_ptr():
                    parameters.copy_(master)

    def gather(self, step: int, attempt: int, before_send: Callable[[], None]) -> list[Handle]:
        """Sends new parameters to who needs them and waits for those needed here. To be called only after the own
        vote: until then a parameter frame stays in the transport's scratch memory.

        Args:
            before_send: called before each frame but the first is sent.
        Returns:
            Handles of the sends.
        """
        sends: list[Handle] = []
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
                [self._layers[layer].flat[run.start : run.stop] for run in _runs(blocks)],
            )
            for (layer, peer), blocks in self._parameters_in.items()
        ]
        self._wait(receives)
        return sends

    def _wait(self, handles: Sequence[Handle]) -> None:
        self._activity.wait_for(handles)
        self._transport.wait(handles, WAIT_TIMEOUT_S)


def _runs(blocks: Sequence[Block]) -> list[_Run]:
    """Ascending blocks of one layer as runs of adjacent ones."""
    runs: list[_Run] = []
    for block in blocks:
        size = block.stop - block.start
        if runs and runs[-1].stop == block.start and block.stop - runs[-1].start <= _RUN_ELEMENTS:
            runs[-1].blocks.append(block)
            runs[-1].sizes.append(size)
        else:
            runs.append(_Run([block], [size]))
    return runs


def _buffers(runs: Sequence[_Run], dtype: torch.dtype) -> list[torch.Tensor]:
    """Receive buffers of one frame: views into one allocation, never shared with what they will be added to, so that
    an owner can leave out a dead peer's part."""
    sizes = [run.stop - run.start for run in runs]
    return list(torch.empty(sum(sizes), dtype=dtype).split(sizes))


def _add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of partial sums; a single one is returned itself. By numpy, which adds int64 faster than torch."""
    if len(parts) == 1:
        return parts[0]
    total = np.add(parts[0].numpy(), parts[1].numpy())
    for part in parts[2:]:
        np.add(total, part.numpy(), out=total)
    return torch.from_numpy(total)
