"""Settings that a fork would inherit are those of a fresh interpreter too."""

import decimal
import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from elaswave.launcher.forkserver.fresh import apply_settings, current_settings, flushes_denormals


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """All settings are what they were afterwards."""
    before = current_settings()
    yield
    apply_settings(before)


def product() -> float:
    """Of torch: a denormal, or zero."""
    return float((torch.full((8,), 1e-38) * 1e-3).sum())


CHANGES: dict[str, Callable[[], object]] = {
    "recursion": lambda: sys.setrecursionlimit(12_345),
    "decimal": lambda: decimal.getcontext().__setattr__("prec", 7),
    "numpy errors": lambda: np.seterr(over="raise"),
    "denormals": lambda: torch.set_flush_denormal(True),
    "type": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "deterministic.fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cuda.allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "attention, fast": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "attention, flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_travels(name: str) -> None:
    before = current_settings()
    CHANGES[name]()
    changed = pickle.loads(pickle.dumps(current_settings()))
    assert repr(changed[name]) != repr(before[name])
    apply_settings(before)
    assert repr(current_settings()[name]) == repr(before[name])
    apply_settings(changed)
    assert {key: repr(value) for key, value in current_settings().items()} == {
        key: repr(value) for key, value in changed.items()
    }


@pytest.mark.parametrize("flush", [False, True])
def test_whether_denormals_are_flushed_is_told_of_the_thread_that_asks(flush: bool) -> None:
    torch.set_flush_denormal(flush)
    assert flushes_denormals() is flush and (product() == 0) is flush
    begun: list[tuple[bool, float]] = []
    thread = threading.Thread(target=lambda: begun.append((flushes_denormals(), product())))
    torch.set_flush_denormal(flush)
    thread.start()
    torch.set_flush_denormal(not flush)
    thread.join()
    assert flushes_denormals() is not flush
    assert begun[0][0] is flush and (begun[0][1] == 0) is flush, "threads begin as the one that starts them"
