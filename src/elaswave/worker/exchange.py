"""REDUCE and GATHER: what of each block travels between which workers, as the placement says.

REDUCE: every worker that holds a layer to run it (those of its stage, or of all stages that share it) sends its partial
sums of each block to the block's owner; the owner adds them up, turns the total into the mean gradient, and forwards
that to the followers. GATHER: owners send new parameters to those of them that do not hold the block themselves. One
frame per layer and pair of workers. A frame of partial sums ends with one 64-bit word, the coverage of what it holds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from elaswave.hashing import MASK64, signed64
from elaswave.state.flat import FlatLayer
from elaswave.state.placement import Block, Placement, holders_of_layers
from elaswave.state.shapes import LayerShape
from elaswave.state.store import BlockStore
from elaswave.state.sums import Accumulator, checksum, reduced_gradient
from elaswave.transport.frames import Tag
from elaswave.transport.interface import Handle, Transport
from elaswave.types import Layout
from elaswave.worker.activity import Activity
from elaswave.worker.channels import WAIT_TIMEOUT_S, Channel

_Plan = dict[tuple[int, int], list[Block]]
"""(layer, peer) -> blocks, ascending."""

_RUN_ELEMENTS = 1 << 17
"""Most elements of a run: a mebibyte of sums, which a core's own cache holds."""

_WORD_BYTES = 8
"""Of the coverage at the end of a frame of partial sums."""


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
        checked: keep the totals' part of the balance.
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
        checked: bool = True,
    ) -> None:
        self.balance = 0
        """Coverage words that were sent less those that have come, less the checksums of the totals, modulo 2**64; with
        the accumulators' checksums, and added over all workers, it is zero once everybody has reduced."""
        self._checked = checked
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
        self.balance = 0
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
        total, coverage = self._accumulators[layer].sum, self._accumulators[layer].coverage
        word = torch.tensor([signed64(coverage)]).view(total.dtype)
        frames = {
            peer: [*(total[run.start : run.stop] for run in _runs(blocks)), word]
            for (sent_layer, peer), blocks in self._partials_out.items()
            if sent_layer == layer
        }
        self.balance = (self.balance + coverage * len(frames)) & MASK64
        return [self._transport.send(peer, tag, parts) for peer, parts in frames.items()]

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
            self.balance -= sum(_coverage(parts) for (of, _), parts in self._buffers.items() if of == layer)
            shape = self._shapes[layer]
            for run, parts in self._parts(layer):
                total = _add_up(list(parts.values()))
                gradient = reduced_gradient(total, shape, run.start, exponents[layer], self._num_microbatches)
                if self._checked:
                    # After its use, so that whatever had changed before it shows.
                    self.balance -= checksum(total, shape, run.start)
                for block, part in zip(run.blocks, gradient.split(run.sizes), strict=True):
                    self._store[block.id].gradient = part
            tag = Tag(Channel.REDUCED, step, attempt, layer, 0)
            for (sent_layer, peer), blocks in self._reduced_out.items():
                if sent_layer == layer:
                    gradients = [self._gradient(block) for block in blocks]
                    sends.append(self._transport.send(peer, tag, gradients))
        self.balance &= MASK64
        self._wait(self._reduced_handles)
        return sends

    def recount(self) -> int:
        """The balance as it comes from what lies in memory now, adding each partial sum up by itself."""
        sent = sum(self._accumulators[layer].coverage for layer, _ in self._partials_out)
        come = sum(map(_coverage, self._buffers.values()))
        totals = 0
        for layer in self._owned:
            for run, parts in self._parts(layer):
                totals += sum(checksum(part, self._shapes[layer], run.start) for part in parts.values())
        return (sent - come - totals) & MASK64

    def in_transit(self) -> dict[int, int]:
        """By block: what was sent less what has come, as it lies in memory now; each frame's word is its first block's.
        Added over all workers, this is zero, modulo 2**64, unless something has changed on the way."""
        found = dict.fromkeys(self._store.held, 0)
        for (layer, _), blocks in self._partials_out.items():
            accumulator, shape = self._accumulators[layer], self._shapes[layer]
            for block in blocks:
                part = accumulator.sum[block.start : block.stop]
                found[block.id] = found.get(block.id, 0) + checksum(part, shape, block.start)
            found[blocks[0].id] += accumulator.coverage
        for (layer, _), buffers in self._buffers.items():
            runs = self._owned[layer]
            for run, part in zip(runs, buffers[:-1], strict=True):
                for block, piece in zip(run.blocks, part.split(run.sizes), strict=True):
                    found[block.id] -= checksum(piece, self._shapes[layer], block.start)
            found[runs[0].blocks[0].id] -= _coverage(buffers)
        return found

    def _parts(self, layer: int) -> Iterator[tuple[_Run, dict[int, torch.Tensor]]]:
        """The runs that this worker owns of a layer, and of each the partial sums by who has added them up."""
        peers = sorted(peer for of, peer in self._buffers if of == layer)
        own = self._accumulators.get(layer)
        for index, run in enumerate(self._owned[layer]):
            parts = {} if own is None else {self._worker: own.sum[run.start : run.stop]}
            yield run, parts | {peer: self._buffers[layer, peer][index] for peer in peers}

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
    """Receive buffers of one frame, one per run and last that of its coverage: views into one allocation, never shared
    with what they will be added to, so that an owner can leave out a dead peer's part."""
    sizes = [*(run.stop - run.start for run in runs), _WORD_BYTES // dtype.itemsize]
    return list(torch.empty(sum(sizes), dtype=dtype).split(sizes))


def _coverage(parts: Sequence[torch.Tensor]) -> int:
    """The last word of a frame of partial sums."""
    return int(parts[-1].clone().view(torch.int64))


def _add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of partial sums; a single one is returned itself. By numpy, which adds int64 faster than torch."""
    if len(parts) == 1:
        return parts[0]
    total = np.add(parts[0].numpy(), parts[1].numpy())
    for part in parts[2:]:
        np.add(total, part.numpy(), out=total)
    return torch.from_numpy(total)
