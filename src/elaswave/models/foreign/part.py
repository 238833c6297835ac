"""A part that is served: its handshake, its parameters, its forward and backward, and their second computation.

The server is stateless but for the parameters, which every request names by hash: a request can be made again, at any
time, of any server of the same kind.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from elaswave.errors import ForeignError, ForeignPartError, UsageError
from elaswave.models.foreign.connection import Connection, is_failure
from elaswave.models.foreign.server import (
    ALIGNMENT,
    BACKWARD,
    BODY_BYTES_MAX,
    DIGEST,
    DIMENSIONS_MAX,
    FLOATS,
    FORWARD,
    HELD,
    HELLO,
    INITIAL,
    ONE,
    ONLY_HASH,
    PARAMETERS,
    RESULT,
    VALUES,
    WELCOME,
    Array,
    PartMessage,
    hash_arrays,
)
from elaswave.models.layers import computed_elsewhere

TIMEOUT_MAX_S = 110.0
"""How long an answer may be permitted to take: a coordinator gives up a worker that waits for one longer than
`elaswave.protocol.detection.detector.UNLEARNED_S`, whatever else it knows, and the worker is to be the first to say
why."""
ANSWER_BYTES_MAX = 1 << 30
"""Of what a part returns, where its shape is not known before."""

_TORCH_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
_NAMES = {kind: name for name, kind in _TORCH_TYPES.items()}


class Service(NamedTuple):
    """How a part is served."""

    command: tuple[str, ...]
    """Starts a server; ``{pid}`` in it becomes the id of the process that does."""
    name: str
    """Of the part, for errors."""
    timeout_s: float
    """How long an answer may take."""
    start_timeout_s: float
    """How long the first answers may take: the server loads its software, and compiles."""
    duplicate: bool
    """Whether a second server computes everything too."""


class About(msgspec.Struct, frozen=True):
    """What a server says of itself."""

    software: str
    version: str
    python: str
    processor: str
    part: str
    parameters: list[tuple[str, str, list[int]]]
    """Name, element type and shape of each, in order."""

    @property
    def kind(self) -> str:
        """What two servers that compute the same bits have in common."""
        return f"{self.software} {self.version}, Python {self.python}, {self.part}, {self.processor}"


class Failure(msgspec.Struct, frozen=True):
    """What a server could not do."""

    kind: str
    message: str
    traceback: str
    is_ours: bool
    """Whether the server itself says no; else the part has raised."""


class BackwardText(msgspec.Struct, frozen=True):
    """What BACKWARD says beside its arrays."""

    inputs: int
    """How many of its arrays are inputs; gradients of the outputs follow."""


class Returned(NamedTuple):
    """What a part has returned."""

    tensors: tuple[torch.Tensor, ...]
    is_one: bool
    """One tensor, not a tuple of one."""


class BatchPosition(NamedTuple):
    """For which step and micro-batch something is computed; for people who read a server's requests."""

    step: int = 0
    microbatch: int = 0


def as_array(tensor: torch.Tensor) -> Array:
    """Converts a tensor to what travels: a view of its memory, or of a copy."""
    tensor = tensor.detach().cpu().contiguous()
    return Array(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().data)


def as_tensor(array: Array) -> torch.Tensor:
    """Does the inverse of `as_array`; makes a view of what has arrived."""
    kind = _TORCH_TYPES[array.type]
    if not array.num_bytes:
        return torch.empty(array.shape, dtype=kind)
    return torch.frombuffer(array.data, dtype=kind).view(array.shape)


def check_types(who: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses what does not travel.

    Args:
        who: has them, and how, for errors.
        tensors: inputs or parameters.
    Raises:
        UsageError: names the type or layout.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(f"{who} a tensor of layout {tensor.layout}, needed: a dense one, as to_dense() returns it")
        if tensor.dtype not in _NAMES:
            raise UsageError(
                f"{who} a tensor of type {tensor.dtype}, needed: one of {', '.join(_TORCH_TYPES)}; convert it before"
            )


class ForeignPart:
    """A part and its servers, which begin when it is first asked for something.

    Args:
        service: how it is served.
        kind: that its servers must be of; "" for any.
    """

    def __init__(self, service: Service, kind: str = "") -> None:
        self.service = service
        self.kind = kind
        self.who = f"the server of the foreign part {service.name}"
        self.about: About | None = None
        """What its servers have said of themselves; None until they have."""
        self._connections: list[Connection] = []
        self._sent: list[torch.Tensor] = []
        """Copies of the parameters that all servers hold."""
        self._held: bytes | None = None
        """Their hash."""
        self._has_answered: set[int] = set()
        """Kinds of requests that were answered before: nothing is loaded or compiled for them any more."""

    @property
    def pids(self) -> list[int]:
        """Of its servers that were started."""
        return [connection.pid for connection in self._connections if connection.is_open]

    def close(self) -> None:
        """Ends its servers; another request would start new ones."""
        for connection in self._connections:
            connection.close()
        self._connections, self._sent, self._held, self.about = [], [], None, None
        self._has_answered.clear()

    # --------------------------------------------------------------------------------------------------------- requests

    def begin(self, check: Callable[[], None]) -> About:
        """Starts the servers, if they do not run, and learns what they are.

        Raises:
            ForeignError: they cannot be started, or say what they must not.
            UsageError: they are of another kind.
        """
        if not self._connections or not all(connection.is_open for connection in self._connections):
            self.close()
            command = [word.replace("{pid}", str(os.getpid())) for word in self.service.command]
            self._connections = [Connection(command, self.who) for _ in range(2 if self.service.duplicate else 1)]
        elif self.about is not None:
            return self.about
        found = [self._about(answer) for answer in self._all(PartMessage(HELLO), 0, WELCOME, check, "what it is")]
        for about in found:
            if self.kind and about.kind != self.kind:
                self.close()
                raise UsageError(
                    f"the foreign part {self.service.name} is served by {about.kind} here, and the run was begun with "
                    f"{self.kind}: install the same software here, with the same code of the part, or begin another run"
                )
            if about != found[0]:
                self.close()
                raise ForeignError(f"{self.who} says {found[0]}, and the second one {about}")
        self.about = found[0]
        return found[0]

    def initial(self, seed: int) -> dict[str, torch.Tensor]:
        """Returns the values of the parameters that training begins with, by name."""
        about = self.begin(_never)
        arrays = [Array(kind, tuple(shape), b"") for _, kind, shape in about.parameters]
        (answer, *_) = self._all(
            PartMessage(INITIAL, step=seed), _body_bytes(arrays), VALUES, _never, "initial values of its parameters"
        )
        self._check_shapes(answer.arrays, arrays, [f"parameter {name}" for name, _, _ in about.parameters])
        return {name: as_tensor(array) for (name, _, _), array in zip(about.parameters, answer.arrays, strict=True)}

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        place: BatchPosition,
        check: Callable[[], None],
        output: Array | None = None,
    ) -> Returned:
        """Computes what the part makes of inputs.

        Args:
            parameters: in the server's order.
            inputs: of any type that travels.
            place: step and micro-batch.
            check: called while it waits.
            output: shape and type of its one result, if they are known.
        Raises:
            ForeignError: a server fails.
            ForeignPartError: the part has raised.
        """
        self._update(parameters, place, check)
        request = PartMessage(FORWARD, arrays=list(map(as_array, inputs)), hash=self._held or b"", **place._asdict())
        most = ANSWER_BYTES_MAX if output is None else _body_bytes([output])
        answer = self._result(request, most, check, f"a forward of {_at(place)}")
        is_one = bool(answer.flags & ONE)
        if not answer.arrays or (is_one and len(answer.arrays) != 1):
            needed = "one" if is_one else "at least one"
            raise self._wrong(f"answered with {len(answer.arrays)} arrays, needed: {needed}")
        return Returned(tuple(map(as_tensor, answer.arrays)), is_one)

    def backward(
        self,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        place: BatchPosition,
        check: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Computes the gradients of floating-point inputs, then of all parameters; takes arguments as `forward` does.

        Args:
            gradients: of the floating-point outputs, in order.
        """
        self._update(parameters, place, check)
        arrays = [*map(as_array, inputs), *map(as_array, gradients)]
        text = msgspec.json.encode(BackwardText(len(inputs))).decode()
        wanted = [tensor for tensor in inputs if _NAMES[tensor.dtype] in FLOATS]
        shapes = [Array(_NAMES[each.dtype], tuple(each.shape), b"") for each in (*wanted, *parameters)]
        request = PartMessage(BACKWARD, text=text, arrays=arrays, hash=self._held or b"", **place._asdict())
        answer = self._result(request, _body_bytes(shapes), check, f"a backward of {_at(place)}")
        names = [f"the gradient of input {at}" for at in range(len(wanted))]
        about = self.begin(check)
        names += [f"the gradient of parameter {name}" for name, _, _ in about.parameters]
        self._check_shapes(answer.arrays, shapes, names)
        return list(map(as_tensor, answer.arrays))

    def _update(self, parameters: Sequence[torch.Tensor], place: BatchPosition, check: Callable[[], None]) -> None:
        """Sends the parameters if they are not those that the servers hold, bit for bit."""
        self.begin(check)
        if self._held is not None and all(map(same_float_bits, parameters, self._sent)):
            return
        self._held = None  # until they have said so
        self._sent = [parameter.detach().clone() for parameter in parameters]
        arrays = list(map(as_array, self._sent))
        wanted = hash_arrays(arrays)
        request = PartMessage(PARAMETERS, arrays=arrays, hash=wanted, **place._asdict())
        for answer in self._all(request, 0, HELD, check, f"to take the parameters of step {place.step}"):
            if answer.hash != wanted:
                raise self._wrong(f"holds parameters {answer.hash.hex()}, and was sent {wanted.hex()}")
        self._held = wanted

    def _result(self, request: PartMessage, most: int, check: Callable[[], None], what: str) -> PartMessage:
        """Returns what the first server has computed, compared with what the second one has."""
        first, *others = self._connections
        timeout_s = self._timeout_s(request.kind)
        number = first.ask(request, most)
        numbers = [other.ask(request._replace(flags=ONLY_HASH), 0) for other in others]
        answer = self._checked(_answer(first, number, timeout_s, check, what), RESULT)
        for other, its_number in zip(others, numbers, strict=True):
            second = self._checked(_answer(other, its_number, timeout_s, check, what), DIGEST)
            if (found := hash_arrays(answer.arrays)) != second.hash:
                raise self._wrong(
                    f"and its second one have computed {what} with other bits ({found.hex()}, {second.hash.hex()}): "
                    "one of them is wrong, or the part does not give the same each time"
                )
        self._has_answered.add(request.kind)
        return answer

    def _all(
        self, request: PartMessage, most: int, kind: int, check: Callable[[], None], what: str
    ) -> list[PartMessage]:
        """Collects the answers of all servers."""
        timeout_s = self._timeout_s(request.kind)
        numbers = [connection.ask(request, most) for connection in self._connections]
        found = [
            self._checked(_answer(connection, number, timeout_s, check, what), kind)
            for connection, number in zip(self._connections, numbers, strict=True)
        ]
        self._has_answered.add(request.kind)
        return found

    def _timeout_s(self, kind: int) -> float:
        service = self.service
        return service.timeout_s if kind in self._has_answered else max(service.timeout_s, service.start_timeout_s)

    # ---------------------------------------------------------------------------------------------------------- answers

    def _checked(self, answer: PartMessage, kind: int) -> PartMessage:
        """Checks that an answer is of the kind that was asked for, and returns it."""
        if is_failure(answer):
            try:
                failure = msgspec.json.decode(answer.text, type=Failure)
            except msgspec.MsgspecError as error:
                raise self._wrong(f"failed, and does not say why as it should: {error}") from error
            said = f"{failure.kind}: {failure.message}"
            if failure.is_ours:
                raise self._wrong(f"refuses: {said}")
            raise ForeignPartError(f"the foreign part {self.service.name} raised {said}\n{failure.traceback.rstrip()}")
        if answer.kind != kind:
            raise self._wrong(f"answered with kind {answer.kind}, needed: {kind}")
        return answer

    def _about(self, answer: PartMessage) -> About:
        try:
            about = msgspec.json.decode(answer.text, type=About)
        except msgspec.MsgspecError as error:
            raise self._wrong(f"does not say what it is as it should: {error}") from error
        names = [name for name, _, _ in about.parameters]
        for name, kind, shape in about.parameters:
            if kind not in FLOATS or len(shape) > DIMENSIONS_MAX or min(shape, default=0) < 0:
                raise self._wrong(
                    f"has the parameter {name} of type {kind} and shape {shape}, needed: one of {', '.join(FLOATS)}, "
                    f"at most {DIMENSIONS_MAX} sizes"
                )
        if len(set(names)) < len(names):
            raise self._wrong(f"has two parameters of one name among {', '.join(names)}")
        if (found := _body_bytes([Array(kind, tuple(shape), b"") for _, kind, shape in about.parameters])) > (
            BODY_BYTES_MAX
        ):
            raise self._wrong(f"has parameters of {found} bytes, at most {BODY_BYTES_MAX} travel: make several parts")
        return about

    def _check_shapes(self, found: Sequence[Array], wanted: Sequence[Array], names: Sequence[str]) -> None:
        if len(found) != len(wanted):
            raise self._wrong(f"answered with {len(found)} arrays, needed: {len(wanted)} ({', '.join(names)})")
        for one, other, name in zip(found, wanted, names, strict=True):
            if (one.type, tuple(one.shape)) != (other.type, tuple(other.shape)):
                raise self._wrong(
                    f"answered with {name} of type {one.type} and shape {list(one.shape)}, needed: {other.type} and "
                    f"{list(other.shape)}"
                )

    def _wrong(self, what: str) -> ForeignError:
        """Ends the servers: nothing that they say can be relied on."""
        self.close()
        return ForeignError(f"{self.who} {what}")


def _answer(connection: Connection, number: int, timeout_s: float, check: Callable[[], None], what: str) -> PartMessage:
    """Does the same as `Connection.answer`, but as a wait of its own: its time counts from its beginning, for the
    coordinator too."""
    with computed_elsewhere():
        return connection.answer(number, timeout_s, check, what)


def _never() -> None:
    """Nothing interrupts a wait in a script."""


def _at(place: BatchPosition) -> str:
    return f"step {place.step}, micro-batch {place.microbatch}"


def _body_bytes(arrays: Sequence[Array]) -> int:
    """Counts the bytes of the body of an answer with arrays like these, and no text."""
    said = sum(8 * (1 + len(array.shape)) for array in arrays)
    return sum(-(-num_bytes // ALIGNMENT) * ALIGNMENT for num_bytes in (said, *(each.num_bytes for each in arrays)))


def same_float_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two floating-point tensors are equal in every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    words = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.detach().reshape(-1).view(words), other.reshape(-1).view(words))
