"""Probe 6: exact sums as one Triton kernel: bits, and seconds against the measured bandwidth of a copy.

Bytes per parameter moved: bfloat16 gradients added to 64, 48 and 32 bits 18, 14 and 10; put there 10, 8 and 6; float32
gradients two more each.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from parts import Bench, Probe, Row, SkipPart
from timing import Companion, time_issue, time_on_device

from elaswave.blocks.shapes import LayerShape, TensorSlot, align
from elaswave.devices import sums_kernel
from elaswave.devices.sums_kernel import Chunks, FlatRange, Gradients, add_by_kernel, add_by_operators, addresses_of
from elaswave.state.sums import ExactAccumulator, plane_dtypes

PROBE = Probe(6, __file__)
_WIDTHS = (64, 48)
_SIDE = 8192


def _sizes(bench: Bench) -> list[list[int]]:
    """Elements of the tensors of each layer: GPT-2's 124 M, or tiny."""
    c, v = (16, 40) if bench.small else (768, 50257)
    block = [c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c]
    return [[v * c, 64 * c], *([block] * (2 if bench.small else 12)), [c, c, v * c]]


class Layer:
    """One layer's sums and gradients on the device."""

    def __init__(self, bench: Bench, sizes: list[int], dtype: torch.dtype, width: int, chunk: int = 4096) -> None:
        self.runs, offset = [], 0
        for numel in sizes:
            self.runs.append(FlatRange(offset, numel))
            offset = align(offset + numel)
        device = bench.device
        self.gradients = [(torch.randn(numel, device=device) * 1e-3).to(dtype) for numel in sizes]
        self.planes = [torch.zeros(offset, dtype=each, device=device) for each in plane_dtypes(width)]
        self.maxima = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.checksum = torch.zeros(1, dtype=torch.int64, device=device)
        self.exponents = [45] * len(sizes)
        self.grids = torch.tensor(self.exponents, dtype=torch.int64, device=device)
        self.chunks = Chunks(self.runs, device, chunk)
        addresses, found, is_aligned = addresses_of(self.gradients, self.runs)
        self.found = Gradients(torch.tensor(addresses, dtype=torch.int64, device=device), found, is_aligned)
        self.numel = sum(sizes)

    def add(self, *, is_first: bool = False, warps: int = sums_kernel.NUM_WARPS) -> None:
        """By the kernel."""
        add_by_kernel(
            self.found, self.chunks, self.grids, self.planes, self.maxima, self.checksum,
            is_first=is_first, num_warps=warps,
        )  # fmt: skip

    def add_eagerly(self) -> None:
        """By torch's operators."""
        add_by_operators(self.gradients, self.runs, self.exponents, self.planes, self.maxima, self.checksum)


def _need_kernel(bench: Bench) -> None:
    if not sums_kernel.has_kernel():
        raise SkipPart("triton is not installed")
    if not bench.is_cuda:
        import triton

        if not triton.knobs.runtime.interpret:
            raise SkipPart("without a GPU the kernel needs Triton's interpreter: set TRITON_INTERPRET=1")


@PROBE.part(15)
def bits(bench: Bench) -> Iterator[Row]:
    """The kernel's, the operators' and the CPU's."""
    for dtype in (torch.bfloat16, torch.float32):
        for width in _WIDTHS:
            one, other = (Layer(bench, [1000, 4096, 7, 70001 if not bench.small else 301], dtype, width) for _ in "ab")
            slots = [TensorSlot(i, str(i), 0, (r.numel,), r.offset, r.numel, True) for i, r in enumerate(one.runs)]
            expected = ExactAccumulator(LayerShape(0, tuple(slots), len(one.planes[0])), width=width)
            expected.reset(one.exponents)
            for _ in range(3):
                assert expected.add([gradient.cpu() for gradient in one.gradients])
                other.gradients = one.gradients
                other.add_eagerly()
                if sums_kernel.has_kernel() and bench.is_cuda:
                    one.add()
            row: Row = {"gradients": str(dtype), "width": width}
            row["operators_equal"] = all(map(torch.equal, (each.cpu() for each in other.planes), expected.planes))
            if sums_kernel.has_kernel() and bench.is_cuda:
                row["kernel_equal"] = all(map(torch.equal, (each.cpu() for each in one.planes), expected.planes))
            yield row


def _copy_rate(bench: Bench) -> float:
    """Bytes per second of a copy on the device, read and written."""
    elements = 1 << (12 if bench.small else 28)
    source, target = (torch.empty(elements, dtype=torch.int32, device=bench.device) for _ in range(2))
    return 8 * elements / time_on_device(bench, lambda: target.copy_(source), 0.3 if not bench.small else 0.01).median_s


def _row(bench: Bench, rate: float, call: Callable[[], object], num_bytes: int, seconds: float, **about: object) -> Row:
    taken = time_on_device(bench, call, seconds)
    return {**about, "bytes": num_bytes, "median_s": taken.median_s, "over_copy": taken.median_s * rate / num_bytes}


@PROBE.part(40)
def in_one_launch(bench: Bench) -> Iterator[Row]:
    """All parameters of a layer, by width, type, chunk and warps; the operators beside it."""
    rate, c = _copy_rate(bench), 64 if bench.small else 4096
    yield {"copy_bytes_per_s": rate}
    sizes = [4 * c * c, c, 4 * c * c, c]
    seconds = bench.seconds / 100
    eager = Layer(bench, sizes, torch.bfloat16, 64)
    yield _row(bench, rate, eager.add_eagerly, 18 * eager.numel, seconds, by="operators", width=64)
    del eager
    _need_kernel(bench)
    for dtype in (torch.bfloat16, torch.float32):
        for width in _WIDTHS:
            for is_first in (False, True):
                layer = Layer(bench, sizes, dtype, width)
                moved = dtype.itemsize + width // 8 * (1 if is_first else 2)
                about = {"by": "kernel", "gradients": str(dtype), "width": width, "is_first": is_first}
                about["bytes_per_parameter"] = moved
                call = lambda layer=layer, first=is_first: layer.add(is_first=first)  # noqa: E731
                yield _row(bench, rate, call, moved * layer.numel, seconds, **about)
    for chunk in (2048, 4096, 8192):
        for warps in (4, 8):
            for width in _WIDTHS:
                if bench.left_s < 0:
                    return
                layer = Layer(bench, sizes, torch.bfloat16, width, chunk)
                call = lambda layer=layer, warps=warps: layer.add(warps=warps)  # noqa: E731
                moved = (2 + width // 4) * layer.numel
                yield _row(bench, rate, call, moved, seconds, by="kernel", width=width, chunk=chunk, warps=warps)


@PROBE.part(8)
def float32_sums(bench: Bench) -> Iterator[Row]:
    """Sums of float32, which are not exact, by torch: what exact ones are compared with (10 and 6 bytes)."""
    rate, numel = _copy_rate(bench), 1 << (12 if bench.small else 27)
    gradient = torch.randn(numel, device=bench.device).to(torch.bfloat16)
    total = torch.zeros(numel, device=bench.device)
    yield _row(bench, rate, lambda: total.add_(gradient), 10 * numel, 0.3 * bench.seconds, by="torch add")
    yield _row(bench, rate, lambda: total.copy_(gradient), 6 * numel, 0.3 * bench.seconds, by="torch copy")


@PROBE.part(14)
def launches(bench: Bench) -> Iterator[Row]:
    """124 M parameters in a launch per tensor, per layer, or in one; the host's time to launch and tell addresses."""
    _need_kernel(bench)
    rate, layers = _copy_rate(bench), _sizes(bench)
    groups = {
        "tensor": [[size] for layer in layers for size in layer],
        "layer": layers,
        "all": [[size for layer in layers for size in layer]],
    }
    for width in _WIDTHS:
        for per, sizes in groups.items():
            made = [Layer(bench, each, torch.bfloat16, width) for each in sizes]

            def call(made: list[Layer] = made) -> None:
                for layer in made:
                    layer.add()

            moved = (2 + width // 4) * sum(layer.numel for layer in made)
            row = _row(bench, rate, call, moved, bench.seconds / 12, launch_per=per, width=width, launches=len(made))
            yield {**row, "issue_s": time_issue(bench, call, 3)}
    addresses = list(range(16))
    pinned = torch.empty(16, dtype=torch.int64, pin_memory=bench.is_cuda)
    there = torch.empty(16, dtype=torch.int64, device=bench.device)

    def tell() -> None:
        pinned.copy_(torch.tensor(addresses))
        there.copy_(pinned, non_blocking=True)

    yield {"tell_addresses_issue_s": time_issue(bench, tell, 20 if bench.small else 1000)}


@PROBE.part(14)
def beside_products(bench: Bench) -> Iterator[Row]:
    """The kernel on one stream, matrix products on another: what each loses."""
    _need_kernel(bench)
    companion = Companion(bench, 32 if bench.small else _SIDE)
    for width in _WIDTHS:
        for sizes in (_sizes(bench)[1], [size for layer in _sizes(bench) for size in layer]):
            layer = Layer(bench, sizes, torch.bfloat16, width)
            alone = time_on_device(bench, layer.add, bench.seconds / 20)
            sum_s, product_s = companion.beside(layer.add, bench.seconds / 12)
            yield {
                "width": width,
                "parameters": layer.numel,
                "sum_alone_s": alone.median_s,
                "sum_beside_s": sum_s,
                "product_alone_s": companion.alone.median_s,
                "product_beside_s": product_s,
            }


if __name__ == "__main__":
    sys.exit(PROBE.main())
