"""Probe 3: do a layer's bits depend on where its parameters start? It decides the alignment of flat storage."""

import sys
from collections.abc import Iterator

import torch
from bits import bits_of, cases, make_bits_repeat
from parts import Bench, Probe, Row

PROBE = Probe(3, __file__)
OFFSETS = (0, 64, 128, 256, 512)
"""Bytes."""


def _compare(bench: Bench, what: str, library: str) -> Iterator[Row]:
    for case in cases(bench.small):
        if bench.left_s < 0:
            yield {"not reached": case.label}
            continue
        found: dict[int, object] = {}
        for offset in OFFSETS:
            places = {"parameters_at": offset} if what == "parameters" else {"values_at": offset}
            try:
                found[offset] = bits_of(case, bench.device, **places)
            except RuntimeError as error:
                found[offset] = str(error)[:200]
                break
        again = bits_of(case, bench.device) if len(found) == len(OFFSETS) else found[0]
        yield {
            "case": case.label,
            "moved": what,
            "library": library,
            "repeats": found[0] == again,
            "other_bits_at": [offset for offset in OFFSETS if found.get(offset) != found[0]],
            **({"error": error} if isinstance(error := list(found.values())[-1], str) else {}),
        }


@PROBE.part(25)
def parameters(bench: Bench) -> Iterator[Row]:
    """Parameters at each offset, as torch chooses its library."""
    make_bits_repeat()
    yield from _compare(bench, "parameters", "default")


@PROBE.part(20)
def values(bench: Bench) -> Iterator[Row]:
    """Inputs and incoming gradients at each offset."""
    make_bits_repeat()
    yield from _compare(bench, "values", "default")


@PROBE.part(20, needs_cuda="cuBLASLt is a library for GPUs")
def parameters_cublaslt(bench: Bench) -> Iterator[Row]:
    """Parameters again, all products by cuBLASLt, whose heuristics may look at addresses."""
    make_bits_repeat()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    yield from _compare(bench, "parameters", "cublaslt")


if __name__ == "__main__":
    sys.exit(PROBE.main())
