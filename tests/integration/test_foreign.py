"""Foreign layers in whole jobs: the same bits under any layout and through losses; every failure of a server is its
worker's, and no server is left."""

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration import foreign_parts
from tests.integration.own import Points, computation, mean_square, train
from tests.integration.waits import WaitsFor, log_of
from torch import nn

import elaswave
from elaswave.errors import RunFolderError, WorkerError
from elaswave.launcher import launcher
from elaswave.models.foreign.layer import Foreign

PARTS = Path(foreign_parts.__file__)
OTHER_TORCH = os.environ.get("ELASWAVE_OTHER_TORCH")
"""An interpreter with another release of torch."""
JAX = os.environ.get("ELASWAVE_JAX", sys.executable)
"""An interpreter with JAX."""
ONE, FOUR = {"layout.widths": [1]}, {"layout.widths": [2, 2]}


def servers(folder: Path) -> list[int]:
    """Processes that serve a part of a test; its folder is among their options."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder).encode() in words and b"server.py" in words and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture(autouse=True)
def no_server_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    deadline_s = time.monotonic() + 60.0
    while servers(tmp_path):  # what is killed needs a processor to end
        assert time.monotonic() < deadline_s, "a server is left"
        time.sleep(0.05)


def model(folder: Path, file: Path = PARTS, **options: Any) -> list[nn.Module]:
    """Three layers in torch and one in numpy.

    Args:
        folder: where a test says what goes wrong in its servers.
    """
    torch.manual_seed(3)
    arguments = {"width": 24, "faults": str(folder)}
    part = Foreign(f"{file}:NumpyMiddle", software="numpy", options=arguments, output_shape=(24,), **options)
    return [nn.Linear(6, 24), nn.Tanh(), part, nn.Linear(24, 2)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("calm")
    return computation(train(folder / "run", ONE, model=model(folder)))


def test_neither_layout_nor_the_loss_of_the_holder_shows(tmp_path: Path) -> None:
    short = {"run.steps": 4}
    alone = computation(train(tmp_path / "one", {**ONE, **short}, model=model(tmp_path)))
    settings = {"layout.widths": [1, 1, 1], "layout.layers": [2, 1, 1], **short}
    struck = train(tmp_path / "three", settings, model=model(tmp_path), faults=["kill:1@3:backward"])
    assert computation(struck) == alone and len(struck.recoveries) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        (FOUR, ["kill:random@4:any"]),
        (FOUR, ["kill:2@3:forward", "kill:3@6:backward"]),
        ({"layout.widths": [1, 1, 1], "layout.schedule": "zero-bubble"}, ["kill:1@4:backward"]),
        ({"layout.widths": [1, 1]}, ["join@3"]),
        ({"layout.widths": [1, 1], "elastic.respawn": True}, ["kill:1@3"]),
        ({"layout.widths": [1, 2]}, ["hang:1@4"]),
    ],
    ids=str,
)
def test_the_layout_does_not_show(calm: Any, settings: dict[str, Any], faults: list[str], tmp_path: Path) -> None:
    assert computation(train(tmp_path / "run", settings, model=model(tmp_path), faults=faults)) == calm


@pytest.mark.slow
@pytest.mark.parametrize("what", ["die-forward", "die-backward", "hang-forward", "hang-backward"])
def test_a_server_that_fails_is_its_worker_s_loss(calm: Any, what: str, tmp_path: Path) -> None:
    """Once; another worker takes the layer over, with a server of its own."""
    faults = tmp_path / "faults"
    faults.mkdir()

    def strike(step: int, loss: float, metrics: Any) -> None:
        if step == 3:
            (faults / what).touch()

    result = train(tmp_path / "run", FOUR, model=model(faults, timeout_s=20.0), callbacks=[strike])
    assert computation(result) == calm
    assert len(result.recoveries) == 1
    said = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("worker-*.log"))
    assert ("has not answered within 20 s" if "hang" in what else "has ended (status 9)") in said


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_duplicate_execution_finds_a_wrong_bit(calm: Any, method: str, tmp_path: Path) -> None:
    for duplicate in (True, False):
        faults = tmp_path / f"faults-{duplicate}"
        faults.mkdir()

        def strike(step: int, loss: float, metrics: Any, faults: Path = faults) -> None:
            if step == 3:
                (faults / f"flip-{method}").touch()

        folder = tmp_path / f"run-{duplicate}"
        result = train(folder, FOUR, model=model(faults, duplicate=duplicate), callbacks=[strike])
        assert len(result.recoveries) == duplicate
        assert (computation(result) == calm) is duplicate, "without it a wrong answer counts"


@pytest.mark.slow
def test_what_the_part_raises_ends_the_job_with_it(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()

    def strike(step: int, loss: float, metrics: Any) -> None:
        if step == 3:
            (faults / "raise-backward").touch()

    with pytest.raises(WorkerError, match=r"ForeignPartError.*this part cannot go backward") as got:
        train(tmp_path / "run", FOUR, model=model(faults), callbacks=[strike])
    assert "layer 2 (2)" in str(got.value) and "micro-batch" in str(got.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_what_is_no_number_ends_the_job_or_skips_the_step_as_with_any_layer(method: str, tmp_path: Path) -> None:
    for skips in (False, True):
        faults = tmp_path / f"faults-{skips}"
        faults.mkdir()

        def strike(step: int, loss: float, metrics: Any, faults: Path = faults) -> None:
            if step == 3:
                (faults / f"nan-{method}").touch()

        folder = tmp_path / f"run-{skips}"
        settings = {**FOUR, "run.skip_nonfinite": skips}
        if not skips:
            with pytest.raises(WorkerError, match=r"NonFiniteError.*step [4-9], micro-batch") as got:
                train(folder, settings, model=model(faults), callbacks=[strike])
            assert "micro-batch" in str(got.value) and "layer" in str(got.value)
            continue
        result = train(folder, settings, model=model(faults), callbacks=[strike])
        assert sum(map(math.isnan, result.losses)) == 1 and math.isfinite(result.losses[-1])
        assert not result.recoveries, "no worker is lost for it"


@pytest.mark.slow
def test_a_joiner_whose_server_is_another_one_is_refused_by_name(tmp_path: Path) -> None:
    """The part's code is changed while the job runs: workers that run go on with servers that have the old one."""
    file = tmp_path / "foreign_parts.py"
    shutil.copy(PARTS, file)

    def change(step: int, loss: float, metrics: Any) -> None:
        if step == 3:
            file.write_text(file.read_text() + "# changed\n")

    with pytest.MonkeyPatch.context() as monkeypatch:
        run = launcher.train
        log = log_of(tmp_path / "run")
        probe = WaitsFor(log, "worker 2 is not admitted", step=12)
        monkeypatch.setattr(launcher, "train", lambda *args, **rest: run(*args, **{**rest, "probe": probe}))
        result = train(
            tmp_path / "run",
            {"layout.widths": [1, 1], "run.steps": 40},
            model=model(tmp_path, file),
            callbacks=[change],
            faults=["join@10"],
        )
    text = log.read_text()
    assert "worker 2 is not admitted: its foreign part 2 is served by numpy" in text
    assert "and the job's by numpy" in text and "install the same software" in text
    assert computation(result) == computation(
        train(tmp_path / "again", {**ONE, "run.steps": 40}, model=model(tmp_path))
    )


@pytest.mark.slow
def test_a_run_goes_on_only_with_servers_of_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "foreign_parts.py"
    shutil.copy(PARTS, file)
    whole = computation(train(tmp_path / "whole", {**ONE, "run.steps": 8}, model=model(tmp_path, file)))
    train(tmp_path / "run", {**FOUR, "run.steps": 4}, model=model(tmp_path, file))
    resumed = train(tmp_path / "run", {**ONE, "run.steps": 8}, model=model(tmp_path, file), resume=True)
    assert computation(resumed) == whole
    with file.open("a") as text:
        text.write("# changed\n")
    with pytest.raises(RunFolderError, match=r'model.foreign is \["2: numpy .*there and \["2: numpy .* here'):
        train(tmp_path / "run", {**ONE, "run.steps": 12}, model=model(tmp_path, file), resume=True)


@pytest.mark.slow
def test_evaluation_export_and_weights_are_as_with_any_layer(tmp_path: Path) -> None:
    trainer = elaswave.Trainer(
        model(tmp_path), mean_square, Points(), eval_dataset=Points(20), run_dir=tmp_path / "run",
        config={"run.steps": 4, "run.eval_every": 2, "batch.num_microbatches": 4, "layout.widths": [1, 1]},
    )  # fmt: skip
    result = trainer.train()
    assert trainer.evaluate()["loss"] == result.val_losses[4]
    fresh = nn.Sequential(*model(tmp_path, seed=9))
    result.load_into(fresh)
    state = result.state_dict()
    assert set(state) >= {"2.weight", "2.bias"} and torch.equal(fresh[2].weight, state["2.weight"])
    command = [sys.executable, "-m", "elaswave", "export", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------ other software


def has(python: str, software: str) -> bool:
    if not shutil.which(python):
        return False
    return subprocess.run([python, "-I", "-c", f"import {software}"], capture_output=True, timeout=120).returncode == 0


def several(jax: str | None = None, other_torch: str | None = None) -> list[nn.Module]:
    """A model of which numpy, a torch of its own and, where they are, JAX and another release of torch have a part."""
    torch.manual_seed(3)
    parts = [
        Foreign(f"{PARTS}:NumpyMiddle", software="numpy"),
        Foreign(f"{PARTS}:torch_middle", software="torch", python=other_torch),
    ]
    if jax is not None:
        parts.append(Foreign(f"{PARTS}:JaxMiddle", software="jax", python=jax))
    return [nn.Linear(6, 24), *parts, nn.Linear(24, 2)]


def same_under_layouts(tmp_path: Path, made: Any) -> None:
    one = computation(train(tmp_path / "one", ONE, model=made()))
    assert computation(train(tmp_path / "four", FOUR, model=made(), faults=["kill:2@3:backward"])) == one


@pytest.mark.slow
def test_numpy_and_a_torch_of_its_own_in_one_model(tmp_path: Path) -> None:
    same_under_layouts(tmp_path, several)


@pytest.mark.slow
def test_jax_in_one_model_with_them(tmp_path: Path) -> None:
    if not has(JAX, "jax"):
        pytest.skip(f"{JAX} has no jax; give an interpreter that has as ELASWAVE_JAX")
    same_under_layouts(tmp_path, lambda: several(jax=JAX))


@pytest.mark.slow
def test_two_releases_of_torch_in_one_model(tmp_path: Path) -> None:
    if OTHER_TORCH is None:
        pytest.skip("give an interpreter with another release of torch as ELASWAVE_OTHER_TORCH")
    made = several(other_torch=OTHER_TORCH)
    assert f"torch {torch.__version__}," not in made[2].kind, "it is another release"
    same_under_layouts(tmp_path, lambda: several(other_torch=OTHER_TORCH))


@pytest.mark.slow
def test_no_server_outlives_a_script_that_is_killed(tmp_path: Path) -> None:
    text = f"""
import sys
sys.path.insert(0, {str(PARTS.parents[2])!r})
from pathlib import Path
from tests.integration.test_foreign import FOUR, model
from tests.integration.own import train
folder = Path({str(tmp_path)!r})
train(folder / "run", {{**FOUR, "run.steps": 100000}}, model=model(folder))
"""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    found = servers(tmp_path)
    watched = [os.pidfd_open(pid) for pid in found]
    assert len(watched) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for descriptor in watched:
        with os.fdopen(descriptor):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(60_000), "a server lives on"
