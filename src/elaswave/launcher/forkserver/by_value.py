"""Objects of a script as bytes, functions and classes by value, with the names of the files that they stand in.

cloudpickle leaves those names out from 3.1.3 on, and a traceback could then show no line of the script. absl's flags
refuse to be pickled: here `FLAGS` is the one of the other side, whose flags `elaswave.launcher.forkserver.taking_over`
sets.
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
        return _absl_reduced(value) or _bits_reduced(value) or super().reducer_override(value)

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


def _bits_reduced(value: Any) -> Any:
    """How a tensor of eight-bit floating point travels: torch's own way of pickling it cannot be read back. None of
    anything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or value.layout is not torch.strided:
        return None
    if not value.dtype.is_floating_point or value.dtype.itemsize > 1:
        return None
    return _of_bits, (value.detach().view(torch.uint8), str(value.dtype).removeprefix("torch."), value.requires_grad)


def _of_bits(bits: Any, dtype: str, requires_grad: bool) -> Any:
    import torch  # where there are such tensors, it is there

    return bits.view(getattr(torch, dtype)).requires_grad_(requires_grad)
