"""Scripts as processes of their own: with python, with ``elaswave run``, and from a notebook's kind of process."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tests.integration.scripts import ROOT, RUN, as_a_person_has_it, members, run, script

from elaswave.cli.main import main
from elaswave.observability.processes import read_processes

HEAD = """
import torch, elaswave
from torch import nn

class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, tokens):
        return self.table(tokens)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Head(nn.Linear):
    def __init__(self):
        super().__init__(8, 16)

class Tokens:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = (torch.arange(9) * (index + 3)) % 16
        return tokens[:-1], tokens[1:]

my_map_style_dataset = Tokens()
"""
SCRIPT = (
    HEAD
    + """
def main():
    torch.manual_seed(0)
    trainer = elaswave.Trainer(
        model=[Embed(), Block(), Block(), Head()],
        loss=lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()),
        dataset=my_map_style_dataset,
        config={"run.steps": 5, "batch.num_microbatches": 8, "batch.microbatch_size": 4, "layout.widths": [1, 2]})
    result = trainer.train()
    print("digest", result.state_digest, len(result.losses), len(result.state_dict()))

if __name__ == "__main__":
    main()
"""
)
"""As an issue has it, word for word, with its default optimizer."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the script prints when python runs it."""
    folder = tmp_path_factory.mktemp("plain")
    with script(folder, SCRIPT) as path:
        return digest_of(run(folder, sys.executable, path.name))


def digest_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("digest ")]
    return line.split()


def test_a_script_runs_by_itself_and_with_the_command_whose_options_are_stronger(plain, tmp_path):
    with script(tmp_path, SCRIPT) as path:
        assert plain[2:] == ["5", "7"]
        forked = run(tmp_path, *RUN, "--set", "layout.widths=[2,2]", "--fault", "kill:2@3:any", path.name)
        assert digest_of(forked) == plain
        assert "lost in" in forked.stdout


@pytest.mark.slow
def test_a_scripts_run_is_resumed_exported_and_inspected_by_commands(plain, tmp_path, monkeypatch, capfd):
    with script(tmp_path, SCRIPT) as path:
        more = run(tmp_path, *RUN, "--run-dir", "r", "--workers", "3", "--set", "run.steps=3", path.name)
        assert digest_of(more)[2:] == ["3", "7"]
        resumed = run(tmp_path, *RUN, "--run-dir", "r", "--resume", "--json", "--set", "layout.widths=[1]", path.name)
        document = json.loads(resumed.stdout)
        assert document["state_digest"] == plain[1] and document["steps"] == 5
        assert document["throughput_tokens_per_s"] is None
        assert document["config"]["model"] == {"family": "own", "num_layers": 4, "dtype": "float32"}
        assert "data" not in document["config"] or document["config"]["data"] == {}
        assert f"digest {plain[1]}" in resumed.stderr, "what the script prints is not in the document"
        refused = run(tmp_path, *RUN, "--workers", "4", path.name)
        assert refused.returncode == 2 and "layout.widths" in refused.stderr
        monkeypatch.chdir(tmp_path)
        assert main(["train", "--resume", "--run-dir", "r"]) == 2
        assert "elaswave run --resume --run-dir r SCRIPT.py" in capfd.readouterr().err
        assert main(["export", "r", "--step", "0"]) == 2
        assert "which only the script can make" in capfd.readouterr().err
        assert main(["export", "r"]) == main(["inspect", "r"]) == 0


@pytest.mark.slow
def test_a_process_with_threads_and_a_running_loop_trains_a_cell(plain, tmp_path):
    """As a notebook has it: no file, a thread of its own, an event loop that runs, classes of ``__main__``."""
    cell = SCRIPT.replace('if __name__ == "__main__":\n    main()\n', "main()\n")
    text = f"""
import asyncio, threading, sys
threading.Thread(target=threading.Event().wait, daemon=True).start()

async def run_cell(code):
    namespace = sys.modules["__main__"].__dict__
    namespace.pop("__file__", None)
    exec(compile(code, "<cell>", "exec"), namespace)

asyncio.run(run_cell({cell!r}))
"""
    with script(tmp_path, text) as path:
        assert digest_of(run(tmp_path, sys.executable, path.name, threads=2)) == plain


@pytest.mark.slow
def test_a_training_may_run_in_a_thread(plain, tmp_path):
    text = SCRIPT.replace(
        "    main()\n", "    import threading\n    t = threading.Thread(target=main)\n    t.start(); t.join()\n"
    )
    with script(tmp_path, text) as path:
        assert digest_of(run(tmp_path, sys.executable, path.name)) == plain


def test_no_process_outlives_a_script_that_is_killed(tmp_path):
    with script(tmp_path, SCRIPT.replace('"run.steps": 5', '"run.steps": 100000')) as path:
        process = subprocess.Popen(
            [*RUN, "--run-dir", "r", path.name], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, start_new_session=True,
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + 60
            while time.monotonic() < deadline_s and len(read_processes(tmp_path / "r")) < 6:
                time.sleep(0.05)
            assert len(read_processes(tmp_path / "r")) == 6
            process.kill()
            process.wait()
            while time.monotonic() < deadline_s and members(process.pid):
                time.sleep(0.05)
            assert members(process.pid) == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "options", "code", "message"),
    [
        ("x = 1\n", (), 2, "train.py has not trained: a script for `elaswave run` calls elaswave.Trainer(...).train()"),
        ("import sys\nsys.exit(7)\n", (), 7, ""),
        ("def f():\n    raise OSError('mine')\nf()\n", (), 1, "train.py\", line 2, in f"),
        pytest.param(
            SCRIPT.replace("    main()\n", "    main()\n    main()\n"), ("--run-dir", "r"), 2, "trains a second time",
            marks=pytest.mark.slow,
        ),
        (SCRIPT.replace('"run.steps"', '"run.stepz"'), (), 2, "run.stepz: unknown key; did you mean run.steps?"),
        pytest.param(
            SCRIPT.replace("return self.table(tokens)", "raise LookupError('odd')"), (), 1, "LookupError: odd",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["never", "exits", "raises", "twice", "configuration", "layer"],
)  # fmt: skip
def test_ends_of_scripts(text, options, code, message, tmp_path):
    with script(tmp_path, text) as path:
        done = run(tmp_path, *RUN, *options, path.name)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "runpy" not in done.stderr and done.stderr.count("LookupError: odd") in (0, 2), done.stderr


def test_a_script_that_is_not_there_and_its_own_arguments(tmp_path):
    done = run(tmp_path, *RUN, "no.py")
    assert done.returncode == 2 and "there is no script no.py" in done.stderr
    done = run(tmp_path, *RUN, "--worker-s", "4", "no.py")
    assert done.returncode == 2 and "--worker-s" in done.stderr and "--workers" in done.stderr
    with script(tmp_path, "import sys\nprint(sys.argv, sys.path[0], __name__)\nsys.exit(0)\n") as path:
        done = run(tmp_path, *RUN, path.name, "--workers", "x", "--json", "-h")
    assert done.stdout.strip() == f"['train.py', '--workers', 'x', '--json', '-h'] {tmp_path} __main__"


@pytest.mark.slow
def test_the_script_on_the_page_runs(tmp_path):
    text, *_ = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "own-models.md").read_text(), re.M | re.S)
    with script(tmp_path, text) as path:
        done = run(tmp_path, *RUN, "--run-dir", "r", path.name)
    assert done.returncode == 0 and "finished 20 steps" in done.stdout, done.stderr
    planned = run(tmp_path, *RUN[:-1], "plan", "r", "--lose", "1", "--json")
    assert planned.returncode == 0, planned.stderr
    document = json.loads(planned.stdout)
    assert document["before"]["throughput_unit"] == "samples/s" and document["after"]["throughput"] > 0


PROBE = """
import json, os, signal, sys
import numpy
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")),
    "hashes": [hash("a"), os.environ["PYTHONHASHSEED"]],
    "pid": os.getpid(),
    "arguments": sys.argv,
    "options": [sys.flags.optimize, sys._xoptions],
    "hangup": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
}), flush=True)
signal.raise_signal(signal.SIGTERM) if sys.argv[1] == "end" else sys.exit(7)
"""
ELASWAVE = ("-O", "-X", "utf8", "-m", "elaswave", "run")


@pytest.mark.parametrize("command", [(sys.executable, *ELASWAVE), RUN])
def test_the_command_begins_anew_once_with_one_thread_and_fixed_hashes(tmp_path, command):
    """As a person starts it: without the variables that tests export."""
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    shell = 'trap "" HUP; exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", *command, path.name, "exit", "--a", "b c"],
        cwd=tmp_path, env=as_a_person_has_it(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 7, errors
    found = json.loads(out)
    given = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"],
        env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found["hashes"] == [int(given.stdout), "0"]
    assert (found["threads"], found["pid"], found["hangup"]) == (1, process.pid, True)
    assert found["arguments"] == [path.name, "exit", "--a", "b c"]
    assert found["options"] == ([1, {"utf8": True}] if command[1] == "-O" else [0, {}])


def test_a_seed_that_is_given_is_kept_and_a_signal_tells(tmp_path):
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    done = run(tmp_path, *RUN, path.name, "end", environment={**as_a_person_has_it(), "PYTHONHASHSEED": "5"})
    assert done.returncode == 143, done.stderr
    found = json.loads(done.stdout)
    assert found["hashes"][1] == "5" and found["threads"] == 1


def test_no_command_has_threads_of_numeric_libraries(tmp_path):
    """Also those that read a configuration, or speak with agents, before they start processes."""
    code = """
import os, sys
from elaswave.cli.main import COMMANDS, main
assert "numpy" not in sys.modules
for verb in COMMANDS:
    assert main([verb, "--help"]) == 0
print("numpy" in sys.modules, len(os.listdir("/proc/self/task")), file=sys.stderr)
"""
    done = run(tmp_path, sys.executable, "-c", code, environment=as_a_person_has_it())
    assert done.stderr.split() == ["True", "1"]
    agent = run(tmp_path, sys.executable, "-c", AGENT, "--help", environment=as_a_person_has_it())
    assert agent.stderr.split() == ["True", "1"], agent.stderr


AGENT = """
import os, runpy, sys
try:
    runpy.run_module("elaswave.agent", run_name="__main__", alter_sys=True)
except SystemExit as error:
    assert error.code == 0
print("numpy" in sys.modules, len(os.listdir("/proc/self/task")), file=sys.stderr)
"""


VOCABULARY = """
import os, sys, threading
import torch, elaswave
from torch import nn

WORDS = [f"word {index}" for index in range(200)]
ORDER = list(set(WORDS))
"In the script's process."
if sys.argv[1] == "seeds":  # as scripts do that have read what Python's manual says of reproducible runs
    os.environ["PYTHONHASHSEED"] = "42"

class Words:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        vocabulary = list(set(WORDS))
        if vocabulary != ORDER:
            raise ValueError("another order")
        place = vocabulary.index(WORDS[index]) / 200
        return torch.tensor([place]), torch.tensor([1.0 - place])

def losses(words):
    torch.manual_seed(0)
    trainer = elaswave.Trainer([nn.Linear(1, 4), nn.Linear(4, 1)], nn.functional.mse_loss, words, config={
        "run.steps": 2, "batch.num_microbatches": 2, "batch.microbatch_size": 4, "layout.widths": [1]})
    return trainer.train().losses

def main():
    words = Words()
    words.lock = threading.Lock()  # which can be sent to no other interpreter
    forked = losses(words)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("equal", forked == losses(Words()))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_command_forks_and_sets_of_texts_have_one_order_everywhere(tmp_path):
    """Without the variables that tests export the script's process has one thread, and forks; beside a thread the
    forkserver is a fresh interpreter, with the same hashes."""
    with script(tmp_path, VOCABULARY) as path:
        done = run(tmp_path, *RUN, path.name, "seeds", environment=as_a_person_has_it())
        assert done.returncode == 0, done.stdout + done.stderr
        assert "equal True" in done.stdout
