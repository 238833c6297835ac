"""The sums of gradients of one worker: its own partial sums, those of its peers, and the means that it makes of them.

A frame of partial sums has its blocks plane by plane, and ends with one 64-bit word, the coverage of what it holds.
Adjacent blocks are reduced in one go, on a device all that are owned of a layer.
Who sends what to whom is `elaswave.protocol.step.traffic`'s, and when is the machine's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from elaswave.blocks.placement import Block
from elaswave.blocks.shapes import WIDE_BITS, LayerShape
from elaswave.devices.interface import HOST, Batch, Device, batches_of, read_tensors
from elaswave.hashing import MASK64, signed64
from elaswave.protocol.step.engine import Imbalance
from elaswave.state import device_sums, sums
from elaswave.state.device_sums import DeviceAccumulator, Pieces, pieces_of
from elaswave.state.flat import HeldBlock
from elaswave.state.sums import ExactAccumulator, FloatAccumulator, Planes, Scratch, add_planes, cut, plane_dtypes

Accumulator = ExactAccumulator | DeviceAccumulator | FloatAccumulator
"""The partial sum of one unit, where its device is, as exact as the job asks for."""

_RUN_ELEMENTS = 1 << 17
"""Most elements of a run: a mebibyte of sums, which a core's own cache holds."""
_DEVICE_RUN_ELEMENTS = 1 << 23
"""The same on a device, which is kept busy by few and long operations; some 300 MiB while the mean is made."""

_DEVICE_GROUP = Batch(blocks=1 << 20, elements=_DEVICE_RUN_ELEMENTS)
_LAYOUTS_GROUPS = 1 << 12
"""Groups that are remembered, by layer and blocks: those of a layout, and some of the one before."""

_WORD_BYTES = 8
"""Of the coverage at the end of a frame of partial sums."""


class _BlockRun(NamedTuple):
    """Adjacent blocks of one layer."""

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


class _Group(NamedTuple):
    """Blocks of one layer that are reduced in one go: on the host a run; on a device any, laid side by side, since an
    owner's blocks are dealt out one by one."""

    runs: list[_BlockRun]
    blocks: list[Block]
    sizes: list[int]
    """Elements of each block."""
    num_elements: int
    """Of all blocks."""
    pieces: Pieces | None
    """On a device."""

    def cut_from(self, planes: Planes) -> Planes:
        """Cuts its elements out of a layer's planes; they are the same memory where there is one run."""
        if len(self.runs) == 1:
            return cut(planes, self.runs[0].start, self.runs[0].stop)
        return tuple(torch.cat([plane[run.start : run.stop] for run in self.runs]) for plane in planes)


class Reduction:
    """The sums of gradients of one worker.

    Args:
        worker: its id.
        blocks, shapes: of the model.
        exact: add on grids, as integers; else in float32.
        checked: keep checksums.
        width: bits of an exact sum.
        device: where the sums are.
        check: called while the device is waited for.
    """

    def __init__(
        self,
        worker: int,
        blocks: Sequence[Block],
        shapes: Sequence[LayerShape],
        *,
        exact: bool,
        checked: bool = True,
        width: int = WIDE_BITS,
        device: Device = HOST,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._balance = 0
        self._totals: list[torch.Tensor] = []
        """Checksums of totals that are on the device, and not yet part of the balance."""
        self.checked = checked
        self._device = device
        self._check = check
        self._run_elements = _RUN_ELEMENTS if device.is_host else _DEVICE_RUN_ELEMENTS
        self._add_planes = add_planes if device.is_host else device_sums.add_planes_on_device
        """Makes a total of partial sums."""
        self._worker = worker
        self._blocks = blocks
        self._shapes = shapes
        self.exact = exact
        """Whether sums are free of order."""
        self._width = width
        self._dtypes = plane_dtypes(width) if exact else (torch.float32,)
        """Of the planes of a partial sum."""
        self._scratch = Scratch() if exact and device.is_host else None
        self._accumulators: dict[int, Accumulator] = {}
        self._prepared: dict[int, Accumulator] = {}
        """Of layers that will be held later."""
        self._exponents: Sequence[Sequence[int]] = ()
        self._num_microbatches = 1
        self._slots: dict[tuple[int, int], list[torch.Tensor]] = {}
        """(layer, peer) -> the planes of the layer's owned blocks, and last the coverage."""
        self._former_slots: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Those of the attempt before: fresh memory costs page faults."""
        self._owned: dict[int, list[_Group]] = {}
        self._groups = lru_cache(maxsize=_LAYOUTS_GROUPS)(self._grouped)
        self._sent: list[tuple[int, tuple[int, ...]]] = []
        """Layer and blocks of the frames sent in this attempt."""

    @property
    def accumulators(self) -> Mapping[int, Accumulator]:
        """The own partial sums by layer. One mapping for the whole life of this object, changed only by `hold` and
        `forget`."""
        return self._accumulators

    def hold(self, layers: Sequence[int]) -> None:
        """Has sums for exactly these layers."""
        for index in set(self._accumulators) - set(layers):
            del self._accumulators[index]
        for index in sorted(set(layers) - set(self._accumulators)):
            prepared = self._prepared.pop(index, None)
            self._accumulators[index] = self._accumulator(index) if prepared is None else prepared

    def prepare(self, layer: int) -> None:
        """Makes the sums of a layer that will be held later."""
        self._prepared[layer] = self._accumulator(layer)

    def forget(self) -> None:
        """Drops all sums, and what has come from peers."""
        self._accumulators.clear()
        self._prepared.clear()
        self._slots, self._former_slots, self._owned, self._sent = {}, {}, {}, []
        self._totals.clear()

    def forget_prepared(self) -> None:
        """Drops sums that were made in advance."""
        self._prepared.clear()

    def _accumulator(self, layer: int) -> Accumulator:
        shape = self._shapes[layer]
        if not self.exact:
            return FloatAccumulator(shape, self._device.place)
        if not self._device.is_host:
            return DeviceAccumulator(shape, self._device.place, checked=self.checked, width=self._width)
        return ExactAccumulator(shape, self._scratch, checked=self.checked, width=self._width)

    def begin(self, exponents: Sequence[Sequence[int]], num_microbatches: int) -> None:
        """Begins a new attempt; the accumulators are emptied by the `Compute` that adds to them.

        Args:
            exponents: of the grids, per layer of the model and tensor of the layer.
            num_microbatches: that the means are over.
        """
        self._balance = 0
        self._totals.clear()
        self._exponents, self._num_microbatches = exponents, num_microbatches
        self._former_slots, self._slots = self._slots, {}
        self._owned = {}
        self._sent = []

    @property
    def balance(self) -> int:
        """Coverage words that were sent less those that have come, less the checksums of the totals, modulo 2**64; with
        the accumulators' checksums, and added over all workers, it is zero once all have reduced."""
        self._read([])
        return self._balance

    def _read(self, accumulators: Sequence[DeviceAccumulator]) -> None:
        """Has the device's numbers read by one wait: the figures of accumulators, and checksums of totals."""
        wanted = [each.figures for each in accumulators]
        if self._totals:
            wanted.append(torch.stack(self._totals).view(torch.float64))  # as `figures` has a checksum
        if not wanted:
            return
        (joined,) = read_tensors(self._device, [torch.cat(wanted)], self._check)
        found = joined.split([len(each) for each in wanted])
        # The last one of `found` may be that of the totals.
        for accumulator, figures in zip(accumulators, found, strict=False):
            accumulator.learn(figures)
        if self._totals:
            self._balance = (self._balance - sum(found[-1].view(torch.int64).tolist())) & MASK64
            self._totals.clear()

    def read(self) -> None:
        """Has all that the vote asks for read by one wait."""
        self._read([each for each in self._accumulators.values() if isinstance(each, DeviceAccumulator)])

    def frame(self, layer: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Makes a frame of the own partial sums of blocks of a layer, to be sent."""
        accumulator = self._accumulators[layer]
        planes, coverage = accumulator.planes, accumulator.coverage
        # Counted as it is sent and as it has come, the word shows in the balance if it has changed on the way.
        self._balance = (self._balance + coverage) & MASK64
        self._sent.append((layer, tuple(blocks)))
        word = torch.tensor([signed64(coverage)]).view(planes[0].dtype)
        runs = self.runs(blocks)
        return [*(plane[run.start : run.stop] for plane in planes for run in runs), word]

    def slot(self, layer: int, peer: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Makes the slot where a peer's partial sums arrive: one allocation per plane, never shared with what they will
        be added to, so that an owner can leave out a dead peer's part."""
        size = sum(self._blocks[block].num_elements for block in blocks)
        word = _WORD_BYTES // self._dtypes[0].itemsize
        slot = self._former_slots.get((layer, peer))
        if slot is None or len(slot[0]) != size:
            planes = [torch.empty(size, dtype=dtype, device=self._device.place) for dtype in self._dtypes]
            slot = [*planes, torch.empty(word, dtype=self._dtypes[0])]  # the coverage is for the host alone
        self._slots[layer, peer] = slot
        return slot

    def _planes_of(self, slot: Sequence[torch.Tensor], groups: Sequence[_Group]) -> list[Planes]:
        """Lists the planes of each group in a slot."""
        sizes = [group.num_elements for group in groups]
        return list(zip(*(plane.split(sizes) for plane in slot[:-1]), strict=True))

    def reduce(self, layer: int, copies: Sequence[HeldBlock], peers: Sequence[int]) -> None:
        """Makes the mean gradients of owned copies of a layer; the peers' partial sums are in their slots."""
        shape, held = self._shapes[layer], {copy.block.id: copy for copy in copies}
        self._owned[layer] = self._groups(layer, tuple(held))
        self._balance -= sum(_coverage(self._slots[layer, peer]) for peer in peers)
        for group, parts in self._parts(layer):
            total = self._add_planes(list(parts.values()))
            means = (self._exponents[layer], self._num_microbatches, shape.num_uses, self._width)
            # Checksums are made of totals after their use, so that whatever had changed before it shows.
            if group.pieces is None:
                start = group.runs[0].start
                gradient = sums.reduced_gradient(total, shape, start, *means)
                if self.checked:
                    found = sums.checksum(total, shape, start)
                    self._balance -= found
            else:
                gradient = device_sums.reduced_gradient_on_device(total, group.pieces, *means)
                if self.checked:
                    self._totals.append(device_sums.checksum_on_device(total, group.pieces))
            for block, part in zip(group.blocks, gradient.split(group.sizes), strict=True):
                held[block.id].gradient = part
        self._balance &= MASK64

    def partial_sums(self) -> int:
        """Computes what this worker has added and sent, less what has come and what it has made totals of."""
        added = sum(accumulator.checksum for accumulator in self._accumulators.values())
        return (added + self.balance) & MASK64

    def imbalance(self) -> Imbalance:
        """Finds where the sums are wrong, as they lie in memory now."""
        changed = {
            layer: (self._checksum(accumulator.sum, layer, [(0, accumulator.shape.size)]) - accumulator.checksum)
            & MASK64
            for layer, accumulator in self._accumulators.items()
        }
        return Imbalance(changed, self.in_transit(), (self.balance - self.recount()) & MASK64)

    def _checksum(self, total: torch.Tensor, layer: int, runs: Sequence[tuple[int, int]]) -> int:
        """Computes a checksum for a diagnosis, which may wait for the device."""
        shape = self._shapes[layer]
        if self._device.is_host:
            return sums.checksum(total, shape, runs[0][0])
        return int(device_sums.checksum_on_device(total, pieces_of(shape, runs))) & MASK64

    def recount(self) -> int:
        """Computes the balance as it comes from what lies in memory now, adding each partial sum up by itself."""
        sent = sum(self._accumulators[layer].coverage for layer, _ in self._sent)
        come = sum(_coverage(slot) for (layer, _), slot in self._slots.items() if layer in self._owned)
        totals = 0
        for layer in self._owned:
            for group, parts in self._parts(layer):
                runs = [(run.start, run.stop) for run in group.runs]
                totals += sum(self._checksum(self._add_planes([part]), layer, runs) for part in parts.values())
        return (sent - come - totals) & MASK64

    def in_transit(self) -> dict[int, int]:
        """Computes by block what was sent less what has come, as it lies in memory now; each frame's word is its first
        block's. Added over all workers, this is zero, modulo 2**64, unless something has changed on the way."""
        found: dict[int, int] = {}

        def note(block: int, words: int) -> None:
            found[block] = (found.get(block, 0) + words) & MASK64

        for layer, blocks in self._sent:
            accumulator = self._accumulators[layer]
            for index in blocks:
                block = self._blocks[index]
                total = self._add_planes([cut(accumulator.planes, block.start, block.stop)])
                note(index, self._checksum(total, layer, [(block.start, block.stop)]))
            note(blocks[0], accumulator.coverage)
        for (layer, _), slot in self._slots.items():
            groups = self._owned.get(layer, [])
            for group, planes in zip(groups, self._planes_of(slot, groups) if groups else (), strict=True):
                total = self._add_planes([planes])
                for block, piece in zip(group.blocks, total.split(group.sizes), strict=True):
                    note(block.id, -self._checksum(piece, layer, [(block.start, block.stop)]))
            if groups:
                note(groups[0].blocks[0].id, -_coverage(slot))
        return found

    def _parts(self, layer: int) -> Iterator[tuple[_Group, dict[int, Planes]]]:
        """Lists the blocks that this worker owns of a layer, and of each group the partial sums by the worker that has
        added them."""
        peers = sorted(peer for of, peer in self._slots if of == layer)
        # An owner need not run the layer: then it has no sum of its own.
        own, groups = self._accumulators.get(layer), self._owned[layer]
        come = {peer: self._planes_of(self._slots[layer, peer], groups) for peer in peers}
        for index, group in enumerate(groups):
            parts = {} if own is None else {self._worker: group.cut_from(own.planes)}
            yield group, parts | {peer: planes[index] for peer, planes in come.items()}

    def _grouped(self, layer: int, blocks: tuple[int, ...]) -> list[_Group]:
        """Puts ascending blocks of one layer in groups; these are made once for each layout."""
        runs = self.runs(blocks)
        if self._device.is_host:
            return [_Group([run], run.blocks, run.sizes, run.stop - run.start, None) for run in runs]
        found = []
        for some in batches_of([run.stop - run.start for run in runs], _DEVICE_GROUP):
            sizes = [size for run in runs[some] for size in run.sizes]
            pieces = pieces_of(self._shapes[layer], [(run.start, run.stop) for run in runs[some]])
            inside = [block for run in runs[some] for block in run.blocks]
            found.append(_Group(runs[some], inside, sizes, sum(sizes), pieces))
        return found

    def runs(self, blocks: Sequence[int]) -> list[_BlockRun]:
        """Lists ascending blocks of one layer as runs of adjacent ones."""
        runs: list[_BlockRun] = []
        for index in blocks:
            block = self._blocks[index]
            size = block.stop - block.start
            if runs and runs[-1].stop == block.start and block.stop - runs[-1].start <= self._run_elements:
                runs[-1].blocks.append(block)
                runs[-1].sizes.append(size)
            else:
                runs.append(_BlockRun([block], [size]))
        return runs


def _coverage(parts: Sequence[torch.Tensor]) -> int:
    """Reads the last word of a frame of partial sums."""
    return int(parts[-1].clone().view(torch.int64))
