"""What a script has set in the modules that it has imported, and how a fresh interpreter takes it over.

A fork would have inherited all of it. A fresh interpreter imports the same modules, and they have the values of their
files again: flags, global configurations and replaced functions (monkey patches) would silently have old values.

What is sent, by module:

- Of the script's own modules (files outside of the standard library and of `site-packages`): every value of the module
  and of its classes, as far as it can be pickled. An object whose parts cannot all be pickled (one has a lock) is sent
  in parts.
- Of libraries: what has a public name and is plain, and the functions and classes that stand in the place of others
  (patches). Their own state (caches, handles, whether a device was initialised) is theirs: a fresh import makes it
  anew.
- Of the standard library: only what the script has put there.

`elaswave.launcher.forkserver.module_state` has the other side. What is left is told to a person where it differs.

Deliberately absent: `__main__`, of which functions and classes travel by value with what they use.

How a fresh interpreter takes over what a script has set in modules (`elaswave.launcher.forkserver.module_state`).

It is taken over when the interpreter imports the module, in whichever process of the job and at whatever time: what
only the script's process needs is imported by nobody else. It goes into the objects that are there, so that
`from settings import CONFIG` elsewhere, a default argument or a class that holds one sees it too.
"""

import copyreg
import enum
import functools
import hashlib
import importlib
import operator
import pickle
import sys
import sysconfig
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

SENT_BYTES_MAX = 64 << 20
"""Of one value. Larger ones are caches and data rather than settings, and a cache that is empty does no harm."""
ORIGINALS_MAX = 10_000
"""Objects in one value whose identity is sent too."""
_DEPTH_MAX = 4
"""Of objects that are sent in parts."""
ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...))
CALLABLES = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)
_OWN = __name__.partition(".")[0]
NO_VALUE, _TOO_LARGE = object(), object()


class Named(NamedTuple):
    """A module, or a function or class in it, which the other side finds by its name."""

    module: str
    name: str


class ModuleValue(NamedTuple):
    """One value of a module."""

    place: tuple[Any, ...]
    """From the module's attribute on: names of attributes; keys and indices of containers in a tuple each."""
    value: Any
    """An atom, a `Named`, or bytes of anything else."""


class ModuleState(NamedTuple):
    """What is taken over of one module."""

    settings: list[ModuleValue]
    left: list[tuple[tuple[Any, ...], str]]
    """What is not sent: its place, and its type or, of what is too large, its `digest_of`."""
    names: frozenset[str] | None
    """All names of one of the script's modules; None of others, of which nothing is removed."""
    flags: dict[str, bytes]
    """Values of absl's flags that the module defines, by name."""


def states_of_modules() -> dict[str, ModuleState]:
    """Collects what has to be taken over of the modules that this process has imported, by name."""
    # A list, since threads may import meanwhile. No isinstance: it may ask a lazy module for its __class__.
    modules = {name: each for name, each in list(sys.modules.items()) if issubclass(type(each), types.ModuleType)}
    origins = {name: _origin(name, module) for name, module in modules.items()}
    own = {name for name, origin in origins.items() if origin == "script"}
    states, flags = {}, _flags()
    for name, origin in origins.items():
        if origin == "script":
            states[name] = _Sending(modules[name], own).state._replace(flags=flags.get(name, {}))
        elif origin != "ours":
            settings = list(_settings_of_library(name, modules[name], own, takes_plain=origin == "library"))
            if settings or name in flags:
                states[name] = ModuleState(settings, [], None, flags.get(name, {}))
    return states


@functools.cache
def _standard_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def _origin(name: str, module: types.ModuleType) -> str:
    """Tells whose a module is: "script", "library", "standard", or "ours", of which nothing is sent."""
    if name in ("__main__", "__mp_main__", "sys") or name.partition(".")[0] == _OWN:
        return "ours"
    file = vars(module).get("__file__") or next(iter(vars(module).get("__path__") or ()), None)
    if not isinstance(file, str):
        return "standard" if name in sys.builtin_module_names else "ours"
    # Asked first, since this folder lies within the standard library's.
    if "/site-packages/" in file or "/dist-packages/" in file:
        return "library"
    return "standard" if file.startswith(_standard_folders()) else "script"


class _Sending:
    """Collects the state of one of the script's modules.

    Args:
        module: the module.
        own: names of all the script's modules.
    """

    def __init__(self, module: types.ModuleType, own: set[str]) -> None:
        self._own = own
        names = frozenset(name for name in vars(module) if not is_dunder(name))
        self.state = ModuleState([], [], names, {})
        for name in sorted(names):
            value = vars(module)[name]
            self._send((name,), value)
            if type(value) is types.FunctionType and value.__module__ == module.__name__:
                for attribute, inner in list(vars(value).items()):
                    if not is_dunder(attribute):
                        self._send((name, attribute), inner)
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                for place, inner in _of_class((name,), value):
                    self._send(place, inner)

    def _send(self, place: tuple[Any, ...], value: Any) -> None:
        """Notes a value, whole if that can be, else in parts."""
        sent = _sent(value, self._own)
        if sent is _TOO_LARGE:
            self.state.left.append((place, value_digest(value)))
        elif sent is not NO_VALUE:
            self.state.settings.append(ModuleValue(place, sent))
        elif len(place) < _DEPTH_MAX and (parts := self._parts(value)) is not None:
            for step, part in parts:
                self._send((*place, step), part)
        else:
            self.state.left.append((place, kind_name(value)))

    def _parts(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Lists what a container, or an object of a class of the script, is made of; None of anything else: a
        semaphore's counter must not travel without its lock."""
        kind = type(value)
        if issubclass(kind, dict):
            # The methods of the built-in class, here and below: a subclass may do anything in its own.
            return [((key,), each) for key, each in dict.items(value) if type(key) in ATOMS]
        if kind is list:
            return [((index,), each) for index, each in enumerate(value)]
        is_own = kind is types.SimpleNamespace or kind.__module__ in self._own or kind.__module__ == "__main__"
        return list(vars(value).items()) if is_own and hasattr(value, "__dict__") else None


def _of_class(place: tuple[Any, ...], kind: type) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields what stands in a class and in those within it. Members of an enum are found by name, and properties as
    they are."""
    if issubclass(kind, enum.Enum):
        return
    for name, value in list(vars(kind).items()):
        if is_dunder(name) or isinstance(value, types.MemberDescriptorType | property | classmethod | staticmethod):
            continue
        yield (*place, name), value
        if issubclass(type(value), type) and value.__qualname__ == f"{kind.__qualname__}.{name}":
            yield from _of_class((*place, name), value)


def _settings_of_library(
    name: str, module: types.ModuleType, own: set[str], *, takes_plain: bool
) -> Iterator[ModuleValue]:
    """Yields what the script may have set, or has put, there."""
    takes_patches = takes_plain  # of libraries only, also of their private modules
    takes_plain &= not any(part.startswith("_") for part in name.split("."))
    for place, value in _places_of(name, module):
        is_public = takes_plain and not place[-1].startswith("_")
        sent: Any = NO_VALUE
        if (is_public and is_plain(value)) or _is_of_script(value, own):
            sent = _sent(value, own)
        elif takes_patches and _is_from_elsewhere(value, name, place):
            sent = _named(value) or NO_VALUE
        if sent not in (NO_VALUE, _TOO_LARGE):
            yield ModuleValue(place, sent)


def _places_of(name: str, module: types.ModuleType) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields a library's attributes, and those of its classes."""
    for attribute, value in list(vars(module).items()):
        if not is_dunder(attribute):
            yield (attribute,), value
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                for inner, held in list(vars(value).items()):
                    if inner not in ("__dict__", "__doc__", "__module__", "__weakref__"):
                        yield (attribute, inner), held


def is_dunder(name: object) -> bool:
    """Tells whether a name is the language's own, or none."""
    return not isinstance(name, str) or (name.startswith("__") and name.endswith("__"))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Tells whether a value is an atom or a member of an enum, or built-in containers of such."""
    kind = type(value)  # never value.__class__, which may be code that warns or imports
    if kind in ATOMS or issubclass(kind, enum.Enum):
        return True
    if depth < _DEPTH_MAX and kind in (tuple, list, set, frozenset):
        return all(is_plain(each, depth + 1) for each in value)
    if depth < _DEPTH_MAX and kind in (dict, OrderedDict):
        return all(is_plain(key, depth + 1) and is_plain(each, depth + 1) for key, each in value.items())
    return False


def _is_of_script(value: Any, own: set[str]) -> bool:
    """Tells whether a function or class is the script's: in a library, a patch."""
    kind = type(value)
    if kind not in CALLABLES and not issubclass(kind, type):
        return False
    module = value.__dict__.get("__module__") if issubclass(kind, type) else value.__module__
    return module == "__main__" or module in own


def _is_from_elsewhere(value: Any, module: str, place: tuple[str, ...]) -> bool:
    """Tells whether a function or class in a library was defined elsewhere, or as something else: it was imported
    there, or put there by the script. Only a fresh import can tell, so its name is sent."""
    kind = type(value)
    if kind not in CALLABLES and not issubclass(kind, type):
        return False
    if not isinstance(value.__module__, str):  # of C, and mostly in several modules
        return len(place) == 1 and str(value.__name__) != place[0]
    return (value.__module__, value.__qualname__) != (module, ".".join(place))


def _sent(value: Any, own: set[str]) -> Any:
    """Returns a value as it travels; `NO_VALUE` of one that cannot."""
    kind = type(value)
    if kind in ATOMS and kind is not bytes:
        return value
    if isinstance(value, types.ModuleType) and issubclass(kind, types.ModuleType):
        return Named(value.__name__, "") if sys.modules.get(value.__name__) is value else NO_VALUE
    if kind in CALLABLES or issubclass(kind, type):
        named = _named(value)
        if named is not None:
            return named
        if issubclass(kind, type) and not _is_of_script(value, own):
            return NO_VALUE  # made by a metaclass, and found by none
    if kind.__module__.startswith("absl.flags"):
        return NO_VALUE  # see `_flags`
    if kind is ContextVar:
        current = value.get(NO_VALUE)
        return NO_VALUE if current is NO_VALUE else _pickled(InContext(current))
    if kind is threading.local:
        return _pickled(OfThread(dict(vars(value))))
    return _pickled(_whole(value))


def _whole(value: Any) -> "Whole":
    try:
        return Whole(value, list(_originals(value)))
    except Exception:  # whatever a class of a person's raises
        return Whole(value, [])


def _originals(value: Any) -> Iterator[tuple[Any, int]]:
    """Yields the containers and objects in a value, each with its identity in this process."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < ORIGINALS_MAX:
        each = waiting.pop()
        kind = type(each)
        if kind in ATOMS or kind in CALLABLES or issubclass(kind, type | types.ModuleType) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each, id(each)
        if issubclass(kind, dict):
            waiting.extend(dict.values(each))
        elif issubclass(kind, list | tuple):
            waiting.extend(each)
        if hasattr(each, "__dict__"):
            waiting.extend(vars(each).values())


def _pickled(value: Any) -> Any:
    from elaswave.launcher.forkserver.fresh import (
        dumps,  # late: a launcher that forks its forkserver needs no cloudpickle
    )

    try:
        data = dumps(value)
    except Exception:  # whatever a class of a person's raises
        return NO_VALUE
    return data if len(data) <= SENT_BYTES_MAX else _TOO_LARGE


def _named(value: Any) -> Named | None:
    """Finds where a function or class is found; None where it is not: it was replaced there, or is the script's."""
    holder = getattr(value, "__self__", None)  # of a function in C
    # Functions of torch in C say of no module, or of one that lacks them, but torch itself has most.
    for module in (value.__module__, getattr(holder, "__name__", None), "torch"):
        if isinstance(module, str) and module != "__main__" and module in sys.modules:
            found: Any = sys.modules[module]
            for part in value.__qualname__.split(".") if module != "torch" else (value.__name__,):
                found = getattr(found, "__dict__", {}).get(part)  # a library's lazy attribute may import, or raise
            if found is value:
                return Named(module, value.__qualname__ if module != "torch" else value.__name__)
    return None


class Whole(NamedTuple):
    """A value, and which objects of the script's process those in it stand for."""

    value: Any
    originals: list[tuple[Any, int]]
    """Containers and objects in it, with their identities there."""


class InContext(NamedTuple):
    """The value of a context variable."""

    value: Any


class OfThread(NamedTuple):
    """What a `threading.local` holds for the thread that trains."""

    values: dict[str, Any]


def kind_name(value: Any) -> str:
    """Names a value's type, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _flags() -> dict[str, dict[str, bytes]]:
    """Collects absl's flags by the module that defines them; those of the script under the name of absl's module
    itself, with all that makes them flags."""
    absl = sys.modules.get("absl.flags")
    found: dict[str, dict[str, bytes]] = {}
    if absl is None:
        return found
    for module, flags in absl.FLAGS.flags_by_module_dict().items():
        for flag in flags:
            is_of_module = module in sys.modules and module != "__main__"
            sent = _pickled(flag.value if is_of_module else flag)
            if isinstance(sent, bytes):
                found.setdefault(module if is_of_module else "absl.flags", {})[flag.name] = sent
    return found


def value_digest(value: Any) -> str:
    """Computes a hash of what a value holds: the same in each process, whatever made it."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value, set())
    return digest.hexdigest()


def _feed(digest: Any, value: Any, inside: set[int]) -> None:
    kind = type(value)
    digest.update(f"{kind_name(value)}\n".encode())
    if kind in ATOMS:
        digest.update(f"{value!r}\n".encode())
    elif id(value) not in inside:  # else it holds itself
        inside.add(id(value))
        if issubclass(kind, set | frozenset):
            # The order of a set depends on addresses and on the hashes of this process.
            digest.update("".join(sorted(map(value_digest, value))).encode())
        elif kind.__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "shape"):
            _feed_numbers(digest, value)
        else:
            for part in _contents(value):
                _feed(digest, part, inside)
        inside.remove(id(value))


def _contents(value: Any) -> list[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return [part for item in dict.items(value) for part in item]
    if issubclass(kind, list | tuple):
        return [len(value), *value]
    if kind is types.FunctionType:
        # An empty cell raises if it is asked for its contents.
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if kind is types.CodeType:
        return [value.co_code, value.co_consts, value.co_names, value.co_freevars]
    if issubclass(kind, types.ModuleType):
        return [value.__name__]
    if kind in CALLABLES or issubclass(kind, type):
        return [value.__module__, value.__qualname__]
    return _reduced(value)


def _reduced(value: Any) -> list[Any]:
    """Lists what an object of any other kind is made of, as pickling sees it: it may be in slots (a path), or in C (a
    type of torch's numbers, a date, a generator)."""
    reducer: Any = copyreg.dispatch_table.get(type(value))
    try:
        parts = value.__reduce_ex__(4) if reducer is None else reducer(value)
        if isinstance(parts, str):
            return [parts]
        return [list(each) if isinstance(each, Iterator) else each for each in parts]
    except Exception:  # it cannot be pickled
        return [vars(value)] if hasattr(value, "__dict__") else []


def _feed_numbers(digest: Any, value: Any) -> None:
    array = value.detach().cpu().contiguous() if hasattr(value, "detach") else value
    digest.update(f"{array.dtype} {list(array.shape)}\n".encode())
    if hasattr(array, "detach"):
        import torch  # the value is of it

        array = array.reshape(-1).view(torch.uint8).numpy()
    digest.update(array.tobytes())


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
        """Takes effect from now on."""
        # First this, since what is taken over below may import more.
        sys.meta_path.insert(0, self)
        for name in list(self._states):
            if name in sys.modules:
                self._take(name)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Serves as a finder of `sys.meta_path`: returns what the other finders answer, with a loader that calls
        back."""
        if name not in self._states:
            return None
        for finder in sys.meta_path:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            found = None if find is None else find(name, path, target)  # Python, too, passes over one that has none
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
    """Finds what stands at a place; `NO_VALUE` if nothing does."""
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
        """Tells whether an object may take the contents of an original; None: not known which."""
        # The object is kept beside its id, which no other one may get.
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
        # Value and originals were pickled together, so these are the very objects that are in the value.
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
    """Merges a value that was sent into the object that is here where that can take it: others may hold it too.

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
    # Before its parts are merged: it may hold itself.
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
        # Before the dictionary is emptied: parts are merged into those that are here.
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
    # A class that says itself how it is pickled may keep its contents elsewhere. (All have it of object, the last.)
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
    """Fills in the contents of tensors and arrays, where they are of one kind; a parameter of the script's stays what
    it is."""
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
    # absl gives no value of a flag before a command line was parsed, which nobody does here.
    absl.FLAGS.mark_as_parsed()
