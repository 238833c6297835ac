"""The golden set compares what it says."""

import json

import pytest
from tests import golden


def test_names_of_the_file_are_those_of_the_parts():
    recorded = json.loads(golden.FILE.read_bytes())
    assert set(recorded["plans"]) == set(golden.PLANS)
    assert len(golden.PLANS) == len(set(golden.PLANS)) >= 60
    assert set(recorded["help"]) == {name for name, _ in golden.help_texts()}
    of_runs = [part for part in recorded if part.startswith("runs on ")]
    assert of_runs, "runs are recorded with the machine that they ran on"
    for part in of_runs:
        assert set(recorded[part]) == {run.name for run in golden.RUNS}


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ({"a": "1", "b": "2"}, []),
        ({"a": "1", "b": "3"}, ["  moved: b"]),
        ({"a": "1"}, ["  gone: b"]),
        ({"a": "1", "b": "2", "c": "3"}, ["  new: c"]),
    ],
)
def test_each_difference_is_one_line(found, lines):
    assert golden.differences({"a": "1", "b": "2"}, found) == lines


def test_an_error_stands_for_a_plan_that_there_is_not():
    infeasible = "plan --workers 2 --stages 2 --model llama-2-70b --device a100 --json"
    assert "does not fit" in golden._output(infeasible.split())
