"""What others have written never reaches a terminal as something that it obeys."""

import json
import logging
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from tests.unit.observability.samples import make_result, write_events

from elaswave.cli.main import main
from elaswave.cli.tables import render_table
from elaswave.errors import ConfigError, ElaswaveError, WorkerError
from elaswave.observability.events import ErrorRaised, EventLog
from elaswave.observability.output import VisibleLines, printable, say, say_error, say_json
from elaswave.observability.progress import make_reporter
from elaswave.observability.result import write_result
from elaswave.visible import Styled, visible

pytestmark = pytest.mark.security

TITLE, CSI_8_BIT, BACKWARDS = "\x1b]0;owned\x07", "\x9b2J", "\u202e"
ATTACK = f"{TITLE}{CSI_8_BIT}{BACKWARDS}\x7f\r\x08\udc80"
OBEYED = set("\x1b\x07\x9b\u202e\x7f\r\x08\udc80")


def is_harmless(text: str) -> bool:
    return not set(text) & OBEYED


@pytest.mark.parametrize("code", [*range(32), *range(0x7F, 0xA0), 0x200F, 0x2028, 0x2066, 0xD800])
def test_what_a_terminal_obeys_is_its_number(code: int) -> None:
    character = chr(code)
    shown_as = character if character in "\n\t" else f"\\u{code:04x}"
    assert visible(f"a{character}b") == f"a{shown_as}b"


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 東京 ▁▂▃ → é", "two\nlines\tand a tab", "שלום", "👍🏽"])
def test_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_json_stays_the_same_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"a": f"{TITLE}{CSI_8_BIT}{BACKWARDS}\x7f"}
    say_json(document)
    text = capsys.readouterr().out
    assert is_harmless(text) and json.loads(text) == document


def test_every_way_to_print_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    say(ATTACK, ATTACK)
    say(ATTACK, err=True)
    say_error(ATTACK)
    found = capsys.readouterr()
    assert is_harmless(found.out + found.err) and found.out.count("owned") == 2 and found.err.count("owned") == 2


@pytest.mark.parametrize("error", [ElaswaveError(ATTACK), ConfigError([ATTACK]), WorkerError(1, ATTACK, ATTACK)])
def test_errors_are_harmless_wherever_they_are_shown(error: ElaswaveError) -> None:
    assert is_harmless(str(error)) and "owned" in str(error)


def test_reporters_are_harmless() -> None:
    stream = StringIO()
    reporter = make_reporter(json_mode=False, stream=stream)
    reporter.message(ATTACK)
    reporter.error(ATTACK)
    assert is_harmless(stream.getvalue()) and stream.getvalue().count("owned") == 2


def test_logs_are_harmless() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 1, "said %s", (ATTACK,), None)
    assert is_harmless(VisibleLines().format(record))


@pytest.mark.parametrize("width", [20, 400])
def test_tables_keep_their_style_and_their_cells_have_none(width: int) -> None:
    text = "\n".join(render_table([f"name{ATTACK}"], [[ATTACK]], width, is_styled=True))
    assert not set(text) & (OBEYED - {"\x1b"}) and "\x1b]" not in text and "owned" in text
    styled = render_table(["name"], [["cell"]], 400, is_styled=True)
    assert "\x1b[1m" in styled[0] and all(isinstance(line, Styled) for line in styled)


def test_what_a_streams_encoding_lacks_is_a_question_mark() -> None:
    class Plain(StringIO):
        encoding = "ascii"

    assert printable("a→\x1bb", Plain()) == "a?\\u001bb"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of somebody else."""
    write_result(tmp_path, msgspec.structs.replace(make_result(), state_digest="00"))
    write_events(tmp_path)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(ErrorRaised(message=ATTACK.replace("\udc80", ""), worker=1, traceback=ATTACK.replace("\udc80", "")))
    (tmp_path / "result.json").unlink()
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_foreign_run_folder_is_inspected(run: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), *options]) == 0
    found = capsys.readouterr()
    assert is_harmless(found.out + found.err)
    if options:
        json.loads(found.out)


def test_the_name_of_a_foreign_folder_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"run{TITLE}{CSI_8_BIT}"
    folder.mkdir()
    assert main(["inspect", str(folder)]) == 2
    found = capsys.readouterr()
    assert is_harmless(found.out + found.err) and "owned" in found.err
