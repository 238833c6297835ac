"""One NVIDIA GPU. A context is made when a `Cuda` is, and never by an import.

Kernels run on the stream that is current where the worker computes; copies to and from the host have one side stream
each. A copy to the host begins behind all kernels queued so far, and what is computed after a copy to the device
waits for it there, not here.

Bits: deterministic kernels are asked for, cuBLAS has fixed workspaces, TF32 and reduced-precision sums are off, cuDNN's
attention is not used.

Readings of a GPU by NVML (``pip install 'elaswave[gpu]'``): it only reads, and needs no context.

What NVML is not there for, or refuses, is left out, and not asked for again: rights and sensors do not come later.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elaswave.devices.interface import Batch, DeviceMemory, Mark, seed_at
from elaswave.errors import DeviceError
from elaswave.types import Gauges


class Nvml:
    """One GPU, as NVML sees it.

    Args:
        uuid: of the GPU; processes may see GPUs under other numbers than NVML.
    """

    def __init__(self, uuid: str) -> None:
        self._ask: dict[str, Callable[[], Mapping[str, float]]] = {}
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except Exception:  # not installed; no driver; a GPU that it does not know
            return
        self._ask = {
            "memory": lambda: _memory(pynvml.nvmlDeviceGetMemoryInfo(handle)),
            "utilization": lambda: {"utilization": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100},
            "power": lambda: {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000},
            "energy": lambda: {"energy_j": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000},
        }

    def gauges(self) -> dict[str, Any]:
        """Fields of `elaswave.types.Gauges`, as far as they are told."""
        found: dict[str, Any] = {}
        for name, ask in list(self._ask.items()):
            try:
                found |= ask()
            except Exception:  # not supported, no right, or the GPU is gone: that is for who computes on it to say
                del self._ask[name]
        return found


def _memory(info: Any) -> dict[str, float]:
    return {"memory_used_bytes": info.used, "memory_total_bytes": info.total}


CUBLAS_WORKSPACE = ":4096:8"
"""cuBLAS then computes with fixed workspaces, and torch's deterministic algorithms include its products."""


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def has_passed(self) -> bool:
        """Asks the driver, without waiting."""
        return bool(self.event.query())

    def seconds_since(self, earlier: Mark) -> float:
        """Measures by the device's clock, to half a microsecond."""
        assert isinstance(earlier, _CudaMark)
        return float(earlier.event.elapsed_time(self.event)) * 1e-3


class Cuda:
    """See `Device` for what its methods promise.

    Args:
        index: of the GPU, among those that this process may see.
    Raises:
        DeviceError: there is no such GPU, or it cannot be used.
    """

    is_host = False
    batch = Batch(blocks=1024, elements=1 << 26)
    """By arithmetic, not measured: AdamW with clipping and decay moves 44 bytes per element, so that a full batch takes
    1 ms at 3 TB/s, and the host some milliseconds to name 1,024 blocks. By torch's sources a launch of its fused AdamW
    takes 36 blocks and more."""

    def __init__(self, index: int) -> None:
        self.place = torch.device("cuda", index)
        try:
            torch.cuda.set_device(self.place)
            use_deterministic_kernels()
            self._incoming = torch.cuda.Stream(self.place)
            self._outgoing = torch.cuda.Stream(self.place)
            torch.empty(1, device=self.place).zero_()
            self._nvml = Nvml(str(getattr(torch.cuda.get_device_properties(self.place), "uuid", "")))
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise DeviceError(f"device {self.place} cannot be used: {error}") from error

    @property
    def name(self) -> str:
        """Model, compute capability, and the versions that choose kernels. Not the number of the device."""
        found = torch.cuda.get_device_properties(self.place)
        return f"{found.name} sm_{found.major}{found.minor}, CUDA {torch.version.cuda}, cuBLAS and cuDNN of torch"

    def memory(self) -> DeviceMemory:
        """Reads the memory of all processes, as the driver sees it."""
        return DeviceMemory(*torch.cuda.mem_get_info(self.place))

    def gauges(self) -> Gauges:
        """Reads the gauges by NVML, without which it tells of memory alone; what torch knows of the own tensors asks no
        driver."""
        found = self._nvml.gauges()
        if "memory_used_bytes" not in found:
            free_bytes, total_bytes = self.memory()
            found |= {"memory_used_bytes": total_bytes - free_bytes, "memory_total_bytes": total_bytes}
        return Gauges(
            allocated_bytes=torch.cuda.memory_allocated(self.place),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.place),
            **found,
        )

    def seed(self, key: int) -> None:
        """Philox takes all 64 bits, and begins at offset 0."""
        seed_at(self.place, key)

    @contextmanager
    def generator_kept(self) -> Iterator[None]:
        """Seed and offset are the host's to read."""
        generator = torch.cuda.default_generators[self.place.index]
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies from pinned memory on the side stream; what is computed next waits for it on the device."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.place)
        self.bring_into(tensor, out)
        return out

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Does the same as `bring` into memory of the device."""
        source = tensor.detach()
        if out.device.type == "cpu":  # what is for the host alone, such as the last word of a frame, has no stream
            out.copy_(source)
            return
        if not source.is_pinned():
            pinned = self.room(source)
            source = pinned.copy_(source)
        # The memory of `out` may still be in use by kernels that are queued.
        self._incoming.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(self._incoming):
            out.copy_(source, non_blocking=True)
        out.record_stream(self._incoming)
        torch.cuda.current_stream(self.place).wait_stream(self._incoming)
        # torch's cache of pinned memory gives it to others only behind the copy.

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Makes pinned memory; torch keeps what was given back for the next call."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies on the side stream, behind what is queued now."""
        source = tensor.detach().contiguous()
        if source.device.type == "cpu":  # what the host itself has made, such as the last word of a frame
            return source.clone()
        out = self.room(source)
        self._outgoing.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(self._outgoing):
            out.copy_(source, non_blocking=True)
        source.record_stream(self._outgoing)
        return out

    def mark(self) -> Mark:
        """Sets a mark behind kernels and fetches."""
        event = torch.cuda.Event(enable_timing=True)
        self._outgoing.wait_stream(torch.cuda.current_stream(self.place))
        event.record(self._outgoing)
        return _CudaMark(event)


def num_devices() -> int:
    """GPUs that this process may see; makes no context."""
    return torch.cuda.device_count()


def use_deterministic_kernels() -> None:
    """Settings of this process under which the same call gives the same bits.

    To be called before the first handle of cuBLAS is made, which reads its setting then.
    """
    os.putenv("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # Else each tensor that is made empty is filled first, what is pinned for a frame by the host, too.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_cudnn_sdp(False)
