"""Objects of a script as bytes, functions and classes by value, with the names of the files that they stand in.

cloudpickle leaves those names out from 3.1.3 on, and a traceback could then show no line of the script. absl's flags
refuse to be pickled: here `FLAGS` is the one of the other side, whose flags `elaswave.control.taking_over` sets.
"""

import copyreg
import io
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar, cast

import cloudpickle


def dumps(value: Any) -> bytes:
    """As `cloudpickle.dumps`; to be read by `pickle.loads`.

    Raises:
        Exception: what cloudpickle raises for something that cannot be pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _code_reduced(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    make, arguments = _REDUCE(code)
    return _code_of_file, (code.co_filename, make, arguments)


def _code_of_file(name: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


_REDUCE = cast(
    Callable[[types.CodeType], tuple[Callable[..., types.CodeType], tuple[Any, ...]]],
    cloudpickle.Pickler.dispatch_table[types.CodeType],
)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _absl_reduced(value) or super().reducer_override(value)

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _code_reduced}, cloudpickle.Pickler.dispatch_table)


def _absl_reduced(value: Any) -> Any:
    """How one of absl's flags travels; None of anything else."""
    absl = sys.modules.get("absl.flags")
    if absl is None:
        return None
    if value is absl.FLAGS:
        return getattr, (absl, "FLAGS")
    if issubclass(type(value), absl.Flag | absl.FlagHolder):
        return copyreg.__newobj__, (type(value),), dict(vars(value))  # type: ignore[attr-defined]
    return None
