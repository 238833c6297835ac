"""What may be drawn, and who reads the environment; and that import-linter's contracts catch what they are for.

Who may import whom is said in ``pyproject.toml`` and checked by import-linter (``scripts/lint``), which sees imports,
not what is made of them: hence the rules here, read from the syntax tree. A third test imports the pure modules for
real, since a module also runs the ``__init__`` of every package above it.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.unit.project.trees import PACKAGES, ROOT, modules

CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

PURE = tuple(CONTRACTS["pure"]["source_modules"])
SIMULATED = tuple(CONTRACTS["simulated"]["source_modules"])
"""Draw, but only from generators that they make from a seed (`random.Random`, `numpy.random.default_rng`)."""
ARRAYS = ("elaswave.planning.costs", "elaswave.planning", "elaswave_rivals", *SIMULATED)
"""May use numpy; of them only the simulators its random sources."""

READERS = ("elaswave.api", "elaswave.cli", "elaswave.models.foreign.server", "elaswave.devices.cuda", "verify.commands")
"""May look at the environment. The server of foreign parts is a program of its own; a GPU's libraries are told by a
variable, none is read."""
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def reads_environment(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ENVIRONMENT for alias in node.names):
                yield node.lineno


def arguments_with_defaults(arguments: ast.arguments) -> set[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg for argument in with_default} | {
        argument.arg for argument, default in by_name if default is not None
    }


def uses_of_random(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What is used of the module ``random`` besides a generator that is given its seed."""
    seeded = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args}
    annotations = {
        inner
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(annotation, ast.AST)
        for inner in ast.walk(annotation)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr != "Random" or node not in seeded | annotations:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            yield node.lineno, node.names[0].name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "random" and alias.asname:
                    yield node.lineno, f"* as {alias.asname}"


def uses_of_numpy_random(tree: ast.Module, *, seeded: bool) -> Iterator[tuple[int, str]]:
    """What is used of ``numpy.random``; with `seeded`, besides a generator that is given its seed."""
    given = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "random":
            if not seeded or (node.attr != "Generator" and (node.attr != "default_rng" or node not in given)):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "numpy.random":
            yield node.lineno, node.names[0].name


def violations(*packages: Path) -> list[str]:
    """One line per use of randomness or look at the environment that breaks a rule."""
    found = []
    for module, path in modules(*packages):
        source = path.read_text()
        if "random" not in source and "env" not in source:
            continue  # a tree takes time, and would have none of it
        tree = ast.parse(source, str(path))
        where = path.relative_to(next(each.parent for each in packages if path.is_relative_to(each)))
        if within(module, SIMULATED):
            for line, name in uses_of_random(tree):
                found.append(f"{where}:{line}: {module} uses random.{name}, not of a seed")
        if within(module, ARRAYS):
            for line, name in uses_of_numpy_random(tree, seeded=within(module, SIMULATED)):
                found.append(f"{where}:{line}: {module} uses numpy.random.{name}, not of a seed")
        if not within(module, READERS):
            for line in reads_environment(tree):
                found.append(f"{where}:{line}: {module} reads the environment, only cli and api may")
    return found


def test_draws_have_seeds_and_only_the_entry_points_read_the_environment():
    assert all(len(list(modules(package))) > 5 for package in PACKAGES)
    assert violations(*PACKAGES) == []


def test_no_function_assumes_a_scatter_width():
    """All members must choose the same replica peers: whoever asks must know over how many the job spreads its
    blocks."""
    assumed = [
        f"{name}.{function.name}"
        for name, path in modules(*PACKAGES)
        if "scatter_width" in (source := path.read_text())
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and "scatter_width" in arguments_with_defaults(function.args)
    ]
    assert assumed == []


def test_pure_modules_load_nothing_impure():
    """In a fresh interpreter: also what they import indirectly, and their packages' ``__init__``, load no torch."""
    pure = [module for module, _ in modules(*PACKAGES) if within(module, PURE + SIMULATED)]
    assert {
        "elaswave.planning.programs.programs",
        "elaswave.protocol.coordinator.machine",
        "verify.simulator.world",
    } <= {*pure}
    code = (
        "import importlib, sys\n"
        f"for name in {pure!r}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'socket', 'asyncio', 'multiprocessing'} & set(sys.modules)))"
    )
    path = f"import sys; sys.path[:0] = {[str(package.parent) for package in PACKAGES]!r}\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


SLIM = (
    "launcher.launcher",
    "launcher.local_job",
    "launcher.processes",
    "launcher.forkserver.server",
    "coordinator.process",
    "coordinator.records.recorder",
    "coordinator.records.checkpoints",
    "channel.client",
    "channel.server",
    "checkpoints.checkpoint",
    "channel.messages.worker",
    "job.plan",
    "data.samples",
    "faults.injection",
)
"""What launcher and coordinator import: the forkserver loads torch, for those who compute."""


@pytest.fixture(scope="module")
def slim():
    """Of a fresh interpreter that imports them one after the other: which it has imported without torch."""
    code = "".join(f"import elaswave.{name}; print({name!r}, 'torch' in sys.modules)\n" for name in SLIM)
    path = f"import sys; sys.path[:0] = {[str(package.parent) for package in PACKAGES]!r}\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("module", SLIM)
def test_launcher_and_coordinator_load_no_torch(slim, module):
    assert f"{module} False" in slim


PLANTED = {
    "elaswave/planning/cost.py": [
        ("import numpy as np\nnp.random.default_rng(1)", "2: elaswave.planning.cost uses numpy.random.default_rng"),
        ("from numpy.random import default_rng", "uses numpy.random.default_rng"),
    ],
    "verify/simulator/world.py": [
        ("import random\nrandom.random()", "2: verify.simulator.world uses random.random, not of a seed"),
        ("import numpy as np\nnp.random.default_rng()", "2: verify.simulator.world uses numpy.random.default_rng"),
        ("import numpy as np\nnp.random.seed(1)", "uses numpy.random.seed, not of a seed"),
        ("import random\nrandom.Random()", "uses random.Random, not of a seed"),
        ("import random\nmake = random.Random", "uses random.Random, not of a seed"),
        ("import random\nrandom.SystemRandom(1)", "uses random.SystemRandom, not of a seed"),
        ("from random import choice", "uses random.choice, not of a seed"),
        ("import random as r", "uses random.* as r, not of a seed"),
    ],
    "elaswave/launcher/launcher.py": [
        (
            "import os\nprint(os.environ['HOME'])",
            "2: elaswave.launcher.launcher reads the environment, only cli and api may",
        ),
        ("import os\nos.getenv('HOME')", "reads the environment"),
        ("from os import environ", "reads the environment"),
    ],
}
HARMLESS = {
    "elaswave/planning/cost.py": "import numpy as np\nnp.zeros(3)",
    "verify/simulator/world.py": "import random\nimport numpy as np\nnp.random.default_rng(7)\n"
    "rng: random.Random\ndef draw(rng: random.Random) -> random.Random: return random.Random(7)",
    "elaswave/launcher/launcher.py": "import os\nos.getpid()",
    "elaswave/cli/main.py": "import os\nos.environ.get('HOME')",
}


def plant(root: Path, files: dict[str, str]) -> list[Path]:
    for name in {*PLANTED, *HARMLESS, *files}:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, HARMLESS.get(name, "")))
    return [root / package.name for package in PACKAGES]


def test_the_guard_passes_what_is_allowed(tmp_path):
    assert violations(*plant(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("file", "code", "message"), [(file, *case) for file, cases in PLANTED.items() for case in cases]
)
def test_the_guard_catches_planted_violations(tmp_path, file, code, message):
    found = violations(*plant(tmp_path, {file: code}))
    assert found
    assert any(message in line for line in found), found
    assert all(line.startswith(f"{file}:") for line in found)


IMPORTS = {
    "layers": [
        ("elaswave/transport/link.py", "from elaswave.worker import probe"),
        ("elaswave/transport/link.py", "from elaswave.protocol import ledger"),
        ("elaswave/protocol/step/ledger.py", "from elaswave.transport import link"),
        ("elaswave/training/optimizer.py", "from elaswave.launcher import launcher"),
        ("elaswave/observability/output.py", "def late():\n    import elaswave.cli.main"),
        ("elaswave/models/gpt.py", "from elaswave.state import flat"),
        ("elaswave/data/samples.py", "from elaswave.models import gpt"),
        ("elaswave/planning/plan.py", "from elaswave.config import schema"),
        ("elaswave/types.py", "import elaswave.planning.plan"),
        ("elaswave/hashing.py", "from elaswave.errors import DataError"),
    ],
    "beside": [("elaswave/faults/injection.py", "from verify.chaos import cases")],
    "rivals": [("elaswave/planning/policy/policies.py", "from elaswave_rivals import recycle")],
    "verify": [("verify/simulator/world.py", "from verify.planted_bugs import mutant")],
    "pure": [
        ("elaswave/planning/plan.py", "import torch.nn.functional as F"),
        ("elaswave/planning/costs/layers.py", "from time import monotonic"),
        ("elaswave/protocol/step/ledger.py", "def late():\n    import random"),
        ("elaswave/protocol/step/member.py", "from asyncio import sleep"),
        ("elaswave/protocol/step/ledger.py", "from elaswave.state import flat"),  # which imports torch
        ("elaswave/blocks/placement.py", "import socket"),
        ("elaswave_rivals/recycle.py", "import time"),
    ],
    "simulated": [
        ("verify/simulator/world.py", "import time"),
        ("elaswave/sim/cluster/job.py", "import secrets"),
        ("verify/simulator/world.py", "from elaswave.state import flat"),
    ],
    "arrays": [
        ("elaswave/hashing.py", "import numpy"),
        ("elaswave/types.py", "import numpy as np"),
    ],
}


def broken_contracts(root: Path) -> tuple[set[str], str]:
    """The ids of the contracts that import-linter finds broken in a copy of the package, and all that it says."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()",
         "--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"],
        cwd=root, env={"PYTHONPATH": str(root), "PATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    broken = {id for id, contract in CONTRACTS.items() if f"{contract['name']} BROKEN" in " ".join(done.stdout.split())}
    assert bool(broken) == (done.returncode == 1), done.stdout
    return broken, done.stdout


def copy_with(folder: Path, imports: Iterable[tuple[str, str]]) -> Path:
    """A copy of the packages with code at the end of files."""
    for package in PACKAGES:
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, code in imports:
        with (folder / file).open("a") as module:
            module.write(f"\n{code}\n")
    return folder


def test_the_contracts_hold_for_a_copy(tmp_path):
    assert broken_contracts(copy_with(tmp_path, ()))[0] == set()


def test_a_room_that_no_layer_has_is_named(tmp_path):
    broken, text = broken_contracts(copy_with(tmp_path, [("elaswave/newroom.py", "import math")]))
    assert broken == {"layers"} and "newroom" in text


@pytest.fixture(scope="module")
def caught(tmp_path_factory):
    """What is said of a copy that breaks a contract at all places at once."""
    return functools.cache(lambda id: broken_contracts(copy_with(tmp_path_factory.mktemp("copy"), IMPORTS[id])))


@pytest.mark.parametrize(("id", "file", "code"), [(id, *case) for id, cases in IMPORTS.items() for case in cases])
def test_a_contract_catches_a_planted_import(caught, id, file, code):
    broken, text = caught(id)
    assert id in broken
    package, name, module = re.search(r"(?:from (\S+) import (\w+)|import (\S+))", code).groups()
    targets = [f"{package}.{name}", package] if package else [module, module.partition(".")[0]]
    importer = ".".join(Path(file).with_suffix("").parts)
    assert any(f"{importer} -> {target} (l." in text for target in targets), text
