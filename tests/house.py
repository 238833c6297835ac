"""Counts what makes the package hard to find one's way in: pieces on each way, and what breaks the rules of the house.

Counted are lines of code (without blanks, comments and docstrings) and files, by room; files that one step of one
worker visits, and `Trainer(...)` to the first step in the script's process, both in real runs; and what the rules of
CONTRIBUTING.md forbid. `scripts/budget.toml` has what is allowed, and what the counts once were.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / "scripts" / "budget.toml"
PACKAGES = ("elaswave", "elaswave_rivals")
MAX_ARGUMENTS, MAX_CALLABLES = 8, 2
"""Of a constructor."""
OPTIONS_OF_A_PERSON = ("elaswave.api.trainer.Trainer", "elaswave.models.foreign.layer.Foreign")
"""Constructors that are not counted: what `elaswave` exports, and a person's script calls with documented keywords.
These are options, and functions of the person's own, not parts of the engine that are handed to another part."""
MIN_LINES, MAX_FILES = 80, 20
"""Of a file with one user; of a folder."""
_RUN_TIMEOUT_S = 240.0


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scripts/budget.toml`."""

    lines: dict[str, int]
    """Room -> lines of code at most; ``all`` for all of them."""
    counts: dict[str, int]
    """Name of a count -> at most."""
    aims: dict[str, int]
    """Name of a count -> what it is to become."""
    before: dict[str, int]
    """Name of a count -> what it was on 2928e06, where the house was first measured."""
    start_types: tuple[str, ...]
    """Types on the way from "a worker is wanted" to a forked worker."""
    layout_types: tuple[str, ...]
    """Types that mean a layout."""


class File(NamedTuple):
    """A source file."""

    path: Path
    module: str
    tree: ast.Module
    classes: list[ast.ClassDef]
    num_lines: int
    """All of them."""
    num_code_lines: int


def read_budget() -> Budget:
    """The budget."""
    return msgspec.convert(tomllib.loads(BUDGET.read_text()), Budget)


# ---------------------------------------------------------------------------------------------------------- the source


def files_of(source: Path) -> list[File]:
    """All files of the packages below a ``src`` folder."""
    found = []
    for package in PACKAGES:
        for path in sorted((source / package).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found.append(file_of(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text()))
    return found


def file_of(path: Path, module: str, text: str) -> File:
    """A source file, read once for all counts."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return File(path, module, tree, classes, text.count("\n"), _num_code_lines(text, nodes))


def _num_code_lines(text: str, nodes: list[ast.AST]) -> int:
    lines: set[int] = set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:  # docstrings, also those of attributes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def room_of(module: str) -> str:
    """The room that a module is in: a folder of the package, or its root."""
    package, *rest = module.split(".")
    if package != PACKAGES[0]:
        return package
    return rest[0] if rest else "root"


def lines_by_room(files: list[File]) -> Counter[str]:
    """Lines of code; of modules beside the rooms as ``root``."""
    rooms = {file.path.parent.name for file in files if len(file.path.parent.parts)}
    found: Counter[str] = Counter()
    for file in files:
        room = room_of(file.module)
        found[room if room in rooms or room in PACKAGES else "root"] += file.num_code_lines
    return found


def _imports(file: File, modules: Container[str]) -> Iterator[str]:
    """Which of some modules a module imports when it is imported, and for types."""
    pending: list[ast.AST] = [file.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            of_package = {name for name in named if name in modules}
            yield from of_package
            if of_package != named and node.module in modules:  # also something that stands in the package itself
                yield node.module
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def import_graph(files: list[File]) -> dict[str, set[str]]:
    """Module -> modules of the packages that it imports."""
    modules = {file.module for file in files}
    return {file.module: set(_imports(file, modules)) - {file.module} for file in files}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def large_constructors(files: list[File]) -> list[str]:
    """Constructors with too many arguments, or that are called back too much."""
    found = []
    for file in files:
        for node in file.classes:
            if f"{file.module}.{node.name}" in OPTIONS_OF_A_PERSON:
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs][1:]
                    called = sum("Callable" in ast.unparse(each.annotation) for each in arguments if each.annotation)
                    if len(arguments) > MAX_ARGUMENTS or called > MAX_CALLABLES:
                        found.append(f"{file.module}.{node.name}: {len(arguments)} arguments, {called} callables")
    return found


def names_defined_twice(files: list[File]) -> list[str]:
    """Public classes and functions that stand in several modules under one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                places[node.name].append(file.module)
    return [f"{name}: {', '.join(modules)}" for name, modules in sorted(places.items()) if len(modules) > 1]


def small_files(files: list[File], graph: Mapping[str, set[str]]) -> list[str]:
    """Files that are short and have one user; the packages' own and their entries aside."""
    users = Counter(other for module in graph for other in graph[module])
    return [
        f"{file.module}: {file.num_lines} lines"
        for file in files
        if file.num_lines < MIN_LINES and users[file.module] == 1 and file.path.name != "__init__.py"
    ]


def full_folders(files: list[File]) -> list[str]:
    """Folders of more files than one can look over."""
    folders = Counter(file.path.parent for file in files if file.path.name != "__init__.py")
    return [f"{folder.name}: {number} files" for folder, number in folders.items() if number > MAX_FILES]


def types_of(files: list[File], names: tuple[str, ...]) -> list[str]:
    """Those of some classes that there are."""
    classes = {node.name for file in files for node in file.classes}
    return [name for name in names if name in classes]


# ------------------------------------------------------------------------------------------------------------ real runs

_TRACING = """
import json, os, sys, threading
SOURCE, OUT = os.environ["HOUSE_SOURCE"], os.environ["HOUSE_OUT"]
seen = set()

class Noting:
    def __init__(self, places):
        self.places = places

    def __call__(self, frame, event, argument):
        code = frame.f_code  # of a function, not of a module or class that is imported only now
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(SOURCE):
            self.places.add((code.co_filename, code.co_qualname))

def tell():
    sys.setprofile(None)
    threading.setprofile(None)
    with open(OUT, "w") as file:
        json.dump(sorted(seen), file)
"""
_STEP = (
    _TRACING
    + '''
import io
from pathlib import Path
from elaswave.config.load import load_config
from elaswave.launcher.launcher import train
from elaswave.observability.progress import make_reporter

class Watch:
    """Notes what the second of two workers calls in each of three steps: what one of them happens to do is no part."""

    def reached(self, phase, index, machine):
        if machine.worker != 1 or not 4 <= machine.step <= 7:
            return
        if machine.step == 7:
            sys.setprofile(None)
            seen.update(set.intersection(*steps.values()))
            tell()
        elif machine.step not in steps:
            steps[machine.step] = set()
            sys.setprofile(Noting(steps[machine.step]))

steps = {}
model = ("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.context_length=16")
batch = ("batch.num_microbatches=2", "batch.microbatch_size=2")
quiet = ("run.steps=8", "run.checkpoint_every=0", "elastic.spot_checks=0")
settings = ("layout.stages=2", "layout.replicas=1", *model, *batch, *quiet)
reporter = make_reporter(json_mode=True, stream=io.StringIO())
train(load_config(overrides=settings), Path(os.environ["HOUSE_RUN"]), reporter=reporter, probe=Watch())
'''
)
_START = (
    _TRACING
    + """
import torch
import elaswave

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.zeros(2)

def loss(output, targets):
    return ((output - targets) ** 2).mean()

def stop(step, loss, metrics):
    if step == 1:
        tell()

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
config = {"run.steps": 2, "batch.num_microbatches": 2, "batch.microbatch_size": 2}
trainer = elaswave.Trainer
threading.setprofile(Noting(seen))
sys.setprofile(Noting(seen))
trainer(model, loss, Numbers(), config=config, callbacks=[stop], run_dir=os.environ["HOUSE_RUN"]).train()
"""
)


def visited(source: Path, script: str) -> set[str]:
    """Files of the packages that a script has noted.

    Raises:
        SystemExit: the script failed.
    """
    with tempfile.TemporaryDirectory(prefix="elaswave-house-") as folder:
        path, out, run = (Path(folder) / name for name in ("script.py", "seen.json", "run"))
        path.write_text(script)
        run.mkdir()
        told = {"HOUSE_SOURCE": str(source), "HOUSE_OUT": str(out), "HOUSE_RUN": str(run), "PYTHONPATH": str(source)}
        environment = os.environ | told
        ended = subprocess.run(
            [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S
        )
        if ended.returncode != 0 or not out.exists():
            sys.exit(f"the run that is looked at ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
        return {file for file, _ in json.loads(out.read_bytes())}


# ---------------------------------------------------------------------------------------------------------- the command


def offences(files: list[File], budget: Budget) -> dict[str, list[str]]:
    """Name of a count -> what is counted, without real runs."""
    graph = import_graph(files)
    return {
        "files": [file.module for file in files],
        "constructors too large": large_constructors(files),
        "import circles": [", ".join(circle) for circle in circles(graph)],
        "public names defined twice": names_defined_twice(files),
        "short files with one user": small_files(files, graph),
        "folders too full": full_folders(files),
        "types to start a worker": types_of(files, budget.start_types),
        "types of a layout": types_of(files, budget.layout_types),
    }


def main() -> int:
    """The command; returns its exit status: 1 if the budget is exceeded."""
    parser = argparse.ArgumentParser(prog="scripts/house", description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout; default: this one")
    parser.add_argument("--show", metavar="COUNT", help="print what is counted, such as 'import circles'")
    parser.add_argument("--static", action="store_true", help="without real runs")
    options = parser.parse_args()
    source, budget = options.tree.resolve() / "src", read_budget()
    files = files_of(source)
    found = offences(files, budget)
    if options.show in found:
        print(*found[options.show], sep="\n")
        return 0
    if not options.static:
        found["files that a step visits"] = sorted(visited(source, _STEP))
        found["files until the first step"] = sorted(visited(source, _START))
    if options.show is not None:
        print(*found.get(options.show, [f"no count {options.show!r}: there are {', '.join(found)}"]), sep="\n")
        return int(options.show not in found)
    print(f"{'':28}{'now':>6}{'at most':>9}{'aim':>6}{'2928e06':>9}")
    exceeded = False
    for name, places in found.items():
        at_most = budget.counts[name]
        exceeded |= len(places) > at_most
        print(f"{name:28}{len(places):>6}{at_most:>9}{budget.aims[name]:>6}{budget.before[name]:>9}", flush=True)
    by_room = lines_by_room(files)
    by_room["all"] = by_room.total()
    for room, number in sorted(by_room.items()):
        exceeded |= number > budget.lines.get(room, 0)
        print(f"{'lines of code, ' + room:28}{number:>6}{budget.lines.get(room, 0):>9}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
