"""What a joiner says of itself is what those that began have in common, found out without them."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from tests.integration.crew import train
from tests.integration.jobs import small_config
from tests.unit.engine.test_materialise import blueprint_of as plain_blueprint_of
from torch import nn

from elaswave.channel.messages.worker import Exit
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks.determinism_check import UPDATE, environment, environment_of, update_hash
from elaswave.faults.injection import NoProbe
from elaswave.job.plan import identity_of
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.messages import PROTOCOL_VERSION, FencedOff, Joining
from elaswave.protocol.step.ballot import ENVIRONMENT
from elaswave.transport.stream import StreamTransport
from elaswave.worker import setup as joining
from elaswave.worker.control import Mailbox
from elaswave.worker.process import Worker, run_worker
from elaswave.worker.setup import WorkerSetup, first_words, layer_determinism_hashes

FACTS = {"num_bytes": 12, "sample": "ab", "content": ""}


def blueprint_of(*layers, **run):
    blueprint = plain_blueprint_of(*layers)
    config = msgspec.structs.replace(blueprint.config, run=msgspec.structs.replace(blueprint.config.run, **run))
    return Blueprint(config, blueprint.training)


@pytest.fixture
def setup(tmp_path):
    return WorkerSetup(
        config=small_config(),
        worker=7,
        run_dir=tmp_path,
        key=bytes(32),
        listen=f"unix:{tmp_path}",
        checkpoint=None,
        probe=NoProbe(),
        profile=False,
        joins=True,
    )


def test_all_that_is_compared_is_said(setup):
    words = first_words(setup, "unix:/7")
    assert (words.worker, words.address, words.protocol) == (7, "unix:/7", PROTOCOL_VERSION)
    assert f"torch {torch.__version__}" in words.libraries
    assert words.environment == environment().text
    assert words.determinism_hashes[ENVIRONMENT] == environment_of(Blueprint(setup.config)).determinism_hash
    assert msgspec.json.decode(msgspec.json.encode(words), type=Joining) == words


def test_where_bits_are_not_compared_none_are_said(setup):
    elastic = msgspec.structs.replace(setup.config.elastic, verify=False)
    words = first_words(setup._replace(config=msgspec.structs.replace(setup.config, elastic=elastic)), "unix:/7")
    assert (words.environment, words.determinism_hashes) == ("", {})


def test_another_configuration_model_or_data_shows():
    def identity(*sizes, facts=FACTS, **settings):
        shapes = zip(sizes, sizes[1:])
        return identity_of(blueprint_of(*(nn.Linear(*shape) for shape in shapes), **settings), facts)

    plain = identity(4, 4, 4, 4)
    assert plain == identity(4, 4, 4, 4)
    wider, longer = identity(4, 4, 5, 4), identity(4, 4, 4, 4, steps=99)
    assert wider.model_hash != plain.model_hash and wider.config_hash == plain.config_hash
    assert longer.model_hash == plain.model_hash and longer.config_hash != plain.config_hash
    assert identity(4, 4, 4, 4, facts={**FACTS, "num_bytes": 13}).data_hash != plain.data_hash
    assert identity(4, 4, 4, 4, facts={**FACTS, "content": "cd"}) == plain, "only one of them has read all"
    assert identity(4, 4, 4, 4, facts={"num_samples": {"train": 1}}).data_hash != plain.data_hash


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0000001


@pytest.mark.parametrize("settings", [{}, {"model.family": "llama"}, {"model.dtype": "bfloat16", "model.dropout": 0.1}])
def test_a_joiner_says_what_the_first_vote_of_the_others_has_found(setup, settings, tmp_path):
    layout = make_layout(widths=[1, 1], layers_per_stage=[2, 2], num_microbatches=4)
    machines = []
    train(layout, tmp_path, settings, steps=1, change=machines.append)
    known = machines[0].steps.determinism_hashes
    said = first_words(setup._replace(config=small_config(settings)), "unix:/7").determinism_hashes
    assert said.keys() == {ENVIRONMENT, 1, 2, 4}, "embedding, blocks, head"
    assert said.items() <= known.items()


def test_one_layer_of_each_kind_is_tried():
    kinds = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)]
    assert sorted(layer_determinism_hashes(blueprint_of(*kinds), torch.ones(4, 6))) == [1, 2, 4]


def test_another_kernel_and_other_initial_values_show():
    def determinism_hashes(kind, gain=1.0):
        layers = [kind(6, 6), kind(6, 6), kind(6, 6)]
        for layer in layers:
            nn.init.constant_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        return layer_determinism_hashes(blueprint_of(*layers), torch.ones(4, 6))

    plain = determinism_hashes(nn.Linear)
    assert plain == determinism_hashes(nn.Linear)
    assert plain != determinism_hashes(Scaled) and plain.keys() == determinism_hashes(Scaled).keys()
    assert plain != determinism_hashes(nn.Linear, gain=1.5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_another_update_shows(name, monkeypatch):
    blueprint = Blueprint(small_config({"optimizer.name": name}))
    one = environment_of(blueprint)
    assert one.operators[UPDATE] == update_hash(blueprint) != 0
    assert (
        environment_of(Blueprint(small_config({"optimizer.name": name, "optimizer.lr": 2e-3}))).determinism_hash
        != one.determinism_hash
    )
    rule = type(blueprint.optimizer._rule)
    own = rule.update

    def otherwise(self, slots, *arguments, **options):
        own(self, slots, *arguments, **options)
        slots["master"][-1] *= 1.0000001

    monkeypatch.setattr(rule, "update", otherwise)
    assert environment_of(blueprint).determinism_hash != one.determinism_hash


def test_an_optimizer_that_refuses_made_up_numbers_is_not_compared(monkeypatch):
    blueprint = Blueprint(small_config())
    monkeypatch.setattr(type(blueprint.optimizer), "updater", lambda self: 1 / 0)
    before = torch.random.get_rng_state()
    assert update_hash(blueprint) == 0
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_two_layers_are_here_at_once(monkeypatch):
    seen = []

    class Watched(joining.Compute):
        def try_out(self, index, value, *, prove):
            seen.append(sorted(self.layers))
            return super().try_out(index, value, prove=prove)

    monkeypatch.setattr(joining, "Compute", Watched)
    layer_determinism_hashes(blueprint_of(*(nn.Linear(6, 6) for _ in range(3))), torch.ones(4, 6))
    assert seen == [[0], [1], [2]]


# ------------------------------------------------------------------------------------------------------- a whole worker


class Client:
    """A connection to a coordinator that says one thing, and keeps what is said to it."""

    disconnected_s = 0.0

    def __init__(self, mailbox, *messages):
        self.hello, self.beat, self.said = mailbox.hello(), mailbox.heartbeat(), []
        for message in messages:
            mailbox.receive(message)

    def send(self, message, durable=False):
        self.said.append(message)

    def close(self, timeout_s=0.0):
        pass


def live(setup, *messages):
    clients = []

    def make_client(mailbox):
        clients.append(Client(mailbox, *messages))
        return clients[0]

    return run_worker(setup, make_client), clients[0]


def test_a_joiner_listens_and_says_first_who_it_is(setup, capsys):
    status, client = live(setup, Exit())
    assert isinstance(client.hello, Joining)
    assert client.hello.address.startswith("unix:") and client.hello.worker == 7
    assert client.beat is None, "nobody asks how one gets on that is no member"
    assert (status, client.said) == (1, [])
    assert "the job has ended before it began" in capsys.readouterr().out


def test_a_joiner_that_is_refused_ends_with_the_reason(setup, capsys):
    status, client = live(setup, FencedOff(term=1, generation=4, reason="its data are others"))
    assert (status, client.said) == (1, [])
    assert "worker 7 is not admitted and ends itself: its data are others" in capsys.readouterr().out


def test_a_joiner_holds_nothing(setup):
    transport = StreamTransport(7, key=setup.key, listen=setup.listen, generation=1)
    try:
        mailbox = Mailbox(7, transport)
        worker = Worker(setup, Client(mailbox), mailbox, transport)
        machine = worker.machine
        assert (machine.copies, machine.engine.layers, machine.execution.program) == ({}, {}, ())
        assert machine.layers_here() == (0, 0) and 7 in machine.layout.idle
        worker.close()
    finally:
        transport.close()


def test_a_member_says_so_from_its_first_report_on(setup):
    mailbox = Mailbox(7, SimpleNamespace(address="unix:/7", moved_bytes=0))
    mailbox.joining = first_words(setup, "unix:/7")
    assert mailbox.hello() is mailbox.joining
    registered = msgspec.structs.replace(mailbox.registration, generation=5)
    mailbox.registers_as(registered)
    assert mailbox.hello() is registered and mailbox.heartbeat() is not None


def test_a_joiner_carries_on_with_what_the_others_updaters_keep(setup):
    engines = []
    for worker in (setup, setup._replace(worker=8)):
        transport = StreamTransport(worker.worker, key=setup.key, listen=setup.listen, generation=1)
        mailbox = Mailbox(worker.worker, transport)
        made = Worker(worker, Client(mailbox), mailbox, transport)
        engines.append(made.machine.engine)
        made.close()
        transport.close()
    old, new = engines
    for step in (1, 2, 3):
        old.committed(step, 2.0, updates=True)
    assert new.updater.learning_rate != old.updater.learning_rate
    new.carry_on(old.carried(), 3)
    for engine in engines:
        engine.committed(4, 2.0, updates=True)
    assert new.updater.learning_rate == old.updater.learning_rate
    assert (new.carried(), list(new.updater.scalars())) == (old.carried(), list(old.updater.scalars()))
