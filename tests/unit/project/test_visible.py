"""Texts are shown through `elaswave.observability.output`: what prints beside it is found, and stands here with why."""

import ast
from collections.abc import Iterator

import pytest
from tests.unit.project.trees import PACKAGES, dotted, functions, modules

PRINTS = {"print", "click.echo", "click.secho", "echo", "rich.print", "Text", "Text.assemble", "Console", "Live"}
STREAMS = ("stream", "stdout", "stderr", "errors", "out")
"""How names of what ends on a terminal end."""

LOG = "writes to the log of a worker, of its own words"

EXCEPTED = {
    "cli.ctl:StatusDisplay.__enter__": "makes the display",
    "cli.ctl:StatusDisplay.__init__": "makes the display; what it shows is made visible where it is updated",
    "cli.ctl:StatusDisplay._print": "writes what `shown` has made visible",
    "cli.ctl:StatusDisplay.show": "shows lines that are made visible there",
    "cli.demo:_Shown.__init__": "makes the console; `say` makes visible what it prints",
    "cli.demo:_Shown.say": "makes its parts visible",
    "cli.tables:render_table": "makes its cells visible",
    "cli.tables:Waiting._write": "writes the codes of the line, and a text that has been made visible",
    "config.reference:": "prints the page of the configuration",
    "launcher.forkserver.worker_main:end_later.end": LOG,
    "models.foreign.server:_main": "a file that stands alone; it prints its own words",
    "observability.progress:_LastingReporter._tell": "prints the system's reason",
    "observability.progress:_LineReporter._print": "writes what `shown` has made visible",
    "observability.progress:_LiveReporter._render": "shows numbers, and facts that are made visible there",
    "observability.progress:_LiveReporter._print": "prints what `shown` has made visible",
    "observability.progress:_LiveReporter.started": "prints what `shown` has made visible",
    "observability.progress:_LiveReporter.step": "makes the display",
    "worker.process:run_worker": LOG,
}


def calls_beside(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Functions with what they call that may show a text on a terminal."""
    for function, node in functions(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        writes = name.endswith(".write") and name.removesuffix(".write").endswith(STREAMS)
        if name in PRINTS or writes:
            yield function, name


def test_texts_are_shown_through_one_module() -> None:
    found = {
        f"{module.removeprefix('elaswave.')}:{function}"
        for module, path in modules(*PACKAGES)
        if module != "elaswave.observability.output"
        for function, _ in calls_beside(ast.parse(path.read_text()))
    }
    assert not found - EXCEPTED.keys(), "print these with elaswave.observability.output.say, or say here why not"
    assert not EXCEPTED.keys() - found, "these print nothing any more"


@pytest.mark.parametrize(
    "call", ["print(a)", "click.echo(a)", "sys.stdout.write(a)", "self._stream.write(a)", "Text(a)"]
)
def test_the_search_finds(call: str) -> None:
    assert [place for place, _ in calls_beside(ast.parse(f"def f(a):\n    {call}"))] == ["f"]
