"""Settings for all tests: one thread per process, and property tests without a time limit."""

import gc
import os
import time
from collections.abc import Generator

# Before torch is imported anywhere: workers run one thread, and so do the tests that compare with them.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Time on a shared machine says nothing about the code, so no example has a deadline.
settings.register_profile(
    "elaswave", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("elaswave")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """While ten thousand tests are collected nothing becomes garbage, and each look for it takes half a second. What is
    there then stays for the whole session: it is looked at no more by later collections of garbage, of which each whole
    job has one, nor copied for them in processes that are forked."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What `scripts/test` has taken beside its budget. It fails nothing: machines differ."""
    if budget_s := os.environ.get("QUICK_SUITE_BUDGET_S"):
        took_s = time.time() - float(os.environ["QUICK_SUITE_BEGUN_S"])
        num_tests = sum(len(terminalreporter.getreports(outcome)) for outcome in ("passed", "failed", "skipped"))
        terminalreporter.write_line(
            f"quick suite: {num_tests} tests and lint in {took_s:.0f} s, of a budget of {budget_s} s"
        )
