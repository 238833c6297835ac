"""The device of device.cpp for workers: tensors that lie on a device of torch's own, though the processor computes."""

import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from elaswave.devices.interface import HOST
from elaswave.devices.loopback import Loopback

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "apart"
BUILD_TIMEOUT_S = 280


def build(folder: Path) -> Path:
    """Compiles the device; skips the test where there is no compiler.

    Returns:
        The library, for `load`.
    """
    compiler, torch_folder = shutil.which("g++"), Path(torch.__path__[0])
    if compiler is None:
        pytest.skip("there is no g++ to build a device with")
    if not (torch_folder / "include" / "ATen" / "native" / "CPUFallback.h").exists():
        pytest.skip(f"torch {torch.__version__} has come without headers")
    library = folder / "apart.so"
    command = [
        compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        "-isystem", str(torch_folder / "include"), str(SOURCE), "-o", str(library),
        "-L", str(torch_folder / "lib"), "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def load(library: Path) -> None:
    """Makes the device known to torch in this process, once for all: not in the process of the tests."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())


def _module() -> ModuleType:
    """What torch asks of a device's module; activation checkpointing, of its generator too."""
    module = ModuleType(NAME)
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [torch.bfloat16],
    }
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    module._initialized = True  # type: ignore[attr-defined]
    module.device = nullcontext  # type: ignore[attr-defined]
    module.manual_seed_all = torch.ops.apart.seed  # type: ignore[attr-defined]
    module.get_rng_state = lambda device=0: torch.ops.apart.state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=0: torch.ops.apart.set_state(state)  # type: ignore[attr-defined]
    return module


class Apart(Loopback):
    """The loopback device, late copies included, with tensors that tell where they are."""

    def __init__(self, library: Path) -> None:
        super().__init__()
        load(library)
        self.place = torch.device(NAME, 0)

    @property
    def name(self) -> str:
        """The processor's."""
        return f"apart on {HOST.name}"

    def seed(self, key: int) -> None:
        """The device's own generator, as the host's is seeded."""
        torch.ops.apart.seed(key & 0xFFFFFFFF)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.place).copy_(tensor.detach())

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copies it; what is for the host alone may lie there."""
        out.copy_(tensor.detach())
