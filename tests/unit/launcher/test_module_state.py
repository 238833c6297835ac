"""What a script has set in modules reaches a fresh interpreter: here the same modules, imported a second time."""

import collections
import datetime
import functools
import importlib
import importlib.machinery
import math
import operator
import pathlib
import pickle
import random
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elaswave.launcher.forkserver import module_state
from elaswave.launcher.forkserver.module_state import ModuleState, TakenOver, states_of_modules, value_digest

Modules = Callable[..., Any]
SETTINGS = """
    import collections, contextvars, dataclasses, enum, threading, types
    import numpy as np, torch

    SCALE, NAME, _PRIVATE, NOTHING = 1.0, "a", 1, None
    TREE = {"a": [1, {"b": (2, 3)}], "old": 1}
    ORDER = collections.OrderedDict(a=1, b=2)
    LEVELS = [[1], [2]]
    TAGS = {"x"}
    SPACE = types.SimpleNamespace(rate=0.1, inner=types.SimpleNamespace(on=False))
    TABLE, ARRAY = torch.zeros(3), np.zeros(2)
    PLACE = contextvars.ContextVar("PLACE", default=0)
    LOCAL = threading.local()
    CACHE = threading.Lock()

    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        rate: float = 0.1
        color: Color = Color.RED

    class Config(dict):
        __getattr__ = dict.__getitem__
        def __setattr__(self, name, value):
            raise AttributeError("frozen")

    class Guarded:
        def __init__(self):
            self.lock, self.rate = threading.Lock(), 1.0

    class Net:
        width = 1
        class Inner:
            depth = 1
        def forward(self):
            return "old"

    FROZEN, CONFIG, GUARDED = Frozen(), Config(lr=1, inner=Config(on=False)), Guarded()
    DEFAULT = lambda x: x * SCALE

    def act(x):
        return x
    def other(x):
        return -x
    def with_default(x, config=CONFIG, space=SPACE):
        return config["inner"]["on"], space.rate, NAME
"""


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], Any]]:
    """Writes modules, and answers with (the modules, a function that imports them a second time, with what was set)."""
    begun: list[str] = []
    origin = module_state._origin
    monkeypatch.setattr(  # looking at all modules of these tests takes most of the time
        module_state,
        "_origin",
        lambda name, module: origin(name, module) if name in (*begun, __name__, "absl.flags") else "ours",
    )
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site-packages"), *sys.path])

    def write(sources: dict[str, str]) -> Any:
        for name, source in sources.items():
            path = (tmp_path / f"{name.replace('.', '/')}").with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source))
            begun.append(Path(name).name)
        importlib.invalidate_caches()
        modules = [importlib.import_module(Path(name).name) for name in sources]

        def reimport(*names: str) -> Any:
            states = {name: state for name, state in states_of_modules().items() if name in begun}
            states = pickle.loads(pickle.dumps(states))
            for name in begun:
                del sys.modules[name]
            taken = TakenOver(states)
            taken.install()
            return taken, *(importlib.import_module(name) for name in names or begun)

        return *modules, reimport

    yield write
    for name in begun:
        sys.modules.pop(name, None)


def test_finders_without_a_way_to_find_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("settings", None)
    taken = TakenOver({"settings": ModuleState([], [], None, {})})
    finders = [taken, types.SimpleNamespace(), types.SimpleNamespace(find_spec=lambda *_: spec)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", finders)
        found = taken.find_spec("settings", None)
    assert found is spec


def set_all(settings: Any) -> None:
    """What a script may set."""
    settings.SCALE, settings.NAME, settings._PRIVATE, settings.NOTHING = 3.0, "b", 2, (1, "x")
    settings.NEW = {"new": 1}
    del settings.TREE["old"]
    settings.TREE["a"][1]["b"] = (5, 6)
    settings.ORDER.move_to_end("a")
    settings.LEVELS[1].append(7)
    settings.TAGS.add("y")
    settings.SPACE.rate, settings.SPACE.inner.on = 0.5, True
    settings.TABLE += 2
    settings.ARRAY[1] = 4
    settings.PLACE.set(8)
    settings.LOCAL.rank = 9
    settings.FROZEN = settings.Frozen(0.7, settings.Color.BLUE)
    settings.CONFIG["inner"]["on"] = True
    settings.GUARDED.rate = 2.0
    settings.Net.width, settings.Net.Inner.depth = 16, 17
    settings.act = settings.other
    factor = 4
    settings.Net.forward = lambda self: f"patched {factor}"


SEEN = (
    "SCALE", "NAME", "_PRIVATE", "NOTHING", "NEW", "TREE", "LEVELS", "TAGS", "SPACE.rate", "SPACE.inner.on",
    "LOCAL.rank", "FROZEN.rate", "FROZEN.color.name", "CONFIG.inner", "GUARDED.rate", "Net.width", "Net.Inner.depth",
    "act.__name__",
)  # fmt: skip


def test_values_of_the_scripts_modules_are_those_that_it_has_set(again: Modules) -> None:
    before, reimport = again({"settings": SETTINGS})
    set_all(before)
    taken, after = reimport()
    assert after is not before and taken.left == []
    for place in SEEN:
        assert operator.attrgetter(place)(after) == operator.attrgetter(place)(before), place
    assert list(after.ORDER) == ["b", "a"]
    assert after.TABLE.tolist() == [2, 2, 2] and after.ARRAY.tolist() == [0, 4]
    assert after.PLACE.get() == 8
    assert after.Net().forward() == "patched 4"
    assert after.GUARDED.lock is not before.GUARDED.lock, "a lock is this process's own"
    assert after.DEFAULT(1) == 3.0, "a function that nobody has replaced sees the module's values"


def test_whoever_holds_an_object_of_a_module_sees_what_was_set_in_it(again: Modules) -> None:
    user = "from settings import CONFIG, SPACE\nimport settings\n"
    before, _, reimport = again({"settings": SETTINGS, "its_user": user})
    set_all(before)
    _, after, its_user = reimport()
    assert its_user.CONFIG is after.CONFIG and its_user.SPACE is after.SPACE
    assert after.with_default(0) == (True, 0.5, "b"), "also a default of a function"


def test_modules_that_import_each_other_are_taken_over_when_both_are_whole(again: Modules) -> None:
    registry = "KNOWN = {}\ndef known(kind):\n    assert kind.__name__ not in KNOWN\n    KNOWN[kind.__name__] = kind\n"
    registry += "    return kind\nimport shapes\nclass Late:\n    pass\n"
    shapes = "from registry import known\n@known\nclass Square:\n    sides = 4\n"
    before, first, reimport = again({"registry": registry, "shapes": shapes})
    before.KNOWN["Alias"] = first.Square
    first.Square.sides, first.LATE = 5, before.Late()
    taken, after, second = reimport("registry", "shapes")
    assert taken.left == []
    assert after.KNOWN == {"Square": second.Square, "Alias": second.Square}
    assert second.Square.sides == 5 and type(second.LATE) is after.Late


OPAQUE = """
    import collections, dataclasses, datetime, functools, pathlib, torch

    TYPE, OPTIONS = torch.float32, {"dtype": torch.float32, "folder": pathlib.Path("a")}
    DEVICE, DAY, WINDOW = torch.device("cpu"), datetime.date(2020, 1, 1), collections.deque([1], maxlen=2)
    POWER = functools.partial(pow, 2)

    @dataclasses.dataclass(slots=True)
    class Slotted:
        rate: float = 0.1
    SLOTTED = Slotted()

    def act():
        return act.scale
    act.scale = 1
"""


def test_values_whose_contents_are_in_slots_or_in_c_are_those_that_the_script_has_set(again: Modules) -> None:
    before, reimport = again({"opaque": OPAQUE})
    before.TYPE = before.OPTIONS["dtype"] = torch.bfloat16
    before.OPTIONS["folder"], before.DEVICE = pathlib.Path("b"), torch.device("meta")
    before.DAY, before.POWER = datetime.date(2021, 1, 1), functools.partial(pow, 3)
    before.WINDOW.append(5)
    before.SLOTTED.rate, before.act.scale = 0.5, 4
    taken, after = reimport()
    assert taken.left == []
    assert after.TYPE is torch.bfloat16
    assert after.OPTIONS == {"dtype": torch.bfloat16, "folder": pathlib.Path("b")}
    assert (after.DEVICE, after.DAY, after.POWER(2)) == (torch.device("meta"), datetime.date(2021, 1, 1), 9)
    assert (list(after.WINDOW), after.SLOTTED.rate, after.act()) == ([1, 5], 0.5, 4)


def test_a_name_that_the_script_has_bound_to_another_object_changes_no_other_one(again: Modules) -> None:
    """Two names of one object in the files are two objects in the script."""
    presets = "PRESETS = {'small': {'width': 1}, 'large': {'width': 9}}\nACTIVE = PRESETS['small']\n"
    presets += "DEFAULTS = {'rate': 1}\nCONFIG = DEFAULTS\nSAME = DEFAULTS\n"
    before, its_user, reimport = again({"presets": presets, "its_user": "from presets import CONFIG, SAME\n"})
    before.ACTIVE, before.CONFIG = before.PRESETS["large"], {"rate": 5}
    before.DEFAULTS["rate"] = 2
    _, after, using = reimport()
    assert after.ACTIVE == {"width": 9}
    assert after.PRESETS == {"small": {"width": 1}, "large": {"width": 9}}
    assert (after.CONFIG, after.DEFAULTS, after.SAME) == ({"rate": 5}, {"rate": 2}, {"rate": 2})
    assert (using.CONFIG, using.SAME) == ({"rate": 2}, {"rate": 2})


def test_a_module_that_nobody_imports_stays_out(again: Modules) -> None:
    _, used, reimport = again({"unused": "X = 1\n", "used": "X = 1\n"})
    used.X = 2
    _, after = reimport("used")
    assert after.X == 2 and "unused" not in sys.modules


LIBRARY = """
    LIMIT, _handle, NAMES = 1, 1, {"a": [1]}
    class Layer:
        eps, _count = 1, 1
        def forward(self):
            return "old"
    def act(x):
        return x
    def other(x):
        return -x
    from math import floor as rounded
    imported = act
    class Faster:
        def forward(self):
            return "fast"
        def backward(self):
            return "back"
"""


def test_functions_and_classes_of_libraries_that_stand_for_others_are_taken_over(again: Modules) -> None:
    """Also where another library has them: by their names a re-export cannot be told from a patch."""
    lib, user, reimport = again({"site-packages/lib": LIBRARY, "site-packages/user": "from lib import act, Layer\n"})
    lib.act, user.act, lib.Layer.forward = lib.other, math.ceil, lib.Faster.forward
    lib.Layer.backward, lib.rounded = lib.Faster.backward, math.ceil
    user.Layer = lib.Faster
    taken, after, using = reimport()
    assert taken.left == []
    assert after.act is after.other and using.act is math.ceil and using.Layer is after.Faster
    assert (after.Layer().forward(), after.Layer().backward()) == ("fast", "back")
    assert after.rounded is math.ceil and after.imported.__name__ == "act"


def test_of_libraries_public_plain_values_and_patches_are_taken_over(again: Modules) -> None:
    lib, patches, reimport = again({"site-packages/lib": LIBRARY, "patches": "def fast(x):\n    return 2 * x\n"})
    lib.LIMIT, lib._handle, lib.NAMES["a"] = None, 2, [2]
    lib.Layer.eps, lib.Layer._count = 2, 2
    lib.act, lib.Layer.forward = patches.fast, lambda self: "patched"
    _, after, patched = reimport()
    assert (after.LIMIT, after.NAMES, after.Layer.eps) == (None, {"a": [2]}, 2)
    assert (after._handle, after.Layer._count) == (1, 1), "its own state is not the script's"
    assert after.act is patched.fast
    assert after.Layer().forward() == "patched"


def test_what_cannot_be_sent_is_named_where_it_differs(again: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import threading\nLOCK, CLIENT = threading.Lock(), None\nLARGE, SAME = bytes(10), bytes(9999)\n"
    before, reimport = again({"settings": source})
    before.CLIENT, before.LARGE = threading_lock(), bytes(9000)
    monkeypatch.setattr(module_state, "SENT_BYTES_MAX", 5000)
    taken, after = reimport()
    assert taken.left == ["settings.CLIENT", "settings.LARGE"]
    assert after.CLIENT is None and len(after.SAME) == 9999


def threading_lock() -> Any:
    import threading

    return threading.Lock()


def test_a_value_that_cannot_be_read_is_named(again: Modules) -> None:
    source = "class Once:\n    made = 0\n    def __reduce__(self):\n        return fail, ()\n"
    source += "def fail():\n    raise RuntimeError('no')\nVALUE = Once()\n"
    _, reimport = again({"settings": source})
    taken, _ = reimport()
    assert taken.left == ["settings.VALUE (RuntimeError: no)"]


FLAGS = """
    class Flag:
        def __init__(self, name, value):
            self.name, self.value = name, value
    class FlagHolder:
        pass
    class Values(dict):
        modules = {}
        def flags_by_module_dict(self):
            return {name: [self[each] for each in names] for name, names in self.modules.items()}
        def mark_as_parsed(self):
            self.parsed = True
    FLAGS = Values()
    def define(module, name, value):
        FLAGS[name] = Flag(name, value)
        FLAGS.modules.setdefault(module, []).append(name)
"""


def test_absls_flags_are_taken_over_with_the_module_that_defines_them(
    again: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "import absl_flags as flags\nflags.define('own', 'rate', 0.1)\n"
    absl, _, _ = again({"site-packages/absl_flags": FLAGS, "own": own})
    absl.define("train.py", "scale", 1.0)
    absl.FLAGS["rate"].value, absl.FLAGS["scale"].value = 0.5, 3.0
    monkeypatch.setitem(sys.modules, "absl.flags", absl)
    states = pickle.loads(pickle.dumps({name: states_of_modules()[name] for name in ("own", "absl.flags")}))
    monkeypatch.delitem(sys.modules, "absl.flags")
    del sys.modules["absl_flags"], sys.modules["own"]
    TakenOver(states).install()
    monkeypatch.setitem(sys.modules, "absl", types.ModuleType("absl"))
    monkeypatch.setitem(sys.modules, "absl.flags", fresh := importlib.import_module("absl_flags"))
    importlib.import_module("own")
    assert fresh.FLAGS["rate"].value == 0.5 and fresh.FLAGS.parsed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1: 2}, {1: 3}),
        ([1], (1,)),
        (1, 1.0),
        (1, True),
        ({"a"}, {"b"}),
        (lambda: 1, lambda: 2),
        (operator.add, operator.sub),
        (torch.float32, torch.bfloat16),
        (pathlib.Path("a"), pathlib.Path("b")),
        (collections.deque([1]), collections.deque([2])),
        (random.Random(0), random.Random(1)),
        (np.random.default_rng(0), np.random.default_rng(1)),
    ],
)
def test_a_digest_tells_values_apart(one: object, other: object) -> None:
    assert value_digest(one) != value_digest(other)
    assert value_digest(one) == value_digest(pickle.loads(module_state._pickled(one)))


def test_a_digest_ends_where_a_value_holds_itself() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert value_digest(value) != value_digest([1, [1]])
