"""Weather of a whole job: it is drawn, parsed, comes when a step is logged, passes, and ends jobs only as it may."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave.observability.processes import RunProcess, process_entry
from verify.chaos.cases import GOOD, Ending
from verify.chaos.outside import NUM_STEPS, draw_outside, judge_outside
from verify.chaos.weather import KINDS, Sky, Weather, draw_weather, is_expected, parse_weather

DRAWN = [text for seed in (0, 1, 11) for index in range(200) if (text := draw_weather(seed, index, NUM_STEPS))]


def test_drawing_is_a_function_of_seed_and_index_and_varied() -> None:
    assert [draw_weather(11, index, NUM_STEPS) for index in range(50)] == [
        draw_outside(11, index).weather for index in range(50)
    ]
    weathers = list(map(parse_weather, DRAWN))
    assert list(map(str, weathers)) == DRAWN
    assert min(Counter(weather.kind for weather in weathers).values()) > 20
    assert {weather.kind for weather in weathers} == set(KINDS)
    assert all(1 <= weather.step < NUM_STEPS for weather in weathers)
    lasting = {weather.kind for weather in weathers if weather.passes_ms is not None}
    assert lasting == {"full", "readonly", "pids"}


@pytest.mark.parametrize("text", ["hail@3", "full", "full@x", "full@3~1s"])
def test_what_is_no_weather(text: str) -> None:
    with pytest.raises(ValueError, match="is no weather: write kind@step"):
        parse_weather(text)


@pytest.mark.parametrize(
    ("weather", "code", "error", "expected"),
    [
        ("usr1@3", 138, "stopped after step 4; its newest checkpoint is of step 4", True),
        ("usr1@3", 1, "stopped after step 4", False),
        ("usr1@3", 138, None, False),
        (
            "truncate@3",
            1,
            "worker 1 was killed by SIGBUS: a file was cut short while the job reads it: /r/data/x",
            True,
        ),
        ("truncate@3", 1, "0 workers are left after the loss of workers [0]", False),
        ("full@3", 1, "the checkpoint of step 40 could not be written: No space left on device", True),
        ("readonly@3", 1, "a traceback was shown: OSError: 30", False),
        ("pids@3", 1, "the process of worker 3 cannot be started", True),
    ],
)
def test_jobs_end_only_as_their_weather_permits(weather: str, code: int, error: str | None, expected: bool) -> None:
    ending, came = Ending(exit_code=code, error=error), parse_weather(weather)
    assert is_expected(came, ending) is expected
    case = draw_outside(0, 0)
    assert (judge_outside(case, ending, Ending(), [], came).outcome == "ended by weather") is expected
    assert judge_outside(case, ending, Ending(), []).outcome not in GOOD, "it has not come"


@pytest.fixture
def launcher() -> Iterator[tuple[subprocess.Popen[bytes], RunProcess]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process, process_entry("launcher", 0, process.pid)
    process.kill()
    process.wait()


def test_a_schedulers_signal_comes_with_its_step(
    tmp_path: Path, launcher: tuple[subprocess.Popen[bytes], RunProcess]
) -> None:
    process, entry = launcher
    sky = Sky(tmp_path / "run", Weather("usr1", 3, None))
    sky.turn(2, [entry])
    assert not sky.has_come
    sky.turn(3, [entry])
    assert sky.has_come and process.wait(60) == -signal.SIGUSR1
    sky.close()


def test_a_file_of_tokens_is_cut_short(tmp_path: Path, launcher: tuple[subprocess.Popen[bytes], RunProcess]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens.bin").write_bytes(b"12345")
    sky = Sky(tmp_path, Weather("truncate", 1, None))
    sky.turn(1, [launcher[1]])
    assert sky.has_come and (tmp_path / "data" / "tokens.bin").read_bytes() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(("kind", "code"), [("full", 28), ("readonly", 30)])
def test_a_disk_that_takes_nothing_and_takes_it_again(
    tmp_path: Path, launcher: tuple[subprocess.Popen[bytes], RunProcess], kind: str, code: int
) -> None:
    run_dir = tmp_path / "run"
    sky = Sky(run_dir, parse_weather(f"{kind}@1~1ms"))
    if not sky._is_mounted:
        pytest.skip("nothing may be mounted here")
    try:
        (run_dir / "before").write_bytes(b"1")
        sky.turn(1, [launcher[1]])
        assert sky.has_come
        with pytest.raises(OSError) as caught, open(run_dir / "meanwhile", "wb") as file:
            file.write(bytes(1 << 20))
        assert caught.value.errno == code
        while sky.is_there:
            time.sleep(0.001)
            sky.turn(1, [launcher[1]])
        (run_dir / "after").write_bytes(bytes(1 << 20))
    finally:
        sky.close()
    assert (run_dir / "before").read_bytes() == b"1" and (run_dir / "after").stat().st_size == 1 << 20
    assert not os.path.ismount(run_dir)


def test_no_process_may_be_started(tmp_path: Path) -> None:
    command = (
        "import os, sys\nfor line in sys.stdin:\n try: os._exit(0) if os.fork() == 0 else print('made', flush=True)"
    )
    command += "\n except OSError as error: print(error.errno, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    sky = Sky(tmp_path / "run", Weather("pids", 1, 1))

    def ask() -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        sky.turn(1, [process_entry("launcher", 0, process.pid)])
        if not sky.has_come:
            pytest.skip("there are no control groups for this process")
        assert ask() == "11"
        while sky.is_there:
            time.sleep(0.001)
            sky.turn(1, [])
        assert ask() == "made"
    finally:
        process.communicate(timeout=60)
        sky.close()
