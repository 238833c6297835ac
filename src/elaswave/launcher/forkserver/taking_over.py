"""How a fresh interpreter takes over what a script has set in modules (`elaswave.launcher.forkserver.module_state`).

It is taken over when the interpreter imports the module, in whichever process of the job and at whatever time: what
only the script's process needs is imported by nobody else. It goes into the objects that are there, so that
`from settings import CONFIG` elsewhere, a default argument or a class that holds one sees it too.
"""

import functools
import importlib
import operator
import pickle
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from elaswave.launcher.forkserver.module_state import (
    CALLABLES,
    NO_VALUE,
    InContext,
    ModuleState,
    ModuleValue,
    Named,
    OfThread,
    is_dunder,
    is_plain,
    kind_name,
    value_digest,
)


class TakenOver:
    """Brings the state of modules into this interpreter: of those that are there at once, of others when they have been
    imported. To be put first into `sys.meta_path`.

    Args:
        states: as `states_of_modules` has found them.
    """

    def __init__(self, states: dict[str, ModuleState]) -> None:
        self._states = states
        self._imports = threading.local()
        """How deep this thread is in imports, and what has been imported: modules that import each other are whole only
        when the outermost is."""
        self._claims = _Claims()
        self.left: list[str] = []
        """What the script has and this interpreter could not take over, for a person."""

    def install(self) -> None:
        """From now on."""
        sys.meta_path.insert(0, self)
        for name in list(self._states):
            if name in sys.modules:
                self._take(name)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Of `sys.meta_path`: what the other finders answer, with a loader that calls back."""
        if name not in self._states:
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(name, path, target)
            if found is not None:
                loader: Any = found.loader  # one of this module's, unless it is a class
                if hasattr(loader, "exec_module") and not isinstance(loader, type):
                    loader.exec_module = functools.partial(self._execute, name, loader.exec_module)
                return found
        return None

    def _execute(self, name: str, execute: Callable[[Any], None], module: Any) -> None:
        here = vars(self._imports)
        here["depth"] = here.get("depth", 0) + 1
        try:
            execute(module)
            here.setdefault("names", []).append(name)
        finally:
            here["depth"] -= 1
        while not here["depth"] and here["names"]:
            self._take(here["names"].pop(0))

    def _take(self, name: str) -> None:
        state, module = self._states.pop(name, None), sys.modules.get(name)
        if state is None or module is None:
            return
        for setting in state.settings:
            try:
                _set(module, setting, self._claims)
            except Exception as error:  # whatever a class of a person's raises
                self.left.append(f"{_written(name, setting.place)} ({type(error).__name__}: {error})")
        for place, there in state.left:
            here = _found(module, place)
            if there not in (kind_name(here), value_digest(here)):
                self.left.append(_written(name, place))
        if state.names is not None:
            for gone in [each for each in vars(module) if not is_dunder(each) and each not in state.names]:
                if is_plain(vars(module)[gone]):
                    delattr(module, gone)
        if state.flags:
            _set_flags(state.flags)


def _written(name: str, place: Sequence[Any]) -> str:
    return name + "".join(f"[{step[0]!r}]" if isinstance(step, tuple) else f".{step}" for step in place)


def _found(module: Any, place: Sequence[Any]) -> Any:
    """What stands at a place; `NO_VALUE` if nothing does."""
    here = module
    for step in place:
        try:
            here = here[step[0]] if isinstance(step, tuple) else vars(here)[step]
        except (LookupError, TypeError):
            return NO_VALUE
    return here


class _Claims:
    """Which object of the script's process each object here has got the contents of. One object of a fresh import may
    stand for two: the script has bound one of its names anew (``ACTIVE = PRESETS["large"]``)."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[Any, int]] = {}

    def has(self, here: Any, original: int | None) -> bool:
        """Whether an object may take the contents of an original; None: not known which."""
        return original is None or self._claims.setdefault(id(here), (here, original))[1] == original


def _set(module: Any, setting: ModuleValue, claims: _Claims) -> None:
    holder, here = _found(module, setting.place[:-1]), _found(module, setting.place)
    if holder is NO_VALUE:
        return
    sent = setting.value
    if isinstance(sent, Named):
        if _is_named(here, sent):
            return
        found = importlib.import_module(sent.module)
        new = operator.attrgetter(sent.name)(found) if sent.name else found
    elif isinstance(sent, bytes):
        new = pickle.loads(sent)
        if isinstance(new, InContext):
            here.set(new.value)
            return
        if isinstance(new, OfThread):
            vars(here).update(new.values)
            return
        new = merged(here, new.value, _Merging(claims, {id(each): original for each, original in new.originals}, {}))
    else:
        new = sent
    if new is not here:
        _put(holder, setting.place[-1], new)


def _put(holder: Any, step: Any, value: Any) -> None:
    if isinstance(step, tuple):
        holder[step[0]] = value
    elif issubclass(type(holder), type | types.ModuleType):
        setattr(holder, step, value)
    else:
        vars(holder)[step] = value  # a frozen configuration refuses setattr


def _is_named(here: Any, named: Named) -> bool:
    if not named.name:
        return issubclass(type(here), types.ModuleType) and here.__name__ == named.module
    is_callable = type(here) in CALLABLES or issubclass(type(here), type)
    return is_callable and (here.__module__, here.__qualname__) == named


class _Merging(NamedTuple):
    """What is known while one value is merged."""

    claims: _Claims
    originals: dict[int, int]
    """By the identity of what was sent."""
    seen: dict[int, Any]
    """What was merged already, by the identity of what was sent."""


def merged(here: Any, sent: Any, merging: _Merging) -> Any:
    """A value that was sent, in the object that is here where that can take it: others may hold it too.

    Args:
        here: of any type.
        sent: the value; it is used up.
        merging: of this value.
    Returns:
        `here` with the contents of `sent`, or `sent`.
    """
    seen = merging.seen
    if id(sent) in seen:
        return seen[id(sent)]
    if type(here) is not type(sent) or here is sent:
        return sent
    if type(here) in CALLABLES:  # one that is found by no name, such as a lambda; its globals are this module's
        return here if value_digest(here) == value_digest(sent) else sent
    if issubclass(type(here), type):
        return here if (here.__module__, here.__qualname__) == (sent.__module__, sent.__qualname__) else sent
    if not merging.claims.has(here, merging.originals.get(id(sent))):
        return sent
    seen[id(sent)] = here
    if _fill(here, sent, merging) or value_digest(here) == value_digest(sent):
        return here
    seen[id(sent)] = sent
    return sent


def _fill(here: Any, sent: Any, merging: _Merging) -> bool:
    """Gives an object the contents of another one of its type, if it is of a kind that can take them."""
    kind = type(sent)
    if issubclass(kind, dict):
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        items = [(key, merged(dict.get(here, key), each, merging)) for key, each in dict.items(sent)]
        base.clear(here)
        for key, each in items:
            base.__setitem__(here, key, each)
    elif issubclass(kind, list):
        list.__setitem__(here, slice(None), [merged(*pair, merging) for pair in _paired(here, sent)])
    elif issubclass(kind, set):
        set.clear(here)
        set.update(here, sent)
    elif kind.__module__.partition(".")[0] in ("numpy", "torch") and hasattr(sent, "shape"):
        return _fill_numbers(here, sent)
    elif not issubclass(kind, types.SimpleNamespace) and any(
        name in vars(each) for each in kind.__mro__[:-1] for name in ("__reduce__", "__reduce_ex__")
    ):
        return False
    elif not hasattr(sent, "__dict__") or any("__slots__" in vars(each) for each in kind.__mro__):
        return False
    if hasattr(sent, "__dict__"):
        _fill(vars(here), vars(sent), merging)
    return True


def _paired(here: list[Any], sent: list[Any]) -> Iterator[tuple[Any, Any]]:
    for index, each in enumerate(list.__iter__(sent)):
        yield (list.__getitem__(here, index) if index < list.__len__(here) else None), each


def _fill_numbers(here: Any, sent: Any) -> bool:
    """Of tensors and arrays, where they are of one kind; a parameter of the script's stays what it is."""
    if here.shape != sent.shape or here.dtype != sent.dtype or not here.shape:
        return False
    try:
        if hasattr(here, "requires_grad"):
            here.requires_grad_(sent.requires_grad).data.copy_(sent.data)
        else:
            here[...] = sent
    except (RuntimeError, ValueError, TypeError):  # not to be written, or of a kind of its own
        return False
    return True


def _set_flags(flags: dict[str, bytes]) -> None:
    absl = importlib.import_module("absl.flags")
    for name, data in flags.items():
        value = pickle.loads(data)
        if isinstance(value, absl.Flag):
            absl.FLAGS[name] = value
        elif name in absl.FLAGS:
            absl.FLAGS[name].value = value
    absl.FLAGS.mark_as_parsed()
