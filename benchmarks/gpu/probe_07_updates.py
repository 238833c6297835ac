"""Probe 7: the fused AdamW on thousands of views, cut at 32 and at 128 elements; hashes and norms of blocks.

It decides whether APPLY is one call for all blocks of a worker, and where blocks may be cut.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import kernels
import torch
from parts import Bench, Probe, Row, SkipPart
from timing import launches_of, time_issue, time_on_host

from elaswave.state.seals import run_hash
from elaswave.state.sums import square_sum

PROBE = Probe(7, __file__)
_NAMES = ("master", "gradient", "exp_avg", "exp_avg_sq")


def _cuts(num_blocks: int, length: int, unit: int) -> list[int]:
    """Bounds of blocks of about that length, at odd multiples of the unit, so at no larger power of two."""
    return [index * (length // (2 * unit) * 2 * unit) + (unit if index else 0) for index in range(num_blocks + 1)]


class State:
    """Masters, gradients and slots, flat, and views of them."""

    def __init__(self, bench: Bench, cuts: list[int]) -> None:
        generator = torch.Generator(bench.device).manual_seed(3)
        size = cuts[-1]
        self.flat = {
            name: torch.randn(size, generator=generator, device=bench.device).mul_(1e-2).abs_() for name in _NAMES
        }
        self.views = {name: [flat[a:b] for a, b in zip(cuts, cuts[1:])] for name, flat in self.flat.items()}
        self.step = torch.ones((), device=bench.device)

    def fused(self, first: int, last: int) -> None:
        """One call for views [first, last)."""
        views = [self.views[name][first:last] for name in _NAMES]
        _adamw(views, self.step)

    def in_calls_of(self, number: int) -> None:
        """All views, so many per call."""
        for first in range(0, len(self.views["master"]), number):
            self.fused(first, first + number)

    def foreach(self) -> None:
        """The same update by foreach operators, about."""
        master, gradient, average, square = (self.views[name] for name in _NAMES)
        torch._foreach_lerp_(average, gradient, 0.1)
        torch._foreach_mul_(square, 0.999)
        torch._foreach_addcmul_(square, gradient, gradient, 0.001)
        root = torch._foreach_sqrt(square)
        torch._foreach_add_(root, 1e-8)
        torch._foreach_addcdiv_(master, average, root, -1e-4)

    def flat_update(self) -> None:
        """As one tensor."""
        _adamw([[self.flat[name]] for name in _NAMES], self.step)


def _adamw(tensors: list[list[torch.Tensor]], step: torch.Tensor) -> None:
    master, gradient, average, square = tensors
    torch._fused_adamw_(
        master, gradient, average, square, [], [step] * len(master),
        amsgrad=False, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, maximize=False,
    )  # fmt: skip


def _shape(bench: Bench, num_parameters: int) -> tuple[int, int]:
    number = 12 if bench.small else 15_000
    return number, 1024 if bench.small else num_parameters // number


@PROBE.part(8)
def bits(bench: Bench) -> Iterator[Row]:
    """Do the bits of an update depend on where views are cut?"""
    for unit in (1, 8, 32, 128):
        cuts = _cuts(12 if bench.small else 500, 1000 if bench.small else 8192, unit)
        cut, whole = State(bench, cuts), State(bench, cuts)
        cut.fused(0, len(cuts))
        whole.flat_update()
        changed = {
            name: int((cut.flat[name] != whole.flat[name]).sum()) for name in ("master", "exp_avg", "exp_avg_sq")
        }
        yield {"cut_at": unit, "other_than_whole": changed}


@PROBE.part(30)
def updates(bench: Bench) -> Iterator[Row]:
    """15 k views of 124 M and of 1 B parameters: one call, several, one per view; foreach; one tensor."""
    for num_parameters in (124_000_000, 1_000_000_000):
        for unit in (32, 128):
            number, length = _shape(bench, num_parameters)
            state = State(bench, _cuts(number, length, unit))
            calls: dict[str, Callable[[], Any]] = {
                "one tensor": state.flat_update,
                "one call": lambda s=state, n=number: s.fused(0, n),
                "100 views a call": lambda s=state: s.in_calls_of(100),
                "one view a call": lambda s=state: s.in_calls_of(1),
                "foreach": state.foreach,
            }
            for name, call in calls.items():
                if num_parameters > 124_000_000 and name == "foreach":
                    continue
                taken = time_on_host(bench, call, bench.seconds / 30, warm_ups=1, most=10)
                row: Row = {"parameters": num_parameters, "views": number, "cut_at": unit, "by": name}
                row |= {"median_s": taken.median_s, "issue_s": time_issue(bench, call, 1)}
                yield row | ({} if name == "one view a call" else launches_of(bench, call))
            del state, calls, call
            bench.free()
        if bench.small:
            break


@PROBE.part(15)
def hashes_and_norms(bench: Bench) -> Iterator[Row]:
    """Block hashes equal to the CPU's; sums of squares; by operators, per block, and by one kernel."""
    number, length = _shape(bench, 124_000_000)
    length = length // 32 * 32
    values = torch.randn(number, length, device=bench.device)
    keys = kernels.position_keys(length, bench.device)
    table = torch.tensor([(index * length, length) for index in range(number)], device=bench.device)
    ways: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "operators": lambda: kernels.by_operators(values, keys)
    }
    why = None
    if kernels.triton is None:
        why = "triton is not installed"
    elif not bench.is_cuda and not kernels.triton.knobs.runtime.interpret:
        why = "without a GPU the kernel needs Triton's interpreter: set TRITON_INTERPRET=1"
    else:
        ways["kernel"] = lambda: kernels.by_kernel(values.view(-1), table, keys)
    for name, way in ways.items():
        hashes, squares = way()
        some = [values[index].cpu() for index in (0, 1, number - 1)]
        found = [hashes[index].item() % (1 << 64) for index in (0, 1, number - 1)]
        sums = [squares[index].item() for index in (0, 1, number - 1)]
        taken = time_on_host(bench, way, bench.seconds / 8, most=20)
        yield {
            "by": name,
            "blocks": number,
            "length": length,
            "hashes_as_on_the_cpu": found == list(map(run_hash, some)),
            "square_sums_as_on_the_cpu": sums == list(map(square_sum, some)),
            "largest_relative_difference": max(abs(a / square_sum(b) - 1) for a, b in zip(sums, some)),
            "repeats": torch.equal(way()[1], squares),
            "median_s": taken.median_s,
            "bytes_per_s": values.nbytes / taken.median_s,
        }

    def each() -> None:
        for index in range(min(number, 200)):
            kernels.by_operators(values[index : index + 1], keys)

    yield {"by": "operators, one block a call", "s_per_block": time_on_host(
        bench, each, bench.seconds / 8, most=5
    ).median_s / min(number, 200)}  # fmt: skip
    if why:
        raise SkipPart(f"the kernel was left out: {why}")


if __name__ == "__main__":
    sys.exit(PROBE.main())
