"""Who may import whom: pure planning, one direction of dependencies, one reader of the environment.

Imports are read from the syntax tree, wherever in a file they stand, so nothing has to be installed or run. A second
test imports the pure modules for real, since a module also runs the ``__init__`` of every package above it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "src" / "elaswave"

PURE = (
    "elaswave.types",
    "elaswave.errors",
    "elaswave.hashing",
    "elaswave.costs",
    "elaswave.planning",
    "elaswave.protocol",
    "elaswave.state.placement",
    "elaswave.state.chunks",
    "elaswave.state.shapes",
)
"""The kernel: what may import nothing of elaswave but itself, and nothing impure from outside."""

SIMULATED = ("elaswave.sim",)
"""As pure as the kernel, on which it stands, except that it draws: from generators that it makes from a seed
(`random.Random`), and by nothing else of ``random``."""

ARRAYS = ("elaswave.costs", "elaswave.planning", "elaswave.sim")
"""May use numpy, which computes for a million workers at once; not its random sources, but for generators that the
simulator makes from a seed (`numpy.random.default_rng`)."""

IMPURE = {
    "torch and numpy": {"torch", "numpy"},
    "sockets": {"socket", "socketserver", "ssl", "select", "selectors", "http", "urllib"},
    "event loops, threads and processes": {"asyncio", "threading", "_thread", "concurrent", "multiprocessing",
                                           "subprocess", "signal", "queue", "sched"},
    "clocks": {"time", "datetime", "zoneinfo", "calendar"},
    "random sources": {"random", "secrets", "uuid"},
    "the system": {"os", "sys", "pathlib", "io", "tempfile", "shutil", "logging", "warnings"},
}  # fmt: skip

FORBIDDEN = {
    "elaswave.transport": ("elaswave.protocol", "elaswave.worker", "elaswave.control", "elaswave.cli"),
    "elaswave.state": ("elaswave.protocol", "elaswave.worker", "elaswave.control", "elaswave.cli"),
    "elaswave.protocol": ("elaswave.transport", "elaswave.worker", "elaswave.control", "elaswave.cli"),
    "elaswave.worker": ("elaswave.control", "elaswave.cli"),
}
"""Layers that must not know those above them."""

ALLOWED = {
    "elaswave.models": ("elaswave.models", "elaswave.types", "elaswave.errors", "elaswave.hashing"),
    "elaswave.data": ("elaswave.data", "elaswave.types", "elaswave.errors", "elaswave.hashing"),
    "elaswave.types": ("elaswave.hashing", "elaswave.errors"),
    "elaswave.errors": (),
    "elaswave.hashing": (),
}
"""Layers that may import only these of elaswave."""

ENTRY_POINTS = ("elaswave.cli", "elaswave.__main__")
"""The only ones that may import ``elaswave.cli``."""

ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(module: str, path: Path, tree: ast.Module, known: set[str]) -> Iterator[tuple[str, int]]:
    """Every imported module with its line; ``from package import name`` counts as package.name if that is a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in known else base), node.lineno


def reads_environment(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ENVIRONMENT for alias in node.names):
                yield node.lineno


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


def impurity(module: str, imported: str, impure: dict[str, str]) -> str | None:
    """Why a pure module may not import another from outside, or None."""
    top = imported.split(".")[0]
    return None if top == "numpy" and within(module, ARRAYS) else impure.get(top)


def violations(package: Path) -> list[str]:
    """One line per import or look at the environment that breaks a rule."""
    found = []
    impure = {name: kind for kind, names in IMPURE.items() for name in names}
    known = {module for module, _ in modules(package)}
    for module, path in modules(package):
        tree = ast.parse(path.read_text(), str(path))
        if within(module, SIMULATED):
            for line, name in uses_of_random(tree):
                found.append(f"{path.relative_to(package.parent)}:{line}: {module} uses random.{name}, not of a seed")
        if within(module, ARRAYS):
            for line, name in uses_of_numpy_random(tree, seeded=within(module, SIMULATED)):
                where = f"{path.relative_to(package.parent)}:{line}: {module}"
                found.append(f"{where} uses numpy.random.{name}, not of a seed")
        for imported, line in imports(module, path, tree, known):
            where = f"{path.relative_to(package.parent)}:{line}: {module} imports {imported}"
            if within(module, PURE):
                if kind := impurity(module, imported, impure):
                    found.append(f"{where}, but is pure ({kind})")
                elif within(imported, ("elaswave",)) and not within(imported, PURE):
                    found.append(f"{where}, which is not pure, but is pure itself")
            if within(module, SIMULATED):
                kind = impurity(module, imported, impure)
                if kind and imported != "random":
                    found.append(f"{where}, but is simulated ({kind})")
                elif within(imported, ("elaswave",)) and not within(imported, PURE + SIMULATED):
                    found.append(f"{where}, which is not pure, but is simulated itself")
            for layer, above in FORBIDDEN.items():
                if within(module, (layer,)) and within(imported, above):
                    found.append(f"{where}, which is above {layer}")
            for layer, below in ALLOWED.items():
                if within(module, (layer,)) and within(imported, ("elaswave",)) and not within(imported, below):
                    found.append(f"{where}, but {layer} may import only {', '.join(below) or 'nothing'} of elaswave")
            if within(imported, ("elaswave.cli",)) and not within(module, ENTRY_POINTS):
                found.append(f"{where}, but nothing else may import the command line")
        if not within(module, ("elaswave.cli",)):
            for line in reads_environment(tree):
                found.append(f"{path.relative_to(package.parent)}:{line}: {module} reads the environment, only cli may")
    return found


def test_dependencies_point_one_way():
    assert len(list(modules(PACKAGE))) > 10
    assert violations(PACKAGE) == []


def test_pure_modules_load_nothing_impure():
    """In a fresh interpreter: also what they import indirectly, and their packages' ``__init__``, load no torch."""
    pure = [module for module, _ in modules(PACKAGE) if within(module, PURE + SIMULATED)]
    assert {"elaswave.planning.programs", "elaswave.protocol.coordinator", "elaswave.sim.protocol.world"} <= {*pure}
    code = (
        "import importlib, sys\n"
        f"for name in {pure!r}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'socket', 'asyncio', 'multiprocessing'} & set(sys.modules)))"
    )
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


PLANTED = {
    "planning/cost.py": [
        ("import torch", "elaswave.planning.cost imports torch, but is pure (torch and numpy)"),
        ("import torch.nn.functional as F", "imports torch.nn.functional, but is pure"),
        ("from time import monotonic", "imports time, but is pure (clocks)"),
        ("import numpy as np\nnp.random.default_rng(1)", "2: elaswave.planning.cost uses numpy.random.default_rng"),
        ("from numpy.random import default_rng", "uses numpy.random.default_rng"),
        ("def late():\n    import random", "2: elaswave.planning.cost imports random, but is pure (random sources)"),
        ("from asyncio import sleep", "imports asyncio, but is pure"),
        ("import socket", "imports socket, but is pure (sockets)"),
        ("from elaswave.state.flat import FlatLayer", "imports elaswave.state.flat, which is not pure"),
        ("from elaswave.state import flat", "imports elaswave.state.flat, which is not pure"),
        ("from ..state import flat", "imports elaswave.state.flat, which is not pure"),
        ("from .. import transport", "imports elaswave.transport, which is not pure"),
        ("from ..transport.group import Group", "imports elaswave.transport.group, which is not pure"),
    ],
    "planning/__init__.py": [
        ("from .. import transport", "elaswave.planning imports elaswave.transport, which is not pure")
    ],
    "protocol/agent.py": [
        ("import datetime", "elaswave.protocol.agent imports datetime, but is pure (clocks)"),
        ("import torch", "imports torch, but is pure (torch and numpy)"),
        ("import socket", "imports socket, but is pure (sockets)"),
        ("import asyncio", "imports asyncio, but is pure"),
        ("import random", "imports random, but is pure (random sources)"),
        ("import numpy", "imports numpy, but is pure (torch and numpy)"),
        ("from elaswave.control import launcher", "imports elaswave.control.launcher, which is not pure"),
        ("from elaswave.sim.protocol import world", "imports elaswave.sim.protocol.world, which is not pure"),
    ],
    "state/placement.py": [("import torch", "elaswave.state.placement imports torch, but is pure")],
    "types.py": [
        (
            "import elaswave.planning.cost",
            "elaswave.types may import only elaswave.hashing, elaswave.errors of elaswave",
        )
    ],
    "hashing.py": [("from elaswave.errors import DataError", "elaswave.hashing may import only nothing of elaswave")],
    "transport/group.py": [
        ("from elaswave.worker import step", "imports elaswave.worker.step, which is above elaswave.transport")
    ],
    "sim/protocol/world.py": [
        ("import torch", "elaswave.sim.protocol.world imports torch, but is simulated (torch and numpy)"),
        ("import time", "imports time, but is simulated (clocks)"),
        ("import secrets", "imports secrets, but is simulated (random sources)"),
        ("import threading", "imports threading, but is simulated (event loops, threads and processes)"),
        (
            "from elaswave.transport import group",
            "imports elaswave.transport.group, which is not pure, but is simulated itself",
        ),
        ("from elaswave.worker import step", "imports elaswave.worker.step, which is not pure"),
        ("from elaswave.control import launcher", "imports elaswave.control.launcher, which is not pure"),
        ("import random\nrandom.random()", "2: elaswave.sim.protocol.world uses random.random, not of a seed"),
        ("import numpy as np\nnp.random.default_rng()", "2: elaswave.sim.protocol.world uses numpy.random.default_rng"),
        ("import numpy as np\nnp.random.seed(1)", "uses numpy.random.seed, not of a seed"),
        ("import random\nrandom.Random()", "uses random.Random, not of a seed"),
        ("import random\nmake = random.Random", "uses random.Random, not of a seed"),
        ("import random\nrandom.SystemRandom(1)", "uses random.SystemRandom, not of a seed"),
        ("from random import choice", "uses random.choice, not of a seed"),
        ("import random as r", "uses random.* as r, not of a seed"),
    ],
    "state/flat.py": [("import elaswave.protocol.agent", "which is above elaswave.state")],
    "worker/step.py": [
        ("from elaswave.control import launcher", "imports elaswave.control.launcher, which is above elaswave.worker"),
        ("from elaswave.cli.main import main", "nothing else may import the command line"),
    ],
    "models/gpt.py": [("import elaswave.transport.group", "elaswave.models may import only elaswave.models, ")],
    "data/sources.py": [("from elaswave.models import gpt", "elaswave.data may import only elaswave.data, ")],
    "control/launcher.py": [
        ("import elaswave.cli", "nothing else may import the command line"),
        ("import os\nprint(os.environ['HOME'])", "2: elaswave.control.launcher reads the environment, only cli may"),
        ("import os\nos.getenv('HOME')", "reads the environment"),
        ("from os import environ", "reads the environment"),
    ],
}
HARMLESS = {
    "planning/cost.py": "import heapq\nimport numpy as np\n"
    "from math import lcm\nfrom elaswave.types import Layout\nfrom . import other",
    "planning/other.py": "from elaswave.state.placement import Block",
    "worker/step.py": "import os, time, torch\nfrom elaswave.transport import group\n"
    "from elaswave.protocol import agent",
    "control/launcher.py": "from elaswave.worker import step\nfrom elaswave.faults import injection as faults",
    "protocol/agent.py": "from elaswave.planning import cost\nfrom elaswave.state.placement import Block",
    "faults/injection.py": "import os\nfrom elaswave.protocol import agent",
    "sim/protocol/world.py": "import random\nimport numpy as np\nnp.random.default_rng(7)\n"
    "from elaswave.protocol import agent\nrng: random.Random\n"
    "def draw(rng: random.Random) -> random.Random: return random.Random(7)",
    "cli/main.py": "import os\nfrom elaswave.control import launcher\nos.environ.get('HOME')",
    "cli/train.py": "from elaswave.cli import main",
    "__main__.py": "from elaswave.cli.main import main",
    "models/gpt.py": "import torch\nfrom elaswave.hashing import key64",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    package = root / "elaswave"
    for name in {*PLANTED, *HARMLESS, *files}:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, HARMLESS.get(name, "")))
        for parent in path.relative_to(package).parents:
            init = package / parent / "__init__.py"
            if not init.exists():
                init.write_text("")
    return package


def test_the_guard_passes_what_is_allowed(tmp_path):
    assert violations(plant(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("file", "code", "message"), [(file, *case) for file, cases in PLANTED.items() for case in cases]
)
def test_the_guard_catches_planted_violations(tmp_path, file, code, message):
    found = violations(plant(tmp_path, {file: code}))
    assert found
    assert any(message in line for line in found), found
    assert all(line.startswith(f"elaswave/{file}:") for line in found)
