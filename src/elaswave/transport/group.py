"""Collectives over links. A group is a value: a list of workers and a channel; making or editing one costs no network.

All members call the same collective with the same (step, attempt, sub). Every collective is bounded in time and ends
with InterruptedWaitError, PeerLostError or WaitTimeoutError as its waits do. After such an error the content of the
tensors is undefined, and may go on changing until the transport advances its epoch.

Deliberately absent: membership and epochs; they belong to the transport and to the caller that makes the groups.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from elaswave.transport.frames import Tag
from elaswave.transport.interface import Handle, Transport

_SMALL_BYTES = 16 << 10
_PART_BYTES = 512 << 10
_ALIGN_ELEMENTS = 64
_MAX_SPARE_BYTES = 32 << 20
_OPS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, other: total.add_(other),
    "max": lambda total, other: torch.maximum(total, other, out=total),
}


class Group:
    """Some workers that compute something together.

    Args:
        transport: of this worker; must have links to the others when a collective is called.
        workers: ids of the members, in the order that all of them use; this worker is one of them.
        channel: tag space of the group; groups that share workers at a time need different ones.
    Raises:
        ValueError: this worker is not a member, or a member is named twice.
    """

    def __init__(self, transport: Transport, workers: Sequence[int], channel: int) -> None:
        self.transport = transport
        self.workers = tuple(workers)
        self.channel = channel
        if transport.worker not in self.workers or len(set(self.workers)) != len(self.workers):
            raise ValueError(
                f"a group of workers {list(self.workers)} cannot be used by worker {transport.worker}: "
                "it must name every member once, this worker included"
            )
        self.rank = self.workers.index(transport.worker)
        """Position of this worker in ``workers``."""
        self._spare: Tensor | None = None  # scratch of the last large all-reduce: fresh memory costs page faults

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.workers)

    def all_reduce(
        self, tensor: Tensor, *, step: int, attempt: int = 0, sub: int = 0, op: str = "sum", timeout_s: float
    ) -> None:
        """Replace the tensor by the sum or maximum over all members, in place; the same bits on every member.

        Integers wrap, so their sums are exact modulo 2**64 whatever the order. The order in which floats are added
        depends on the group's size and the tensor's, not on timing.

        Args:
            tensor: contiguous, the same shape and dtype on every member.
            step: of the tag.
            attempt: of the tag.
            sub: distinguishes collectives of one group in one attempt.
            op: "sum" or "max".
            timeout_s: bound in seconds for each of its waits.
        Raises:
            ValueError: another op, or a tensor that cannot be sent.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor with strides {tensor.stride()} is not contiguous: call .contiguous() first")
        combine = _OPS.get(op)
        if combine is None:
            raise ValueError(f"all_reduce knows {sorted(_OPS)}, not {op!r}: use all_reduce_with for other operations")
        if self.size == 1:
            return
        if tensor.nbytes <= _SMALL_BYTES or tensor.numel() < self.size * _ALIGN_ELEMENTS:
            self.all_reduce_with(tensor, combine, step=step, attempt=attempt, sub=sub, timeout_s=timeout_s)
        else:
            self._all_reduce_large(tensor.view(-1), combine, Tag(self.channel, step, attempt, sub), timeout_s)

    def all_reduce_with(
        self,
        tensor: Tensor,
        combine: Callable[[Tensor, Tensor], object],
        *,
        step: int,
        attempt: int = 0,
        sub: int = 0,
        timeout_s: float,
    ) -> None:
        """All-reduce with an operation of the caller's; recursive doubling, for small tensors.

        Args:
            tensor: contiguous, the same shape and dtype on every member; replaced in place.
            combine: ``combine(total, other)`` changes ``total`` in place; associative and commutative to the bit.
            step: of the tag.
            attempt: of the tag.
            sub: distinguishes collectives of one group in one attempt.
            timeout_s: bound in seconds for each of its waits.
        """
        if self.size == 1:
            return
        send, recv = self._pair(Tag(self.channel, step, attempt, sub))
        wait = self.transport.wait
        other = torch.empty_like(tensor)
        helper, lender, partners = _doubling(self.size, self.rank)
        if helper is not None:
            wait(send(helper, 0, tensor), timeout_s)
            wait(recv(helper, 1, tensor), timeout_s)
            return
        if lender is not None:
            wait(recv(lender, 0, other), timeout_s)
            combine(tensor, other)
        for turn, partner in enumerate(partners):
            wait([send(partner, 2 + turn, tensor), recv(partner, 2 + turn, other)], timeout_s)
            combine(tensor, other)
        if lender is not None:
            wait(send(lender, 1, tensor), timeout_s)

    def all_gather(
        self,
        tensor: Tensor,
        out: Sequence[Tensor] | None = None,
        *,
        step: int,
        attempt: int = 0,
        sub: int = 0,
        timeout_s: float,
    ) -> list[Tensor]:
        """All workers' tensors, in the order of ``workers``; shapes and dtypes may differ.

        Args:
            tensor: this worker's contribution; contiguous.
            out: one tensor per member to receive into; None for new memory (and ``tensor`` itself as the own entry).
            step: of the tag.
            attempt: of the tag.
            sub: distinguishes collectives of one group in one attempt.
            timeout_s: bound in seconds.
        """
        return self.all_to_all([tensor] * self.size, out, step=step, attempt=attempt, sub=sub, timeout_s=timeout_s)

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        *,
        step: int,
        attempt: int = 0,
        sub: int = 0,
        timeout_s: float,
    ) -> list[Tensor]:
        """Send ``tensors[i]`` to member i; returns what each member sent here, in the order of ``workers``.

        Args:
            tensors: one contiguous tensor per member; shapes and dtypes may differ.
            out: one tensor per member to receive into; None for new memory (and the own tensor itself).
            step: of the tag.
            attempt: of the tag.
            sub: distinguishes collectives of one group in one attempt.
            timeout_s: bound in seconds.
        Raises:
            ValueError: not one tensor per member.
        """
        if len(tensors) != self.size or (out is not None and len(out) != self.size):
            raise ValueError(
                f"got {len(tensors)} tensors to send and {len(out) if out is not None else self.size} to receive into "
                f"for {self.size} members: pass one for each"
            )
        send, recv = self._pair(Tag(self.channel, step, attempt, sub))
        received: dict[int, Handle] = {}
        for shift in range(1, self.size):
            peer = (self.rank - shift) % self.size
            received[peer] = recv(peer, 0, None if out is None else out[peer])
        handles = [send(peer, 0, tensors[peer]) for peer in self._others()]
        own = tensors[self.rank]
        if out is not None and out[self.rank] is not own:
            out[self.rank].copy_(own)
        self.transport.wait([*handles, *received.values()], timeout_s)
        if out is not None:
            return list(out)
        result = []
        for peer in range(self.size):
            tensor = own if peer == self.rank else received[peer].result
            assert tensor is not None
            result.append(tensor)
        return result

    def barrier(self, *, step: int, attempt: int = 0, sub: int = 0, timeout_s: float) -> None:
        """Return once every member has entered.

        Args:
            step: of the tag.
            attempt: of the tag.
            sub: distinguishes collectives of one group in one attempt.
            timeout_s: bound in seconds for each of its waits.
        """
        send, recv = self._pair(Tag(self.channel, step, attempt, sub))
        nothing = torch.empty(0, dtype=torch.uint8)
        distance = 1
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.transport.wait([send(to, distance, nothing), recv(source, distance, nothing)], timeout_s)
            distance *= 2

    def _all_reduce_large(
        self, flat: Tensor, combine: Callable[[Tensor, Tensor], object], tag: Tag, timeout_s: float
    ) -> None:
        """Reduce-scatter, then all-gather, each directly between all members.

        Member i reduces slice i of the tensor. Compared with a ring the bytes are the same, but there are two hops
        instead of 2 (n - 1), which is what counts when all workers of a host share its cores. Slices are cut into
        parts so that adding overlaps with transfer.
        """
        send, recv = self._pair(tag)
        wait = self.transport.wait
        slices = _cut(flat.numel(), self.size)
        part = max(_ALIGN_ELEMENTS, _PART_BYTES // flat.element_size() // _ALIGN_ELEMENTS * _ALIGN_ELEMENTS)
        mine = _parts(*slices[self.rank], part)
        others = self._others()
        # A member starts on its copy of slice i only after member i has received this worker's part of it, so that
        # the results may land where the sent values were.
        base, stop = slices[self.rank]
        scratch = self._scratch(len(others) * (stop - base), flat.dtype)
        spaces = scratch.view(len(others), stop - base)
        incoming = [
            [recv(peer, 2 * index, space[start - base : stop - base]) for peer, space in zip(others, spaces)]
            for index, (start, stop) in enumerate(mine)
        ]
        handles = []
        for peer in others:
            for index, (start, stop) in enumerate(_parts(*slices[peer], part)):
                handles.append(recv(peer, 2 * index + 1, flat[start:stop]))
        for index in range(max(len(_parts(*bounds, part)) for bounds in slices)):
            for peer in others:
                parts = _parts(*slices[peer], part)
                if index < len(parts):
                    start, stop = parts[index]
                    handles.append(send(peer, 2 * index, flat[start:stop]))
        for index, (start, stop) in enumerate(mine):
            total = flat[start:stop]
            for handle in incoming[index]:
                wait(handle, timeout_s)
                assert handle.result is not None
                combine(total, handle.result)
            handles += [send(peer, 2 * index + 1, total) for peer in others]
        wait(handles, timeout_s)
        if scratch.nbytes <= _MAX_SPARE_BYTES:  # not after an error: then late bytes may still land in it
            self._spare = scratch

    def _scratch(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        spare, self._spare = self._spare, None
        if spare is not None and spare.dtype == dtype and spare.numel() == num_elements:
            return spare
        return torch.empty(num_elements, dtype=dtype)

    def _others(self) -> list[int]:
        """Positions of the other members, each worker beginning with another one."""
        return [(self.rank + shift) % self.size for shift in range(1, self.size)]

    def _pair(
        self, tag: Tag
    ) -> tuple[Callable[[int, int, Tensor], Handle], Callable[[int, int, Tensor | None], Handle]]:
        """``send(rank, b, tensor)`` and ``recv(rank, b, out)`` under one tag."""
        transport, workers = self.transport, self.workers
        channel, step, attempt, a, _ = tag

        def send(rank: int, b: int, tensor: Tensor) -> Handle:
            return transport.send(workers[rank], Tag(channel, step, attempt, a, b), tensor)

        def recv(rank: int, b: int, out: Tensor | None) -> Handle:
            return transport.recv(workers[rank], Tag(channel, step, attempt, a, b), out)

        return send, recv


def doubling_partners(workers: Sequence[int], worker: int) -> set[int]:
    """The workers that ``Group.all_reduce_with`` needs links to.

    Args:
        workers: the group's members, in its order.
        worker: one of them.
    """
    helper, lender, partners = _doubling(len(workers), workers.index(worker))
    return {workers[rank] for rank in (helper, lender, *partners) if rank is not None}


def _doubling(size: int, rank: int) -> tuple[int | None, int | None, list[int]]:
    """Who exchanges with whom in recursive doubling.

    The largest power of two takes part; every member beyond it lends its value to a neighbour, who helps it out with
    the result.

    Returns:
        The helper of this member (then it does nothing else), the member that lends to this one, and the partners of
        this one, in order.
    """
    num_active = 1 << (size.bit_length() - 1)
    num_lenders = size - num_active
    if rank < 2 * num_lenders:
        if rank % 2 == 0:
            return rank + 1, None, []
        lender, place = rank - 1, rank // 2
    else:
        lender, place = None, rank - num_lenders
    places = [place ^ (1 << turn) for turn in range(num_active.bit_length() - 1)]
    return None, lender, [2 * at + 1 if at < num_lenders else at + num_lenders for at in places]


def _cut(num_elements: int, num_slices: int) -> list[tuple[int, int]]:
    """Half-open ranges that cover the elements, nearly equal, starting on aligned elements."""
    units = num_elements // _ALIGN_ELEMENTS
    bounds = [units * index // num_slices * _ALIGN_ELEMENTS for index in range(num_slices)] + [num_elements]
    return list(pairwise(bounds))


def _parts(start: int, stop: int, part: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most ``part`` elements."""
    return [(at, min(at + part, stop)) for at in range(start, stop, part)]
