"""A foreign layer as a module, outside of a job: what it computes, what it sends, and what it refuses."""

import copy
import json
import os
import select
import shutil
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.integration import foreign_parts
from torch import nn

import elaswave
from elaswave.errors import ForeignError, ForeignPartError, InterruptedWaitError, UsageError
from elaswave.models.admission import CopyOf
from elaswave.models.foreign import server
from elaswave.models.foreign.connection import SERVER, Connection
from elaswave.models.foreign.layer import Foreign, check_kinds, foreign_in, kinds_here
from elaswave.models.foreign.part import TIMEOUT_MAX_S
from elaswave.models.layers import Call, Layer, inside
from elaswave.protocol.detection.detector import UNLEARNED_S

PARTS = Path(foreign_parts.__file__)
WIDTH = 8


def middle(file=PARTS, **options):
    faults = options.pop("faults", "")
    arguments = {"width": WIDTH, "faults": str(faults)}
    return Foreign(f"{file}:NumpyMiddle", software="numpy", options=arguments, **options)


@pytest.fixture(scope="module")
def layer():
    return middle(input_shape=(WIDTH,), output_shape=(WIDTH,))


@pytest.fixture
def asked(monkeypatch):
    """How often each kind of request is made."""
    kinds = Counter()
    ask = Connection.ask

    def count(self, message, body_bytes_max):
        kinds[message.kind] += 1
        return ask(self, message, body_bytes_max)

    monkeypatch.setattr(Connection, "ask", count)
    return kinds


def inputs(*shape):
    return torch.randn(shape or (4, WIDTH), generator=torch.Generator().manual_seed(1))


def test_it_computes_what_torch_computes(layer):
    x = inputs().requires_grad_()
    y, gradient = layer(x), inputs(4, WIDTH).flip(0)
    found = torch.autograd.grad(y, [x, *layer.parameters()], gradient)
    expected = (x @ layer.weight + layer.bias).tanh()
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], gradient)
    assert y.is_contiguous() and y.data_ptr() % 64 == 0
    torch.testing.assert_close([y.detach(), *found], [expected.detach(), *wanted])
    torch.testing.assert_close(layer(x[:0]), x[:0])
    torch.testing.assert_close(layer(inputs(2, 3, 5, WIDTH)[0, 0]).shape, torch.Size([5, WIDTH]))


def test_it_is_an_ordinary_module(layer):
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.kind.startswith("numpy ") and "foreign_parts.py:NumpyMiddle " in layer.kind
    assert layer.kind in repr(layer)
    assert torch.equal(middle(seed=0).weight, layer.weight) and not torch.equal(middle(seed=1).weight, layer.weight)
    own = {"weight": torch.eye(WIDTH), "bias": torch.ones(WIDTH)}
    given = middle(parameters=own)
    assert torch.equal(given.weight, own["weight"]) and given.weight.data_ptr() != own["weight"].data_ptr()
    with torch.device("meta"):
        described = middle(output_shape=(WIDTH,))
    assert described.weight.is_meta and described(torch.empty(3, WIDTH, device="meta")).shape == (3, WIDTH)
    assert elaswave.Foreign is Foreign


def test_copies_have_servers_of_their_own(layer):
    layer(inputs())
    copied = CopyOf(layer, "middle")()
    assert copied.pids() == [] and layer.pids() != []
    assert torch.equal(copied(inputs()), layer(inputs()))
    (pid,) = copied.pids()
    assert pid not in layer.pids()
    del copied
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_parameters_are_sent_when_a_bit_of_them_has_changed(asked):
    layer = middle()
    x = inputs().requires_grad_()
    asked.clear()

    def sent():
        y = layer(x)
        torch.autograd.grad(y, [x], torch.ones_like(y))
        return asked.pop(server.PARAMETERS, 0)

    assert [sent(), sent(), sent()] == [1, 0, 0]
    with torch.no_grad():
        layer.bias.data[3] = -0.0  # another bit, and the same number
    assert [sent(), sent()] == [1, 0]
    before = layer.weight.data
    layer.weight.data = before.clone()  # the same bits elsewhere
    assert sent() == 0
    assert asked[server.FORWARD] == asked[server.BACKWARD] == 6


def test_a_backward_in_two_halves_asks_once(asked):
    layer, x = middle(), inputs().requires_grad_()
    y, gradient = layer(x), inputs()
    first = torch.autograd.grad(y, [x], gradient, retain_graph=True)
    second = torch.autograd.grad(y, list(layer.parameters()), gradient, retain_graph=True)
    assert asked[server.BACKWARD] == 1
    again = torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)
    assert all(map(torch.equal, (*first, *second), again))
    torch.autograd.grad(y, [x], -gradient)
    assert asked[server.BACKWARD] == 3, "another gradient is another question"


def test_a_wait_lets_the_worker_look_and_can_be_left():
    layer, looks, inside_of = middle(), [], []

    @contextmanager
    def elsewhere():
        inside_of.append("in")
        try:
            yield
        finally:
            inside_of.append("out")

    def check():
        looks.append(inside_of[-1])
        if len(looks) == 1:
            raise InterruptedWaitError("a new generation")

    x = inputs().requires_grad_()
    with inside(Call(lambda: None, (1, 2, 3), check, elsewhere)):
        with pytest.raises(InterruptedWaitError):  # its server starts: there is nothing to do but to wait
            layer(x)
        y = layer(x)
    torch.testing.assert_close(y, (x @ layer.weight + layer.bias).tanh())
    looks.clear()
    layer._part.close()  # so that backward has to wait for a new server
    with inside(Call(lambda: None, (1, 2, 3), check, elsewhere)), pytest.raises(InterruptedWaitError):
        torch.autograd.grad(y, [x], torch.ones_like(y), retain_graph=True)
    assert set(looks) == {"in"} and inside_of == ["in", "out"] * 5
    torch.autograd.grad(y, [x], torch.ones_like(y))


def test_each_answer_is_waited_for_by_itself():
    """The coordinator bounds one wait; a worker that gets answers is not to be bounded over all of them."""
    layer, waits = middle(duplicate=True), []

    @contextmanager
    def elsewhere():
        waits.append("in")
        yield
        waits.append("out")

    with inside(Call(lambda: None, (1, 2, 3), elsewhere=elsewhere)):
        layer(inputs())
    assert waits == ["in", "out"] * 6, "HELLO, PARAMETERS and FORWARD, of two servers"
    assert TIMEOUT_MAX_S < UNLEARNED_S


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_what_the_part_raises_is_told_with_its_traceback(method, tmp_path):
    layer, x = middle(faults=tmp_path), inputs().requires_grad_()
    (tmp_path / f"raise-{method}").touch()
    with pytest.raises(ForeignPartError, match=f"(?s)ValueError: this part cannot go {method}\n.*in {method}") as got:
        torch.autograd.grad(layer(x), [x], inputs())
    assert "foreign_parts.py" in str(got.value)
    (tmp_path / f"raise-{method}").unlink()
    torch.autograd.grad(layer(x), [x], inputs())  # the server lives, and keeps nothing


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_server_that_ends_in_the_midst_is_named_and_another_one_begins(method, tmp_path):
    layer, x = middle(faults=tmp_path), inputs().requires_grad_()
    layer(x)
    (tmp_path / f"die-{method}").touch()
    with pytest.raises(ForeignError, match=r"NumpyMiddle has ended \(status 9\)"):
        torch.autograd.grad(layer(x), [x], inputs())
    assert layer.pids() == []
    torch.autograd.grad(layer(x), [x], inputs())


def test_a_late_answer_is_not_waited_for(tmp_path):
    layer, x = middle(faults=tmp_path, timeout_s=0.2), inputs()
    layer(x)
    os.kill(layer.pids()[0], signal.SIGSTOP)
    with pytest.raises(ForeignError, match="not answered within 0.2 s, asked for a forward of step 4, micro-batch 2"):
        with inside(Call(lambda: None, (1, 4, 2))):
            layer(x)
    assert layer.pids() == []


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_wrong_bit_is_found_by_duplicate_execution_only(method, tmp_path):
    x = inputs().requires_grad_()
    for duplicate in (False, True):
        layer = middle(faults=tmp_path, duplicate=duplicate)
        torch.autograd.grad(layer(x), [x], inputs())
        assert len(layer.pids()) == 1 + duplicate
        (tmp_path / f"flip-{method}").touch()
        if duplicate:
            with pytest.raises(
                ForeignError, match=f"have computed a {method} of step 0, micro-batch 0 with other bits"
            ):
                torch.autograd.grad(layer(x), [x], inputs())
            assert layer.pids() == []
        else:
            torch.autograd.grad(layer(x), [x], inputs())


def test_a_server_of_another_kind_is_refused_by_name(tmp_path):
    file = tmp_path / "parts.py"
    shutil.copy(PARTS, file)
    layer = middle(file)
    before = layer.kind
    pinned = [f"middle: {before}"]
    check_kinds("middle", layer, pinned)
    check_kinds("middle", layer, [])  # nothing is pinned outside of a run
    with file.open("a") as text:
        text.write("# another version\n")
    with pytest.raises(UsageError) as refused:
        layer(inputs())
    assert before in str(refused.value) and "and the run was begun with" in str(refused.value)
    assert layer.pids() == []
    (found,) = kinds_here([Layer("middle", CopyOf(layer))])
    assert found.startswith("middle: numpy ") and found != pinned[0]
    with pytest.raises(UsageError, match="the foreign part middle is served by numpy .*begun with numpy"):
        check_kinds("middle", middle(file), pinned)
    with pytest.raises(UsageError, match="begun with none there"):
        check_kinds("other", layer, pinned)


def test_parts_are_found_within_layers(layer):
    outer = nn.Sequential(nn.Linear(2, 2), copy.deepcopy(layer))
    assert list(foreign_in("outer", outer)) == ["outer.1"]
    assert list(foreign_in("one", layer)) == ["one"]


def test_a_network_with_a_part_is_not_cut(layer):
    with pytest.raises(UsageError, match="has the foreign part 1 .numpy .*, which no trace sees into: give the layers"):
        elaswave.split(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), inputs(), 2)


def test_what_does_not_fit_is_refused(layer):
    for value, error in (
        ({"x": inputs()}, "is given dict, needed: a tensor, or a tuple of tensors"),
        ((), "is given tuple, needed"),
        (inputs().double(), r"is given a tensor of type torch.float64, needed: one of float32"),
        (inputs(4, 3), r"is given \[4, 3\], needed: one tensor of shape \[samples, 8\]"),
        ((inputs(), inputs()), r"is given \[4, 8\], \[4, 8\], needed: one tensor"),
        (inputs().to_sparse(), r"is given a tensor of layout torch.sparse_coo, needed: a dense one"),
        (torch.tensor(1.0), r"is given \[\], needed: one tensor of shape \[samples, 8\]"),
    ):
        with pytest.raises(UsageError, match=error):
            layer(value)
    with pytest.raises(UsageError, match=r"has returned \[4, 8\], needed: one tensor of shape \[samples, 9\]"):
        middle(output_shape=(9,))(inputs())
    with pytest.raises(UsageError, match="asked for without values: give its output_shape"):
        middle()(inputs().to("meta"))
    with pytest.raises(UsageError, match="is given a tensor without dimensions, needed: the samples"):
        middle(output_shape=())(torch.tensor(1.0))
    with pytest.raises(UsageError, match="has as a parameter a tensor of type torch.float64, needed: one of float32"):
        copy.deepcopy(layer).double()(inputs())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"part": "nowhere.py:Middle", "software": "numpy"}, "there is no file nowhere.py"),
        ({"part": "Middle", "software": "numpy"}, "part = 'Middle', needed: FILE.py:NAME or MODULE:NAME"),
        (
            {"part": "json:x", "software": "theano"},
            "software = 'theano', needed: one of jax, numpy, torch, or a command",
        ),
        ({"part": "json:x", "command": ["x"]}, "give one of both"),
        ({"command": "python server.py"}, "needed: the words of a command, as a list"),
        ({"part": "json:x", "software": "numpy", "options": {"x": {1, 2}}}, "cannot be written as JSON"),
        ({"part": "json:x", "software": "numpy", "timeout_s": 0}, "timeout_s = 0, needed: seconds, more than 0"),
        ({"part": "json:x", "software": "numpy", "start_timeout_s": 111}, "= 111, needed: seconds, .*at most 110"),
        ({"part": "json:x", "software": ["numpy"]}, r"software = \['numpy'\], needed: one of jax, numpy, torch"),
        ({"part": "json:x", "software": "numpy", "input_shape": 8}, "input_shape = 8, needed: the sizes of one sample"),
        ({"part": "json:x", "software": "numpy", "output_shape": (-1,)}, r"output_shape = \(-1,\), needed: the sizes"),
        ({"part": "json:x", "software": "numpy", "seed": -1}, "seed = -1, needed: a whole number from 0"),
        ({"part": "json:x", "software": "numpy", "seed": 2**63}, "seed = 9223372036854775808, needed: a whole number"),
        ({"part": "json:x", "software": "numpy", "seed": 1.0}, "seed = 1.0, needed: a whole number"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(options, error):
    with pytest.raises(UsageError, match=error):
        Foreign(**options)


def test_first_values_must_be_those_of_the_part():
    with pytest.raises(
        UsageError, match=r"bias is none, needed: float32 of shape \[8\]; weight is .* \[3\], needed: .*8, 8"
    ):
        middle(parameters={"weight": torch.ones(3)})
    right = {"weight": torch.eye(WIDTH), "bias": torch.ones(WIDTH)}
    for bias, error in (
        (right["bias"].double(), r"bias is float64 of shape \[8\], needed: float32 of shape \[8\]"),
        (right["bias"].numpy(), r"bias is numpy.ndarray, no tensor of torch, needed: float32"),
        (right["bias"].to_sparse(), r"bias is a tensor of layout torch.sparse_coo, needed: float32"),
    ):
        with pytest.raises(UsageError, match=error):
            middle(parameters={**right, "bias": bias})
    with pytest.raises(UsageError, match="are list, needed: tensors by name"):
        middle(parameters=[torch.ones(3)])


@pytest.mark.parametrize(
    ("flags", "number", "needed"), [(server.ONE, 0, "one"), (server.ONE, 2, "one"), (0, 0, "at least one")]
)
def test_a_result_of_no_array_or_of_two_called_one_is_refused(flags, number, needed, monkeypatch):
    layer = middle()
    answer = server.PartMessage(server.RESULT, arrays=[server.Array("uint8", (0,), b"")] * number, flags=flags)
    monkeypatch.setattr(layer._part, "_result", lambda *arguments: answer)
    with pytest.raises(ForeignError, match=f"answered with {number} arrays, needed: {needed}"):
        layer(inputs())
    assert layer.pids() == []


STRANGE = '''
import numpy


class Doubles:
    def init(self, seed):
        return {"weight": numpy.ones(2)}


class Named:
    def init(self, seed):
        return {"kind": numpy.ones(2, "float32")}


class Drawing:
    def init(self, seed):
        return {}

    def forward(self, parameters, x):
        print("this does not disturb the answers", flush=True)
        return x * numpy.random.rand()


class Pair:
    """Two outputs, one of whole numbers, of two inputs, one of whole numbers."""

    def init(self, seed):
        return {"a.scale": numpy.full((), 3, "float32")}

    def forward(self, parameters, x, places):
        return x[places] * parameters["a.scale"], places + 1

    def backward(self, parameters, inputs, gradients):
        (x, places), (gradient,) = inputs, gradients
        found = numpy.zeros_like(x)
        numpy.add.at(found, places, gradient * parameters["a.scale"])
        return (found, None), {"a.scale": (x[places] * gradient).sum(dtype="float32")}


class Short(Pair):
    def backward(self, parameters, inputs, gradients):
        return (inputs[0][:1], None), {"a.scale": numpy.zeros((), "float32")}


class Writing(Pair):
    def forward(self, parameters, x, places):
        parameters["a.scale"] += 1
'''


@pytest.fixture
def strange(tmp_path):
    (tmp_path / "strange.py").write_text(STRANGE)
    return lambda name, **options: Foreign(f"{tmp_path}/strange.py:{name}", software="numpy", **options)


def test_tuples_and_whole_numbers_pass(strange):
    pair = strange("Pair")
    assert [name for name, _ in pair.named_parameters()] == ["a.scale"]
    x, places = inputs(4, 2).requires_grad_(), torch.tensor([3, 0, 3])
    y, following = pair((x, places))
    assert torch.equal(y, x[places] * 3) and torch.equal(following, places + 1) and not following.requires_grad
    found = torch.autograd.grad(y, [x, pair.get_parameter("a.scale")], torch.ones_like(y))
    wanted = torch.zeros(4, 2)
    wanted[3], wanted[0] = 6, 3
    assert torch.equal(found[0], wanted) and found[1].shape == ()
    torch.testing.assert_close(found[1], x[places].sum().detach())


def test_what_a_part_may_not_do_is_named(strange, capfd):
    x, places = inputs(4, 2).requires_grad_(), torch.tensor([3, 0, 3])
    with pytest.raises(ForeignError, match="has ended .status 1.; what it has said itself"):
        strange("Doubles")
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(ForeignError, match="has ended .status 1."):
        Foreign("elaswave_nowhere.parts:Middle", software="numpy")
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("elaswave_nowhere.parts:Middle cannot be loaded: ") and "No module named" in said
    with pytest.raises(UsageError, match="has a parameter called 'kind', which cannot be the name of one here"):
        strange("Named")
    with pytest.raises(ForeignPartError, match="draws from numpy.random: a part must give the same each time"):
        strange("Drawing")(x)
    with pytest.raises(ForeignPartError, match="read-only"):
        strange("Writing")((x, places))
    y, _ = (short := strange("Short"))((x, places))
    with pytest.raises(
        ForeignError, match=r"the gradient of input 0 of type float32 and shape \[1, 2\], needed: .*4, 2"
    ):
        torch.autograd.grad(y, [x], torch.ones_like(y))
    assert short.pids() == []


TORCH_PARTS = '''
import torch


class Dropped(torch.nn.Dropout):
    pass


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Two(torch.nn.Module):
    """Of which one parameter is not used."""

    def __init__(self, width):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return self.used(x).gelu() if hasattr(x, "gelu") else torch.nn.functional.gelu(self.used(x))
'''


@pytest.mark.slow
def test_a_part_of_torch_has_the_bits_of_the_same_layer_here(tmp_path):
    (tmp_path / "parts.py").write_text(TORCH_PARTS)
    part = Foreign(f"{tmp_path}/parts.py:Two", software="torch", options={"width": 24}, seed=7)
    torch.manual_seed(7)
    used = nn.Linear(24, 24)
    assert torch.equal(part.get_parameter("used.weight"), used.weight)
    x, gradient = inputs(16, 24).requires_grad_(), inputs(16, 24)
    found = torch.autograd.grad(y := part(x), [x, *part.parameters()], gradient)
    wanted = torch.autograd.grad(here := nn.functional.gelu(used(x)), [x, *used.parameters()], gradient)
    assert torch.equal(y, here)
    assert all(map(torch.equal, found, [*wanted, torch.zeros(24, 24), torch.zeros(24)]))


@pytest.mark.slow
def test_a_part_of_torch_keeps_nothing_and_draws_nothing(tmp_path):
    (tmp_path / "parts.py").write_text(TORCH_PARTS)
    for name, error in (("Dropped", r"draws random numbers \(dropout\?\)"), ("Counting", "writes its buffer calls")):
        with pytest.raises(ForeignPartError, match=error):
            Foreign(f"{tmp_path}/parts.py:{name}", software="torch")(inputs())


@pytest.mark.slow
def test_bfloat16_passes_where_the_software_has_it(layer, tmp_path):
    (tmp_path / "parts.py").write_text(TORCH_PARTS)
    part = Foreign(f"{tmp_path}/parts.py:Two", software="torch", options={"width": 8}).bfloat16()
    x = inputs(16, 8).bfloat16().requires_grad_()
    y = part(x)
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y, [x, part.get_parameter("used.weight")], torch.ones_like(y))
    assert all(each.dtype == torch.bfloat16 and bool(each.any()) for each in found)
    with pytest.raises(ForeignPartError, match="numpy has no bfloat16: train the model in float32"):
        copy.deepcopy(layer)(x)


def test_the_server_s_file_alone_serves(tmp_path):
    """Copied elsewhere, started by a command of one's own, and by an interpreter that knows nothing of this project."""
    shutil.copy(SERVER, tmp_path / "served.py")
    shutil.copy(PARTS, tmp_path / "parts.py")
    options = json.dumps({"width": WIDTH})
    words = [sys.executable, "-I", str(tmp_path / "served.py"), "--software", "numpy", "--options", options]
    layer = Foreign(command=[*words, f"{tmp_path}/parts.py:NumpyMiddle"])
    assert torch.equal(layer(inputs()), middle()(inputs()))
    status = Path(f"/proc/{layer.pids()[0]}/maps").read_text()
    assert "libtorch" not in status


def test_a_server_ends_with_the_process_that_has_started_it(tmp_path):
    """However that dies."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            layer = middle()
            layer(inputs())
            os.write(write, str(layer.pids()[0]).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        pid = int(os.read(read, 20))
        watched = os.pidfd_open(pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    assert poll.poll(100_000), "the server lives on"
    for descriptor in (read, watched):
        os.close(descriptor)
