"""Whether a script's process may fork."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave.api.environment import environment_to_compute

SOURCE = Path(__file__).resolve().parents[3] / "src"
CODE = """
import threading, types, sys
import numpy
from elaswave.api.environment import may_fork, forkserver_environment
print(may_fork(), forkserver_environment())
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
print(may_fork())
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: False), xpu=None)
print(may_fork())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(may_fork(), forkserver_environment()["OMP_NUM_THREADS"])
"""


def test_a_process_with_a_second_thread_or_a_gpus_state_does_not_fork() -> None:
    environment = {**environment_to_compute(), "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["True None", "False", "True", "False 1"], done.stderr


def test_the_environment_of_processes_that_compute_has_one_thread_and_all_else(monkeypatch) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    monkeypatch.setenv("MY_DATA", "here")
    found = environment_to_compute()
    assert (found["MKL_NUM_THREADS"], found["OMP_NUM_THREADS"], found["MY_DATA"]) == ("1", "1", "here")
    assert os.environ["MKL_NUM_THREADS"] == "8"


HASHES = """
import os, threading
from elaswave.api.environment import hash_seed
from elaswave.api.environment import forkserver_environment
os.environ["PYTHONHASHSEED"] = "42"  # for processes to come, as scripts do it: the forkserver is none of them
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(hash_seed(), forkserver_environment()["PYTHONHASHSEED"])
"""


@pytest.mark.parametrize(
    ("options", "given", "found"),
    [
        ((), {}, "random"),
        ((), {"PYTHONHASHSEED": "random"}, "random"),
        ((), {"PYTHONHASHSEED": "0"}, "0"),
        ((), {"PYTHONHASHSEED": "17"}, "17"),
        (("-R",), {"PYTHONHASHSEED": "0"}, "random"),
        (("-E",), {"PYTHONHASHSEED": "17"}, "random"),
    ],
)
def test_the_template_has_the_hashes_that_the_script_began_with(
    options: tuple[str, ...], given: dict[str, str], found: str
) -> None:
    environment = {name: value for name, value in environment_to_compute().items() if name != "PYTHONHASHSEED"}
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{HASHES}"
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, env={**environment, **given}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [found, found], done.stderr
