"""Serves one part of a model to a worker of elaswave: forward and backward with other software, in its own process.

This file is complete in itself: it needs Python (3.11 was tried), the standard library and one numeric library, and no
elaswave. Copy it into any environment. It has the protocol's codec (which elaswave uses too), adapters for torch, JAX
and numpy, and the loop. ``docs/foreign.md`` of elaswave describes the protocol message by message.

    python server.py --software numpy --options '{"width": 64}' parts.py:Middle

It reads requests from standard input and writes answers to standard output, in order; what the part prints goes to
standard error. It ends when its input ends, and when the process that has started it dies.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PROTOCOL = 1
MAGIC = b"ELWF"
ALIGNMENT = 64
"""Of every array's data in a body, and of the body in memory: results of kernels can depend on addresses."""
DIMENSIONS_MAX = 16
ARRAYS_MAX = 1 << 16
TEXT_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 1 << 32
"""Of requests, unless told otherwise."""
HASH_BYTES = 16

HELLO, INITIAL, PARAMETERS, FORWARD, BACKWARD = 1, 2, 3, 4, 5
"""Requests."""
WELCOME, VALUES, HELD, RESULT, DIGEST, FAILED = 129, 130, 131, 132, 133, 134
"""Answers."""
ONLY_HASH = 1
"""Flag of FORWARD and BACKWARD: answer with DIGEST instead of RESULT."""
ONE = 2
"""Flag of RESULT: the part has returned one array, not a tuple of one."""

TYPES = {
    1: ("float32", 4),
    2: ("bfloat16", 2),
    3: ("int64", 8),
    4: ("int32", 4),
    5: ("bool", 1),
    6: ("uint8", 1),
}
"""Element types by code, with their bytes; little-endian."""
_CODES = {name: code for code, (name, _) in TYPES.items()}
_BYTES = dict(TYPES.values())
FLOATS = ("float32", "bfloat16")
"""Types that have gradients."""

# magic, protocol, kind, flags, number, step, micro-batch, hash, bytes of the text, number of arrays, bytes of the body
_HEADER = struct.Struct("<4sHBBQqi16sIIQ4x")
HEADER_BYTES = _HEADER.size
_ARRAY = struct.Struct("<BB6x")


class ProtocolError(Exception):
    """Bytes that are no message of this protocol. Says what was seen and what was needed."""


class Array(NamedTuple):
    """An array as it travels: contiguous, little-endian."""

    type: str
    shape: tuple
    data: Any
    """Its bytes, as anything with the buffer protocol."""

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return _num_bytes(self.type, self.shape)


class MessageHeader(NamedTuple):
    """The first 64 bytes of a message."""

    kind: int
    flags: int
    number: int
    """Of the request; an answer has its request's."""
    step: int
    microbatch: int
    hash: bytes
    """Of parameters, or of results."""
    text_bytes: int
    num_arrays: int
    body_bytes: int


class PartMessage(NamedTuple):
    """A whole message."""

    kind: int
    number: int = 0
    text: str = ""
    arrays: Sequence[Array] = ()
    flags: int = 0
    step: int = 0
    microbatch: int = 0
    hash: bytes = bytes(HASH_BYTES)


# ---------------------------------------------------------------------------------------------------------------- codec


def _num_bytes(kind: str, shape: Sequence[int]) -> int:
    total = _BYTES[kind]
    for size in shape:
        total *= size
    return total


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def encode_message(message: PartMessage) -> list:
    """Encodes a message as buffers, to be written one after the other; arrays are not copied.

    Raises:
        ProtocolError: it has too long a text, or an array of a type that does not travel.
    """
    text = message.text.encode()
    if len(text) > TEXT_BYTES_MAX:
        raise ProtocolError(f"a text of {len(text)} bytes, at most {TEXT_BYTES_MAX} travel")
    head, payload, position = [text], [], 0
    for array in message.arrays:
        if array.type not in _CODES:
            raise ProtocolError(f"an array of type {array.type}, needed: one of {', '.join(_CODES)}")
        if len(array.shape) > DIMENSIONS_MAX:
            raise ProtocolError(f"an array of {len(array.shape)} dimensions, at most {DIMENSIONS_MAX} travel")
        head.append(_ARRAY.pack(_CODES[array.type], len(array.shape)))
        head.append(struct.pack(f"<{len(array.shape)}Q", *array.shape))
        if array.num_bytes:
            payload.append(array.data)
        position += array.num_bytes
        if padding := -array.num_bytes % ALIGNMENT:
            payload.append(bytes(padding))
            position += padding
    said = b"".join(head)
    said += bytes(_aligned(len(said)) - len(said))
    header = _HEADER.pack(
        MAGIC,
        PROTOCOL,
        message.kind,
        message.flags,
        message.number,
        message.step,
        message.microbatch,
        message.hash,
        len(text),
        len(message.arrays),
        len(said) + position,
    )
    return [header + said, *payload]


def decode_message_header(data: Any, body_bytes_max: int) -> MessageHeader:
    """Decodes the first `HEADER_BYTES` bytes of a message.

    Args:
        data: the bytes.
        body_bytes_max: longest body that is taken.
    Raises:
        ProtocolError: they are no header of this protocol, or announce too much.
    """
    magic, protocol, kind, flags, number, step, microbatch, its_hash, text_bytes, num_arrays, body_bytes = (
        _HEADER.unpack(data)
    )
    if magic != MAGIC:
        raise ProtocolError(
            f"a message begins with {bytes(magic)!r}, needed: {MAGIC!r}; does the part write to file 1?"
        )
    if protocol != PROTOCOL:
        raise ProtocolError(f"the other side speaks protocol {protocol}, and this one {PROTOCOL}: use one server.py")
    # Before any memory is taken for what it announces.
    if text_bytes > TEXT_BYTES_MAX or num_arrays > ARRAYS_MAX or body_bytes > body_bytes_max:
        raise ProtocolError(
            f"a message announces {text_bytes} bytes of text, {num_arrays} arrays and {body_bytes} bytes in all; at "
            f"most {TEXT_BYTES_MAX}, {ARRAYS_MAX} and {body_bytes_max} are taken"
        )
    if text_bytes + num_arrays * _ARRAY.size > body_bytes:
        raise ProtocolError(f"a message of {body_bytes} bytes announces more text and arrays than it has room for")
    return MessageHeader(kind, flags, number, step, microbatch, its_hash, text_bytes, num_arrays, body_bytes)


def decode_message(header: MessageHeader, body: Any) -> PartMessage:
    """Decodes a message from its header and its body.

    Args:
        header: of `decode_message_header`.
        body: `body_bytes` of it, a memoryview; arrays are views of it.
    Raises:
        ProtocolError: they do not fit together.
    """
    body = memoryview(body)
    try:
        text = bytes(body[: header.text_bytes]).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a message's text is no UTF-8: {error}") from error
    position, described = header.text_bytes, []
    for _ in range(header.num_arrays):
        if position + _ARRAY.size > len(body):
            raise ProtocolError("a message ends within what it says of its arrays")
        code, num_dimensions = _ARRAY.unpack_from(body, position)
        position += _ARRAY.size
        if code not in TYPES or num_dimensions > DIMENSIONS_MAX:
            raise ProtocolError(f"an array has type {code} and {num_dimensions} dimensions")
        if position + 8 * num_dimensions > len(body):
            raise ProtocolError("a message ends within the shape of an array")
        shape = struct.unpack_from(f"<{num_dimensions}Q", body, position)
        position += 8 * num_dimensions
        described.append((TYPES[code][0], shape))
    position, arrays = _aligned(position), []
    for kind, shape in described:
        num_bytes = _num_bytes(kind, shape)
        if position + num_bytes > len(body):
            raise ProtocolError(f"an array of shape {list(shape)} does not fit into the message's {len(body)} bytes")
        arrays.append(Array(kind, shape, body[position : position + num_bytes]))
        position += _aligned(num_bytes)
    if position != len(body):
        raise ProtocolError(f"a message has {len(body)} bytes, and its text and arrays take {position}")
    return PartMessage(
        header.kind, header.number, text, arrays, header.flags, header.step, header.microbatch, header.hash
    )


def hash_arrays(arrays: Sequence[Array]) -> bytes:
    """Computes a hash of types, shapes and bits, `HASH_BYTES` long."""
    found = hashlib.blake2b(digest_size=HASH_BYTES)
    for array in arrays:
        found.update(f"{array.type} {list(array.shape)} ".encode())
        if array.num_bytes:
            found.update(array.data)
    return found.digest()


# ------------------------------------------------------------------------------------------------------------- adapters


class Numpy:
    """A part in numpy: an object with ``init(seed)``, a dictionary of arrays by name, ``forward(parameters, *inputs)``,
    an array or a tuple of arrays, and ``backward(parameters, inputs, gradients)``: the gradients of the inputs, in
    order, and of the parameters, by name.
    """

    software = "numpy"

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
        import numpy

        self.numpy, self.part = numpy, make(**options)
        self.version = numpy.__version__
        self.parameters: dict[str, Any] = {}

    def initial(self, seed: int) -> dict[str, Array]:
        """Returns the values that training begins with, by name."""
        return {name: self._array(values) for name, values in self.part.init(seed).items()}

    def hold(self, parameters: Mapping[str, Array]) -> None:
        """Computes with these from now on."""
        self.parameters = {name: self._values(array) for name, array in parameters.items()}

    def forward(self, inputs: Sequence[Array]) -> Any:
        """Computes what the part returns."""
        before = self._draws()
        found = self.part.forward(self.parameters, *map(self._values, inputs))
        self._check_draws(before)
        return tuple(map(self._array, found)) if isinstance(found, tuple) else self._array(found)

    def backward(self, inputs: Sequence[Array], gradients: Sequence[Array]) -> list[Array]:
        """Computes the gradients of floating-point inputs, then of all parameters."""
        before = self._draws()
        values = tuple(map(self._values, inputs))
        of_inputs, of_parameters = self.part.backward(self.parameters, values, tuple(map(self._values, gradients)))
        self._check_draws(before)
        wanted = [found for found, array in zip(of_inputs, inputs) if array.type in FLOATS]
        return [self._array(found) for found in (*wanted, *(of_parameters[name] for name in self.parameters))]

    def _draws(self) -> Any:
        """Tells where the generator of numpy.random stands."""
        # Of the global generator alone; the determinism check of elaswave finds others.
        _, words, position, *_ = self.numpy.random.get_state()
        return words, position

    def _check_draws(self, before: Any) -> None:
        after = self._draws()
        if before[1] != after[1] or not self.numpy.array_equal(before[0], after[0]):
            raise RuntimeError("the part draws from numpy.random: a part must give the same each time that it is asked")

    def _values(self, array: Array) -> Any:
        if array.type == "bfloat16":
            raise RuntimeError(
                "numpy has no bfloat16: train the model in float32, or serve this part with torch or jax"
            )
        values = self.numpy.frombuffer(array.data, dtype=array.type).reshape(array.shape)
        values.flags.writeable = False  # parameters stay as they came
        return values

    def _array(self, values: Any) -> Array:
        # ascontiguousarray makes one dimension of none.
        values = self.numpy.ascontiguousarray(values).reshape(self.numpy.shape(values))
        name = str(values.dtype)
        if name not in _CODES:
            raise RuntimeError(f"the part returned an array of type {name}, needed: one of {', '.join(_CODES)}")
        return Array(name, values.shape, memoryview(values.reshape(-1).view("u1")))


class Jax:
    """A part in JAX: an object with ``init(seed)``, a dictionary of arrays by name, and ``apply(parameters, *inputs)``,
    an array or a tuple of arrays, which is compiled; its backward is ``jax.vjp``.
    """

    software = "jax"

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
        import numpy

        jax: Any = importlib.import_module("jax")  # not where elaswave's types are checked
        self.jax, self.numpy, self.part = jax, numpy, make(**options)
        self.version = f"{jax.__version__} (numpy {numpy.__version__})"
        self.parameters: dict[str, Any] = {}
        self._forward, self._backward = jax.jit(self.part.apply), jax.jit(self._pulled_back)

    def initial(self, seed: int) -> dict[str, Array]:
        """Returns the values that training begins with, by name."""
        return {name: self._array(values) for name, values in self.part.init(seed).items()}

    def hold(self, parameters: Mapping[str, Array]) -> None:
        """Computes with these from now on."""
        self.parameters = {name: self._values(array) for name, array in parameters.items()}

    def forward(self, inputs: Sequence[Array]) -> Any:
        """Computes what the part returns."""
        found = self._forward(self.parameters, *map(self._values, inputs))
        return tuple(map(self._array, found)) if isinstance(found, tuple) else self._array(found)

    def backward(self, inputs: Sequence[Array], gradients: Sequence[Array]) -> list[Array]:
        """Computes the gradients of floating-point inputs, then of all parameters."""
        values = tuple(map(self._values, inputs))
        of_inputs, of_parameters = self._backward(self.parameters, values, tuple(map(self._values, gradients)))
        return [self._array(found) for found in (*of_inputs, *(of_parameters[name] for name in self.parameters))]

    def _pulled_back(self, parameters: Any, inputs: Any, gradients: Any) -> Any:
        places = [at for at, value in enumerate(inputs) if self.jax.numpy.issubdtype(value.dtype, self.numpy.floating)]

        def floats(parameters: Any, *some: Any) -> list:
            values = list(inputs)
            for at, value in zip(places, some):
                values[at] = value
            found = self.part.apply(parameters, *values)
            found = found if isinstance(found, tuple) else (found,)
            return [each for each in found if self.jax.numpy.issubdtype(each.dtype, self.numpy.floating)]

        _, pull = self.jax.vjp(floats, parameters, *(inputs[at] for at in places))
        of_parameters, *of_inputs = pull(list(gradients))
        return of_inputs, of_parameters

    def _values(self, array: Array) -> Any:
        kind = self.jax.numpy.dtype(array.type)
        values = self.numpy.frombuffer(array.data, dtype=kind).reshape(array.shape)
        if array.type == "int64" and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
            raise RuntimeError(
                "JAX has whole numbers of 32 bits, unless it is told otherwise, and the input larger ones"
            )
        return self.jax.device_put(values.astype("int32") if array.type == "int64" else values)

    def _array(self, values: Any) -> Array:
        values = self.numpy.asarray(values)
        values = self.numpy.ascontiguousarray(values).reshape(values.shape)
        name = str(values.dtype)
        if name not in _CODES:
            raise RuntimeError(f"the part returned an array of type {name}, needed: one of {', '.join(_CODES)}")
        return Array(name, values.shape, memoryview(values.reshape(-1).view("u1")))


class Torch:
    """A part in torch: an ``nn.Module``, built from the seed that its initial values are asked with."""

    software = "torch"

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.make, self.options = torch, make, options
        self.version = torch.__version__
        self.types = {name: getattr(torch, name) for name in _CODES}
        self.module = self._build(0)
        self.own = dict(self.module.named_parameters())

    def _build(self, seed: int) -> Any:
        self.torch.manual_seed(seed)
        return self.make(**self.options)

    def initial(self, seed: int) -> dict[str, Array]:
        """Returns the values that training begins with, by name."""
        return {name: self._array(values) for name, values in self._build(seed).named_parameters()}

    def hold(self, parameters: Mapping[str, Array]) -> None:
        """Computes with these from now on."""
        for name, array in parameters.items():
            self.own[name].data = self._tensor(array).clone()

    def forward(self, inputs: Sequence[Array]) -> Any:
        """Computes what the part returns."""
        before = self._before()
        with self.torch.no_grad():
            found = self.module(*map(self._tensor, inputs))
        self._check(before)
        return tuple(map(self._array, found)) if isinstance(found, tuple) else self._array(found)

    def backward(self, inputs: Sequence[Array], gradients: Sequence[Array]) -> list[Array]:
        """Computes the gradients of floating-point inputs, then of all parameters."""
        before = self._before()
        values = list(map(self._tensor, inputs))
        floats = [value.requires_grad_() for value in values if value.is_floating_point()]
        with self.torch.enable_grad():
            found = self.module(*values)
        found = found if isinstance(found, tuple) else (found,)
        ends = [(end, gradient) for end, gradient in zip([end for end in found if end.is_floating_point()], gradients)]
        ends = [(end, self._tensor(gradient)) for end, gradient in ends if end.requires_grad]
        wanted = [*floats, *self.own.values()]
        if ends and wanted:
            outputs, its = zip(*ends)
            made: Sequence = self.torch.autograd.grad(outputs, wanted, its, allow_unused=True)
        else:
            made = [None] * len(wanted)
        self._check(before)
        zeros = self.torch.zeros_like
        return [self._array(zeros(of) if each is None else each) for of, each in zip(wanted, made)]

    def _before(self) -> Any:
        # torch counts the writes in place to each tensor.
        tensors = [("buffer", *item) for item in self.module.named_buffers()]
        tensors += [("parameter", *item) for item in self.own.items()]
        return self.torch.get_rng_state(), [(*item, item[2]._version) for item in tensors]

    def _check(self, before: Any) -> None:
        state, tensors = before
        if not self.torch.equal(state, self.torch.get_rng_state()):
            raise RuntimeError("the part draws random numbers (dropout?): it must give the same each time it is asked")
        for what, name, tensor, version in tensors:
            if tensor._version != version:
                raise RuntimeError(f"the part writes its {what} {name}: a part keeps nothing between two requests")

    def _tensor(self, array: Array) -> Any:
        count = array.num_bytes // _BYTES[array.type]
        # frombuffer refuses empty memory.
        if not count:
            return self.torch.empty(array.shape, dtype=self.types[array.type])
        return self.torch.frombuffer(array.data, dtype=self.types[array.type], count=count).view(array.shape)

    def _array(self, values: Any) -> Array:
        name = str(values.dtype).replace("torch.", "")
        if name not in _CODES:
            raise RuntimeError(f"the part returned a tensor of type {name}, needed: one of {', '.join(_CODES)}")
        values = values.detach().contiguous()
        # A tensor has no buffer protocol, and numpy may not be installed beside torch.
        data = (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())
        data.kept = values  # as long as the bytes are
        return Array(name, tuple(values.shape), data)


ADAPTERS = {"jax": Jax, "numpy": Numpy, "torch": Torch}


# -------------------------------------------------------------------------------------------------------------- serving


class Server:
    """Answers requests, one after the other.

    Args:
        adapter: with ``software``, ``version``, ``initial``, ``hold``, ``forward`` and ``backward`` as `Numpy` has
            them.
        part: what is served, for people; a change of its code shows in it.
    """

    def __init__(self, adapter: Any, part: str) -> None:
        self.adapter, self.part = adapter, part
        self.shapes = {name: (array.type, array.shape) for name, array in adapter.initial(0).items()}
        self.held = b""
        """Hash of the parameters that are held."""

    def answer(self, request: PartMessage) -> PartMessage:
        """Carries out a request; whatever is wrong becomes an answer."""
        try:
            return self._answer(request)._replace(number=request.number)
        except Exception as error:
            text = json.dumps(
                {
                    "kind": type(error).__name__,
                    "message": str(error)[:10_000],
                    "traceback": traceback.format_exc()[-100_000:],
                    "is_ours": isinstance(error, ProtocolError),
                }
            )
            return PartMessage(FAILED, request.number, text)

    def _answer(self, request: PartMessage) -> PartMessage:
        if request.kind == HELLO:
            return PartMessage(WELCOME, text=json.dumps(self._about()))
        if request.kind == INITIAL:
            return PartMessage(VALUES, arrays=list(self.adapter.initial(request.step).values()))
        if request.kind == PARAMETERS:
            self._hold(request)
            return PartMessage(HELD, step=request.step, hash=self.held)
        if request.kind not in (FORWARD, BACKWARD):
            raise ProtocolError(f"a request of kind {request.kind} is not known")
        if request.hash != self.held:
            raise ProtocolError(
                f"asked with parameters {request.hash.hex()}, and those that are held are {self.held.hex() or 'none'}"
            )
        if request.kind == FORWARD:
            found = self.adapter.forward(request.arrays)
            # An Array is a tuple itself.
            arrays, flags = (found, 0) if isinstance(found, tuple) and not isinstance(found, Array) else ((found,), ONE)
        else:
            inputs = int(json.loads(request.text)["inputs"])
            arrays, flags = self.adapter.backward(request.arrays[:inputs], request.arrays[inputs:]), 0
        if request.flags & ONLY_HASH:
            answer = PartMessage(DIGEST, hash=hash_arrays(arrays))
        else:
            answer = PartMessage(RESULT, arrays=arrays, flags=flags)
        return answer._replace(step=request.step, microbatch=request.microbatch)

    def _about(self) -> dict:
        return {
            "software": self.adapter.software,
            "version": self.adapter.version,
            "python": platform.python_version(),
            "processor": _processor(),
            "part": self.part,
            "parameters": [[name, kind, list(shape)] for name, (kind, shape) in self.shapes.items()],
        }

    def _hold(self, request: PartMessage) -> None:
        if len(request.arrays) != len(self.shapes):
            raise ProtocolError(f"{len(request.arrays)} parameters came, and the part has {len(self.shapes)}")
        for (name, (_, shape)), array in zip(self.shapes.items(), request.arrays):
            if tuple(array.shape) != tuple(shape):
                raise ProtocolError(f"parameter {name} came with shape {list(array.shape)}, needed: {list(shape)}")
        self.held = b""  # nothing is, if what follows fails
        found = hash_arrays(request.arrays)
        if found != request.hash:
            raise ProtocolError(f"parameters came with hash {found.hex()}, announced was {request.hash.hex()}")
        self.adapter.hold(dict(zip(self.shapes, request.arrays)))
        self.held = found


def aligned_room(num_bytes: int) -> Any:
    """Makes writable memory at an address that is a multiple of `ALIGNMENT`."""
    room = bytearray(num_bytes + ALIGNMENT)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % ALIGNMENT
    return memoryview(room)[start : start + num_bytes]


def serve_requests(server: Server, source: int, sink: int, body_bytes_max: int = BODY_BYTES_MAX) -> None:
    """Reads requests and writes answers until the input ends.

    Args:
        server: answers.
        source, sink: file descriptors.
        body_bytes_max: longest body of a request.
    Raises:
        ProtocolError: the input is no protocol.
    """
    while True:
        head = aligned_room(HEADER_BYTES)
        if not _read(source, head):
            return
        header = decode_message_header(head, body_bytes_max)
        # New memory for each request: what an adapter holds may be views of an earlier one's.
        body = aligned_room(header.body_bytes)
        if header.body_bytes and not _read(source, body):
            raise ProtocolError("the input ended within a message")
        for data in encode_message(server.answer(decode_message(header, body))):
            _write(sink, data)


def _read(source: int, room: Any) -> bool:
    """Fills memory; False at the end of the input."""
    done = 0
    while done < len(room):
        num_bytes = os.readv(source, [room[done:]])
        if num_bytes == 0:
            if done:
                raise ProtocolError("the input ended within a message")
            return False
        done += num_bytes
    return True


def _write(sink: int, data: Any) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(sink, rest) :]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_factory(place: str) -> tuple[Callable[..., Any], str]:
    """Loads the function or class that makes a part.

    Args:
        place: ``FILE.py:NAME`` or ``MODULE:NAME``.
    Returns:
        It, and what it is for people, with a hash of its source.
    """
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        path = os.path.abspath(where)
        # elaswave runs this with -I, so that modules beside the file would not be found.
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("elaswave_foreign_part", path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{where} cannot be loaded: is it a file of Python source?")
        module = importlib.util.module_from_spec(spec)
        # Before it runs: dataclasses, for one, look their module up there.
        sys.modules["elaswave_foreign_part"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    source = getattr(module, "__file__", None)
    content = b""
    if source is not None:
        with open(source, "rb") as file:
            content = file.read()
    if not hasattr(module, name):
        raise SystemExit(f"{where} has no {name!r}; give FILE.py:NAME or MODULE:NAME of what makes the part")
    return getattr(
        module, name
    ), f"{os.path.basename(where)}:{name} {hashlib.blake2b(content, digest_size=6).hexdigest()}"


def _end_with_parent(parent: int) -> None:
    """Asks the kernel (Linux) to kill this process when the one that has started it dies.

    Args:
        parent: its process id; 0: none is known, and the end of the input alone ends this process.
    """
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)  # it died before


def _main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Serves one part of a model to a worker of elaswave.")
    parser.add_argument("part", help="FILE.py:NAME or MODULE:NAME of what makes the part")
    parser.add_argument("--software", choices=sorted(ADAPTERS), required=True)
    parser.add_argument("--options", default="{}", help="keyword arguments for NAME, as JSON")
    parser.add_argument("--parent", type=int, default=0, help="process id of who starts this")
    parser.add_argument("--body-bytes-max", type=int, default=BODY_BYTES_MAX)
    arguments = parser.parse_args()
    _end_with_parent(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a job's ends are its worker's to decide
        signal.signal(number, signal.SIG_IGN)
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # A part that reads its input must not eat requests.
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the part prints must not reach the answers
    # One thread, before any numeric library is loaded: bits must not depend on how many cores there are.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    try:
        make, part = load_factory(arguments.part)
        server = Server(ADAPTERS[arguments.software](make, json.loads(arguments.options)), part)
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{arguments.part} cannot be loaded: {error}; install it for {sys.executable}, which serves the part, or "
            "give another interpreter (elaswave runs this one with -I: neither PYTHONPATH nor the working folder count)"
        ) from None
    try:
        serve_requests(server, source, sink, arguments.body_bytes_max)
    except ProtocolError as error:
        print(f"{error}; the server ends", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
