"""What layers and losses are lent: whoever writes it gets a copy from the first micro-batch on, or is refused."""

import math

import pytest
import torch
from tests.unit.engine.test_determinism_check import model_of
from tests.unit.engine.test_layer_calls import (
    Block,
    Head,
    Remembers,
    Table,
    assert_same,
    inputs_of,
    make_compute,
    results,
    targets_of,
    train,
)
from tests.unit.engine.test_layer_calls import model_of as plain_model_of
from torch import nn

from elaswave.devices.interface import HOST, Readings
from elaswave.engine.checks.determinism_check import elsewhere
from elaswave.engine.checks.values import Guarded, Lending, WatchedTensors, Watching, aligned_clone, sums_of
from elaswave.engine.compute import LayerError
from elaswave.models.layers import batch


def by_storage(x):
    torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).mul_(0.5)


def by_numpy(x):
    x.detach().numpy()[..., 0] *= 0.5


def by_another_order(x):
    x.data.copy_(x.data.flip(0))


def by_another_place(x):
    x.data = x.data * 0.5


def by_dlpack(x):
    torch.from_dlpack(x.detach())[0, 0, 0] = -1.0


WRITES = {
    "data": lambda x: x.data.mul_(0.5),
    "numpy": by_numpy,
    "storage": by_storage,
    "dlpack": by_dlpack,
    "order": by_another_order,
    "place": by_another_place,
    "detached": lambda x: x.detach().mul_(0.5),
}

UNCOUNTED = {name: write for name, write in WRITES.items() if name != "detached"}


class WritesAndPasses(torch.autograd.Function):
    """Writes what it has saved, or the gradient that it is given."""

    @staticmethod
    def forward(ctx, x, write, of_gradient):
        ctx.save_for_backward(x)
        ctx.write, ctx.of_gradient = write, of_gradient
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.write(gradient if ctx.of_gradient else ctx.saved_tensors[0])
        return gradient * 1.0, None, None


class Writer(Block):
    """Writes its input where `when` says so."""

    now = True

    def __init__(self, write, when="forward"):
        super().__init__()
        self.write, self.when = write, when

    def forward(self, x):
        if Writer.now and (self.when == "forward" or (self.when == "evaluation" and not self.training)):
            self.write(x)
        write = self.write if Writer.now else lambda x: None
        if self.when == "backward":
            x = WritesAndPasses.apply(x, write, False)
        x = self.map(x)
        return WritesAndPasses.apply(x, write, True) if self.when == "gradient" else x


@pytest.fixture
def later(monkeypatch):
    """Nothing is written until this is called."""
    monkeypatch.setattr(Writer, "now", False)
    return lambda: setattr(Writer, "now", True)


def layers(write, when):
    return [Table, Remembers, lambda: Writer(write, when), Head]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_who_writes_its_input_from_the_first_on_gets_copies(write, when, split):
    model = plain_model_of(*layers(write, when))
    whole = make_compute(model, has_determinism_check=True)
    train([whole], [range(4)], [0, 1, 2])
    cuts = [range(2), range(2, 4)]
    computes = [make_compute(model, cut, has_determinism_check=True) for cut in cuts]
    train(computes, cuts, [1, 2, 0], split=split)
    assert_same(results(computes), results([whole]))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
def test_who_begins_to_write_its_input_later_is_refused(later, write, when, split):
    compute = make_compute(plain_model_of(*layers(write, when)), has_determinism_check=True)
    train([compute], [range(4)], [0, 1], split=split)
    later()
    with pytest.raises(LayerError, match=r"layer l2 writes its input now, but did not .* micro-batch 2, layer 2"):
        train([compute], [range(4)], [2], split=split)


def test_who_begins_to_write_its_input_in_an_evaluation_is_refused(later):
    compute = make_compute(plain_model_of(*layers(WRITES["data"], "evaluation")), has_determinism_check=True)
    train([compute], [range(4)], [0])
    evaluate(compute, 0)
    later()
    train([compute], [range(4)], [1])
    with pytest.raises(LayerError, match="layer l2 writes its input now"):
        evaluate(compute, 1)


def test_a_recomputed_layer_that_begins_to_write_is_refused(later):
    compute = make_compute(
        plain_model_of(*layers(WRITES["data"], "forward"), recompute=True), has_determinism_check=True
    )
    train([compute], [range(4)], [0])
    later()
    with pytest.raises(LayerError, match="layer l2 writes its input now"):
        compute.forward(range(4), 1, inputs_of(1), targets_of(1))


def evaluate(compute, microbatch):
    stop = len(compute.model.layers)
    compute.forward(range(stop), microbatch, inputs_of(microbatch), targets_of(microbatch), train=False)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_loss_that_begins_to_write_its_input_is_refused(later, when):
    writer = Writer(WRITES["data"], when)
    compute = make_compute(
        plain_model_of(Table, Head, loss=lambda output, targets: writer(nn.functional.pad(output, (0, 5))).mean()),
        has_determinism_check=True,
    )
    writer.map.requires_grad_(False)
    train([compute], [range(2)], [0])

    def direct(output, targets):
        if when == "backward":
            return WritesAndPasses.apply(output, WRITES["data"], False).mean()
        WRITES["data"](output)
        return output.mean()

    object.__setattr__(compute.model, "loss", direct)
    with pytest.raises(LayerError, match="the loss writes its input now"):
        train([compute], [range(2)], [1])


def test_a_gradient_that_is_written_is_refused(later):
    """By its bits at first, by torch's count later."""
    compute = make_compute(plain_model_of(*layers(lambda g: g.data.mul_(0.5), "gradient")), has_determinism_check=True)
    later()
    with pytest.raises(LayerError, match=r"the gradient of map.weight differs|writes the gradient that it is given"):
        train([compute], [range(4)], [0])
    Writer.now = False
    compute = make_compute(plain_model_of(*layers(lambda g: g.mul_(0.5), "gradient")), has_determinism_check=True)
    train([compute], [range(4)], [0])
    later()
    with pytest.raises(LayerError, match="the backward of layer l2 writes the gradient that it is given"):
        train([compute], [range(4)], [1])


class WritesParameter(Block):
    how = "not"

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place" or (self.how == "evaluation" and not self.training):
                self.map.weight.mul_(0.5)
            elif self.how == "data elsewhere":
                self.map.weight.data = self.map.weight.data.clone()
            elif self.how == "another":
                self.map.weight = nn.Parameter(self.map.weight.clone())
        if self.how == "backward":
            x = WritesAndPasses.apply(x, lambda x: self.map.bias.detach().zero_(), False)
        return self.map(x)


@pytest.mark.parametrize("how", ["in place", "evaluation", "data elsewhere", "another", "backward"])
def test_who_begins_to_write_its_parameters_is_refused(monkeypatch, how):
    compute = make_compute(plain_model_of(Table, WritesParameter, Head), has_determinism_check=True)
    train([compute], [range(3)], [0])
    evaluate(compute, 0)
    monkeypatch.setattr(WritesParameter, "how", how)
    what = "the backward of layer l1 writes its parameter map.bias"
    what = what if how == "backward" else "the forward of layer l1 writes its parameter map.weight"
    with pytest.raises(LayerError, match=what):
        evaluate(compute, 1) if how == "evaluation" else train([compute], [range(3)], [1])


def test_a_first_evaluation_that_writes_parameters_by_their_data_is_refused():
    class InEvaluation(Block):
        def forward(self, x):
            if not self.training:
                self.map.weight.data.mul_(0.5)
            return self.map(x)

    compute = make_compute(model_of(Table, InEvaluation, Head), has_determinism_check=True)
    train([compute], [range(3)], [0])
    with pytest.raises(LayerError, match="the forward of layer l1 writes its parameter map.weight"):
        evaluate(compute, 0)


class CountsInEvaluation(Block):
    calls = 0

    def forward(self, x):
        if not self.training:
            CountsInEvaluation.calls += 1
        return self.map(x) + CountsInEvaluation.calls


@pytest.mark.parametrize("of_loss", [False, True])
def test_what_keeps_something_between_evaluations_only_is_refused(of_loss):
    calls = []

    def loss(output, targets):
        if not torch.is_grad_enabled():
            calls.append(1)
        return output.mean() + len(calls)

    model = plain_model_of(Table, Block, Head, loss=loss) if of_loss else model_of(Table, CountsInEvaluation, Head)
    compute = make_compute(model, has_determinism_check=True)
    train([compute], [range(3)], [0])
    with pytest.raises(LayerError, match="the loss is not det" if of_loss else "layer l1 is not deterministic"):
        evaluate(compute, 0)


@pytest.mark.parametrize("write", [lambda x: x.data.add_(1), lambda x: x.numpy().fill(0)])
def test_the_batch_may_not_be_written(write):
    class WritesBatch(Block):
        def forward(self, x):
            write(batch())
            return self.map(x)

    compute = make_compute(model_of(Table, WritesBatch, Head), has_determinism_check=True)
    with pytest.raises(LayerError, match=r"layer l1 writes what elaswave\.batch\(\) returns"):
        train([compute], [range(3)], [0])


@pytest.mark.parametrize("by", ["loss", "metric"])
def test_targets_may_not_be_written_by_their_data(by):
    def writes(output, targets):
        targets.data.zero_()
        return output.mean()

    metrics = {"strange": writes} if by == "metric" else {}
    loss = writes if by == "loss" else lambda output, targets: output.mean()
    compute = make_compute(plain_model_of(Table, Head, loss=loss, metrics=metrics), has_determinism_check=True)
    with pytest.raises(LayerError, match="the loss writes its targets" if by == "loss" else "the metric strange writ"):
        train([compute], [range(2)], [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (16,), (37, 11), (64, 64)])
@pytest.mark.parametrize("offset", [0, 1])
def test_sums_see_every_element(dtype, shape, offset):
    tensor = torch.zeros(offset + math.prod(shape), dtype=dtype)[offset:].view(shape)
    flat = tensor.view(-1)
    for place in {0, flat.numel() // 2, flat.numel() - 1}:
        watched = WatchedTensors([tensor], by_sums=True)
        assert not watched.differs()
        flat.data[place] = 1
        assert watched.differs() is True and not watched.is_counted
        assert watched.differs(waits=False) > 0


def test_what_a_device_finds_out_is_refused_before_the_vote(later, monkeypatch):
    compute = make_compute(plain_model_of(*layers(WRITES["data"], "forward")), has_determinism_check=True)
    train([compute], [range(4)], [0])
    later()
    on_host = WatchedTensors.differs
    monkeypatch.setattr(WatchedTensors, "differs", lambda self, waits: torch.tensor(int(on_host(self))))
    train([compute], [range(4)], [1])
    with pytest.raises(LayerError, match=r"layer l2 writes its input now.* step 3, micro-batch 1, layer 2 \(l2\)"):
        compute.look_at_late()
    compute.look_at_late()


def test_sums_are_made_where_the_tensor_is():
    assert all(part.is_meta for part in sums_of(torch.zeros(37, 11, device="meta")))
    assert sums_of(torch.zeros(0, 3)) == []


def test_what_is_at_another_place_for_a_while_is_no_write():
    module = nn.Linear(2, 2)
    guarded = Guarded(module)
    kept, module.weight.data = module.weight.data, module.weight.data.clone()
    assert guarded.written() == "weight" and guarded.written(elsewhere=True) is None
    module.weight.data = kept
    assert guarded.written() is None


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(15.0).reshape(3, 5),
        torch.arange(15.0).reshape(3, 5).t(),
        torch.arange(15.0)[1:],
        torch.arange(3.0)[:, None].expand(3, 4),
        torch.arange(64.0).reshape(2, 2, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(2.0),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.complex64).conj(),
    ],
)
def test_a_copy_is_a_clone_at_the_same_place_in_its_page(values):
    copy, further = aligned_clone(values), aligned_clone(values, shift=1088)
    assert torch.equal(copy, values) and copy.stride() == values.clone().stride()
    assert torch.equal(further, values)
    if values.numel():
        assert 0 <= (copy.data_ptr() - values.data_ptr()) % 4096 < 64
        assert (further.data_ptr() - copy.data_ptr()) % 4096 == 1088


def test_copies_of_what_lies_elsewhere_lie_elsewhere():
    """Else a layer that depends on addresses would be found by luck only."""
    lending = Lending(str, Watching(Readings(HOST, lambda: None), by_sums=False))
    leaves = [torch.zeros(5, 7).requires_grad_() for _ in range(8)]
    first = lending.lend(0, leaves, train=True).leaves
    second = lending.lend(0, list(map(elsewhere, leaves)), train=True).leaves
    assert {(other.data_ptr() - one.data_ptr()) % 4096 for one, other in zip(first, second, strict=True)} == {17 * 64}
    (gradient,) = torch.autograd.grad((first[0] * 3.0).sum(), [leaves[0]])
    assert torch.equal(gradient, torch.full((5, 7), 3.0))
