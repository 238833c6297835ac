"""Every page: links lead somewhere, files that are named exist, commands parse, examples of configurations load."""

import ast
import contextlib
import io
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import click
import pytest

from elaswave.cli.main import cli
from elaswave.config.cluster import labels_of, sites_that_may_part
from elaswave.config.load import load_config
from elaswave.faults.injection import parse_faults
from elaswave.models.foreign import server
from verify.__main__ import verify

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "elaswave"
PAGES = sorted(
    path
    for folder in (".", "docs", "docs/own-models", "docs/reference", "examples", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
    if path.is_file()
)
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
NAMES_OF_RUNS = {ROOT / "docs" / "run-folder.md"}
"""Pages whose paths are those of a run folder."""

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """What a link may add after ``#``: the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        missing = not path.exists() or not path.is_relative_to(ROOT)
        if missing or (anchor and anchor not in anchors(text if path == page else path.read_text())):
            dead.append(target)
    return dead


def missing_files(text: str) -> list[str]:
    """Paths to Python files and folders, in backquotes, that are neither in the project nor in the package."""
    named = re.findall(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?)`", text)
    return [path for path in named if not any((base / path).exists() for base in (ROOT, SOURCE.parent, SOURCE))]


def shell_blocks(text: str) -> list[str]:
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.M | re.S)
    return [block for _, language, block in blocks if language == "sh"]


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every ``elaswave`` command in the page's shell blocks; of ``verify``, with its name."""
    for block in shell_blocks(text):
        words = shlex.shlex(block.replace("\\\n", " ").replace("\n", ";"), posix=True, punctuation_chars="|&;<>")
        words.whitespace_split = True
        words.commenters = ""
        arguments: list[str] | None = None
        for word in [*words, ";"]:
            if set(word) <= set("|&;<>"):
                if arguments is not None:
                    yield arguments
                arguments = None
            elif arguments is not None:
                arguments.append(word)
            elif word == "elaswave":
                arguments = []
            elif word == "verify":
                arguments = ["verify"]


def check_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses a command as the product does, and reads its configuration, without doing anything.

    Raises:
        click.ClickException, ConfigError, UsageError: as the product would.
    """
    parsed: dict[str, Any] = {}

    def replace(command: click.Command) -> None:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), name)
                assert found is not None
                replace(found)
        else:
            monkeypatch.setattr(command, "callback", parsed.update)

    program, arguments = (verify, arguments[1:]) if arguments[0] == "verify" else (cli, arguments)
    replace(program)
    with contextlib.redirect_stdout(io.StringIO()):
        program.main(arguments, standalone_mode=False)
    if arguments[0] == "train":
        file = parsed["config_file"]
        if file is not None and "$" in str(file):
            return  # made by an earlier command of the page
        config = load_config(file and ROOT / file, parsed["overrides"], parsed["workers"])
        parse_faults(
            parsed["fault_specs"],
            seed=config.run.seed,
            workers=range(sum(config.widths)),
            num_steps=config.run.steps,
            respawns=config.elastic.respawns,
            hosts=labels_of(config),
            sites=sites_that_may_part(config),
        )


@page_by_page
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


@page_by_page
def test_files_that_are_named_exist(page: Path) -> None:
    if page not in NAMES_OF_RUNS:
        assert missing_files(page.read_text()) == []


@page_by_page
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in commands(page.read_text()):
        check_command(arguments, monkeypatch)


def test_these_tests_find_what_they_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "README.md"
    assert len(PAGES) > 8 and len(EXAMPLES) >= 2
    assert len(list(commands(page.read_text()))) > 4
    text = "# A `B`, c\n[x](#a-b-c) [y](nowhere.md) [z](#c)\n```\n[w](in-code)\n```\n`state/sums.py` `state/no_such.py`"
    assert dead_links(page, text) == ["nowhere.md", "#c"]
    assert missing_files(text) == ["state/no_such.py"]
    shell = (
        "```\nelaswave X\n```\n```sh\ny && elaswave train a \\\n --set 'b.c=[1, 2]' > d\nelaswave inspect $R | y\n"
        "python -m verify chaos --runs 1\n```\n"
    )
    found = [["train", "a", "--set", "b.c=[1, 2]"], ["inspect", "$R"], ["verify", "chaos", "--runs", "1"]]
    assert list(commands(shell)) == found
    for wrong in (
        "train --no-such",
        "train --set run.no_such=1",
        "train --fault kill:9@1",
        "no-such",
        "inspect diff a",
        "verify no-such",
    ):
        with pytest.raises(Exception, match="(?i)no.such|no such|kill:9@1|missing"):
            check_command(wrong.split(), monkeypatch)


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)\s#]+\.md)", prose(page.read_text()))
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) - reached == set()


def test_every_folder_of_the_package_is_described() -> None:
    text = (ROOT / "docs" / "folders.md").read_text()
    folders = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py")} - {Path(".")}
    folders |= {path.parent.relative_to(ROOT) for path in (ROOT / "verify").rglob("*.py")} | {Path("elaswave_rivals")}
    assert [str(folder) for folder in sorted(folders) if f"| `{folder}/` |" not in text] == []


def rooms_of(text: str) -> list[set[str]]:
    """The layers in a picture of rooms: names stand where a line begins, a rule is between two layers."""
    (picture,) = re.findall(r"^## Rooms$.*?^```text\n(.*?)^```$", text, re.M | re.S)
    lines = [layer.splitlines() for layer in re.split(r"^─+\n", picture, flags=re.M)]
    return [{name for line in layer for name in re.findall(r"\w+", re.split("  ", line)[0])} for layer in lines]


def test_the_architecture_fits_on_three_screens_and_its_rooms_are_the_layers_of_imports() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    assert rooms_of(text) == [set(layer.split(" | ")) for layer in layers]
    assert rooms_of("## Rooms\n```text\na, b\n     of c\n──\nd   e\n```") == [{"a", "b"}, {"d"}]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_and_are_listed(example: Path) -> None:
    config = load_config(example)
    assert config.widths
    assert f"]({example.name})" in (ROOT / "examples" / "README.md").read_text()
    assert f"elaswave train examples/{example.name}\n" in example.read_text()


def test_the_python_on_the_page_about_numerics_prints_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (output,) = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    exec(compile(code, "numerics.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_the_glossary_has_each_term_once_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = [term.lower().replace("-", "") for term in re.findall(r"^\| ([^|`]+?) \| ", text, re.M)][1:]
    assert len(terms) > 50
    terms = terms[: terms.index("worker") + 1]
    assert terms == sorted(set(terms))


def has_function(path: Path, name: str, kinds: type | UnionType = ast.FunctionDef) -> bool:
    """Whether a file defines a function, or a method by its qualified name; read, not imported."""
    if not path.is_file():
        return False
    body = ast.parse(path.read_text()).body
    *classes, function = name.split(".")
    for wanted in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == wanted), [])
    return any(isinstance(node, kinds) and node.name == function for node in body)


def test_the_twenty_questions_name_functions_that_exist() -> None:
    rows = re.findall(r"^\| (.+\?) \| `(.+?)` \| `(.+?)` \| .+ \|$", (ROOT / "docs" / "where.md").read_text(), re.M)
    assert len({question for question, _, _ in rows}) == len(rows) == 20
    assert [(path, name) for _, path, name in rows if not has_function(SOURCE / path, name)] == []
    assert has_function(SOURCE / "state" / "sums.py", "ExactAccumulator.add")
    for path, name in (("sums.py", "ExactAccumulator.no"), ("sums.py", "No.add"), ("sums.py", "add"), ("no.py", "add")):
        assert not has_function(SOURCE / "state" / path, name)


def missing_functions(text: str) -> list[tuple[str, str]]:
    """Of what a walk names: a file with its function, or a function or class with its file in brackets."""
    named = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", text)
    named += [(path, name) for name, path in re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)", text)]
    kinds = ast.FunctionDef | ast.ClassDef
    return [(path, name) for path, name in named if not has_function(SOURCE / path, name, kinds)]


@pytest.mark.parametrize(("page", "num_named"), [("ARCHITECTURE.md", 35), ("docs/internals.md", 15)])
def test_walks_name_functions_that_exist(page: str, num_named: int) -> None:
    text = (ROOT / page).read_text()
    assert missing_functions(text) == []
    broken = re.sub(r"\.py`(\)?)", r"_no.py`\1", text)
    assert len(missing_functions(broken)) >= num_named, "each of them is looked at"


@page_by_page
def test_names_of_the_package_exist(page: Path) -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for name in re.findall(r"`((?:elaswave|elaswave_rivals|verify)(?:\.\w+)+)[`(]", prose(page.read_text())):
        assert name in entry_points or pkgutil.resolve_name(name)


def test_what_a_server_of_foreign_parts_calls_is_in_its_file() -> None:
    called = re.findall(r"(\w+)\(", (ROOT / "docs" / "foreign.md").read_text().partition("## Writing a server")[2])
    assert called and not [name for name in called if not hasattr(server, name)]
