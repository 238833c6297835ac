"""The package stays within `scripts/budget.toml`, and what is counted is what is meant."""

from pathlib import Path

import pytest
from tests import house

import elaswave

SOURCE = house.ROOT / "src"


def file(module, text):
    path = SOURCE / f"{module.replace('.', '/')}.py"
    return house.file_of(path, module, text)


def test_the_budget_is_kept():
    budget, files = house.read_budget(), house.files_of(SOURCE)
    counts = {name: len(found) for name, found in house.offences(files, budget).items()}
    over = [f"{name}: {n}, at most {budget.counts[name]}" for name, n in counts.items() if n > budget.counts[name]]
    lines = house.lines_by_room(files)
    lines["all"] = lines.total()
    over += [f"{room}: {n} lines" for room, n in lines.items() if n > budget.lines.get(room, 0)]
    assert not over, "see scripts/house --show NAME, and CONTRIBUTING.md on scripts/budget.toml"
    assert budget.counts.keys() == budget.aims.keys() == budget.before.keys() >= counts.keys()


def test_blanks_comments_and_docstrings_are_no_code():
    text = '"""A."""\n\n# B\nx = 1  # C\n"""D."""\n\ndef f():\n    """E\n    F."""\n    return """G\nH"""\n'
    assert file("elaswave.a", text).num_code_lines == 4


def test_circles_of_imports_are_found_also_those_for_types():
    lazy = "def f():\n    import elaswave.a\n"
    texts = {
        "elaswave.a": "from elaswave.b import x\n",
        "elaswave.b": "if TYPE_CHECKING:\n    from elaswave import c\n",
        "elaswave.c": "import elaswave.a\n",
        "elaswave.d": f"import elaswave.e\n{lazy}",
        "elaswave.e": "import elaswave.a\n",
    }
    graph = house.import_graph([file(module, text) for module, text in texts.items()])
    assert house.circles(graph) == [["elaswave.a", "elaswave.b", "elaswave.c"]]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("a, b, c, d, e, f, g, h", 0),
        ("a, b, c, d, e, f, g, *, h, i", 1),
        ("a: Callable[[], None], b: 'Callable[[], None] | None'", 0),
        ("a: Callable[[], None], b: Callable[[], None], c: Mapping[str, Callable[[], None]]", 1),
    ],
)
def test_constructors_are_counted_by_arguments_and_callables(arguments, found):
    text = f"class A:\n    def __init__(self, {arguments}): ...\n    def other(self, {arguments}): ...\n"
    assert len(house.large_constructors([file("elaswave.a", text)])) == found


def test_only_what_scripts_call_may_have_more_arguments():
    text = "class Trainer:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n"
    assert house.large_constructors([file("elaswave.api.trainer", text)]) == []
    assert len(house.large_constructors([file("elaswave.api.other", text)])) == 1
    assert {name.rpartition(".")[2] for name in house.OPTIONS_OF_A_PERSON} <= set(elaswave.__all__)


def test_a_name_of_two_modules_and_a_short_file_with_one_user_are_found():
    files = [
        file("elaswave.a", "class Place: ...\ndef _own(): ...\n"),
        file("elaswave.b", "from elaswave.a import Place\nclass _Own: ...\ndef Place(): ...\n"),
        file("elaswave.c", "import elaswave.b\nimport elaswave.d\n"),
        file("elaswave.d", "import elaswave.b\n" + "x = 1\n" * house.MIN_LINES),
    ]
    assert house.names_defined_twice(files) == ["Place: elaswave.a, elaswave.b"]
    assert house.small_files(files, house.import_graph(files)) == ["elaswave.a: 2 lines"]


def test_rooms_are_folders_and_other_packages():
    assert house.room_of("elaswave.worker.links") == "worker"
    assert house.room_of("elaswave_rivals.torchft") == "elaswave_rivals"
    by_room = house.lines_by_room([file("elaswave.errors", "x = 1\n"), file("elaswave.worker.links", "y = 1\n")])
    assert by_room == {"root": 1, "worker": 1}
    assert Path(house.BUDGET).exists()
