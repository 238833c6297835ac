"""Layers through ``torch.compile``, for fixed shapes. Whether a compilation gives the bits of every other process, the
canary finds out, and again after each further compilation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class CompiledLayers:
    """The compiled modules of one worker."""

    def __init__(self) -> None:
        self._compiled: dict[int, tuple[nn.Module, Callable[[Any], Any]]] = {}
        """By layer, the module and what it has become."""
        self._num_graphs = 0

    def __call__(self, index: int, module: nn.Module) -> Callable[[Any], Any]:
        """What runs a layer; compiled at its first call.

        Args:
            index: of the layer.
            module: that the worker holds for it now.
        """
        known = self._compiled.get(index)
        if known is None or known[0] is not module:
            from torch._inductor import config  # takes a second, and only jobs that compile need it

            config.compile_threads = 1  # a pool of processes would outlive a killed worker
            known = self._compiled[index] = (module, torch.compile(module, dynamic=False))
        return known[1]

    def has_grown(self) -> bool:
        """Whether something has been compiled since this was last asked."""
        from torch._dynamo.utils import counters

        before, self._num_graphs = self._num_graphs, counters["stats"]["unique_graphs"]
        return self._num_graphs != before
