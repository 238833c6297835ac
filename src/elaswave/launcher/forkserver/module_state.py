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

`elaswave.launcher.forkserver.taking_over` has the other side. What is left is told to a person where it differs.

Deliberately absent: `__main__`, of which functions and classes travel by value with what they use.
"""

import copyreg
import enum
import functools
import hashlib
import sys
import sysconfig
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
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
    """What has to be taken over of the modules that this process has imported, by name."""
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
    """Whose a module is: "script", "library", "standard", or "ours", of which nothing is sent."""
    if name in ("__main__", "__mp_main__", "sys") or name.partition(".")[0] == _OWN:
        return "ours"
    file = vars(module).get("__file__") or next(iter(vars(module).get("__path__") or ()), None)
    if not isinstance(file, str):
        return "standard" if name in sys.builtin_module_names else "ours"
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
        """What a container, or an object of a class of the script, is made of; None of anything else: a semaphore's
        counter must not travel without its lock."""
        kind = type(value)
        if issubclass(kind, dict):
            return [((key,), each) for key, each in dict.items(value) if type(key) in ATOMS]
        if kind is list:
            return [((index,), each) for index, each in enumerate(value)]
        is_own = kind is types.SimpleNamespace or kind.__module__ in self._own or kind.__module__ == "__main__"
        return list(vars(value).items()) if is_own and hasattr(value, "__dict__") else None


def _of_class(place: tuple[Any, ...], kind: type) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What stands in a class and in those within it. Members of an enum are found by name, and properties as they
    are."""
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
    """What the script may have set, or has put, there."""
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
    """A library's attributes, and those of its classes."""
    for attribute, value in list(vars(module).items()):
        if not is_dunder(attribute):
            yield (attribute,), value
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                for inner, held in list(vars(value).items()):
                    if inner not in ("__dict__", "__doc__", "__module__", "__weakref__"):
                        yield (attribute, inner), held


def is_dunder(name: object) -> bool:
    """Whether a name is the language's own, or none."""
    return not isinstance(name, str) or (name.startswith("__") and name.endswith("__"))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is an atom or a member of an enum, or built-in containers of such."""
    kind = type(value)  # never value.__class__, which may be code that warns or imports
    if kind in ATOMS or issubclass(kind, enum.Enum):
        return True
    if depth < _DEPTH_MAX and kind in (tuple, list, set, frozenset):
        return all(is_plain(each, depth + 1) for each in value)
    if depth < _DEPTH_MAX and kind in (dict, OrderedDict):
        return all(is_plain(key, depth + 1) and is_plain(each, depth + 1) for key, each in value.items())
    return False


def _is_of_script(value: Any, own: set[str]) -> bool:
    """Whether a function or class is the script's: in a library, a patch."""
    kind = type(value)
    if kind not in CALLABLES and not issubclass(kind, type):
        return False
    module = value.__dict__.get("__module__") if issubclass(kind, type) else value.__module__
    return module == "__main__" or module in own


def _is_from_elsewhere(value: Any, module: str, place: tuple[str, ...]) -> bool:
    """Whether a function or class in a library was defined elsewhere, or as something else: it was imported there, or
    put there by the script. Only a fresh import can tell, so its name is sent."""
    kind = type(value)
    if kind not in CALLABLES and not issubclass(kind, type):
        return False
    if not isinstance(value.__module__, str):  # of C, and mostly in several modules
        return len(place) == 1 and str(value.__name__) != place[0]
    return (value.__module__, value.__qualname__) != (module, ".".join(place))


def _sent(value: Any, own: set[str]) -> Any:
    """A value as it travels; `NO_VALUE` of one that cannot."""
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
    """The containers and objects in a value, each with its identity in this process."""
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
    from elaswave.launcher.forkserver.by_value import (
        dumps,  # late: a launcher that forks its template needs no cloudpickle
    )

    try:
        data = dumps(value)
    except Exception:  # whatever a class of a person's raises
        return NO_VALUE
    return data if len(data) <= SENT_BYTES_MAX else _TOO_LARGE


def _named(value: Any) -> Named | None:
    """Where a function or class is found; None where it is not: it was replaced there, or is the script's."""
    holder = getattr(value, "__self__", None)  # of a function in C
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
    """A value's type, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _flags() -> dict[str, dict[str, bytes]]:
    """absl's flags by the module that defines them; those of the script under the name of absl's module itself, with
    all that makes them flags."""
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
    """A hash of what a value holds: the same in each process, whatever made it."""
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
    """What an object of any other kind is made of, as pickling sees it: it may be in slots (a path), or in C (a type of
    torch's numbers, a date, a generator)."""
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
