"""Settings for all tests: one thread per process, and property tests without a time limit."""

import os

# Before torch is imported anywhere: workers run one thread, and so do the tests that compare with them.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from hypothesis import HealthCheck, settings  # noqa: E402

# Time on a shared machine says nothing about the code, so no example has a deadline.
settings.register_profile(
    "elaswave", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("elaswave")
