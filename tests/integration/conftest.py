"""What whole jobs have in common: how the forkserver of a script's job begins, and runs to compare with."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# What the processes of each job would load, for a second: here it is loaded once, and inherited.
import torch.fx.experimental.symbolic_shapes  # noqa: F401
from tests.integration.jobs import Calm, Job, run_job

import elaswave.checkpoints.commit
import elaswave.launcher.forkserver.worker_main  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def forked_forkservers() -> Iterator[None]:
    """Processes of tests have threads of pytest's, for which a trainer would start a fresh interpreter for each job: it
    loads torch anew, for seconds. Tests of that way ask for it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("elaswave.api.trainer.forkserver_environment", lambda: None)
        yield


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The training of the small model, with changes by dotted key, by one worker without faults: what it comes to under
    any layout and through losses. Each is run once."""
    jobs: dict[str, Job] = {}

    def run(settings: Mapping[str, Any]) -> Job:
        own = {key: value for key, value in sorted(settings.items()) if not key.startswith("layout.")}
        if repr(own) not in jobs:
            jobs[repr(own)] = run_job(tmp_path_factory.mktemp("calm"), own | {"layout.widths": [1]})
        return jobs[repr(own)]

    return run
