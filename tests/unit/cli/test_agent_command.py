"""What `elaswave agent` refuses before it does anything."""

import pytest

from elaswave.cli.main import main


@pytest.mark.parametrize("option", ["--job", "--node-name"])
@pytest.mark.parametrize("name", ["a/b", "../a", "", "-a"])
def test_names_are_fit_for_files_and_keys(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--job": "demo", "--node-name": "n", option: name}
    words = [f"{key}={value}" for key, value in names.items()]
    assert main(["agent", "--coordinator", "127.0.0.1:7077", *words]) == 2
    said = capsys.readouterr().err
    assert option in said and f"{name!r}: give a letter or digit, then letters" in said.replace("\n", " "), said
