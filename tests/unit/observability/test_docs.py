"""The pages on the run folder and the command line name everything that exists."""

import re
from pathlib import Path

import msgspec
import pytest

from elaswave.cli.main import COMMANDS
from elaswave.cli.train import train_command
from elaswave.observability.events import KINDS, Holdings
from elaswave.observability.result import CheckpointRecord, GenerationRecord, Recovery, RunResult, WorkerMemory
from elaswave.observability.run_folder import MARKER_FILE, WRITTEN_NAMES

DOCS = Path(__file__).resolve().parents[3] / "docs"
RUN_FOLDER = (DOCS / "run-folder.md").read_text()
COMMAND_LINE = (DOCS / "command-line.md").read_text()


@pytest.mark.parametrize(
    "struct", [RunResult, GenerationRecord, Recovery, WorkerMemory, CheckpointRecord, Holdings, *KINDS.values()]
)
def test_every_field_is_described(struct: type[msgspec.Struct]) -> None:
    named = set(re.findall(r"`([a-z_]+)`", RUN_FOLDER))
    assert set(struct.__struct_fields__) - named == set()


def test_every_kind_of_event_and_every_file_is_described() -> None:
    for kind in KINDS:
        assert f"| `{kind}` |" in RUN_FOLDER
    for name in (MARKER_FILE, *WRITTEN_NAMES):
        assert f"`{name}" in RUN_FOLDER


def test_every_command_and_every_option_of_train_is_described() -> None:
    for name in COMMANDS:
        assert f"\n## `elaswave {name}`" in COMMAND_LINE
    for parameter in train_command.params:
        option = max(parameter.opts, key=len)
        assert f"| `{option}" in COMMAND_LINE or option == "config_file"
