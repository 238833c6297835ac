"""Workers of one job as threads over the in-process transport: for layouts that no configuration can ask for."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from tests.integration.jobs import small_config
from tests.memory_transport import MemoryNetwork

from elaswave.blocks.placement import ReplicaRole, place_blocks
from elaswave.data.samples import Draw
from elaswave.engine.activity import ActionTimer
from elaswave.engine.blueprint import Blueprint, materialise
from elaswave.engine.torch_engine import EngineContext, TorchEngine
from elaswave.faults.injection import NoProbe
from elaswave.observability.trace import ACTION, TraceRecorder
from elaswave.planning.programs.layout import validate_layout
from elaswave.protocol.messages import InForce
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.engine import Ports
from elaswave.protocol.step.execution import Life, T
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.replayed_state import ReplayedState
from elaswave.state.flat import BlockStore, HeldBlock
from elaswave.training.definition import Training as Definition
from elaswave.types import Layout, Program
from elaswave.worker.control import Mailbox, StepWatch
from elaswave.worker.links import TransportLinks
from elaswave.worker.process import terms_of

Machine = WorkerMachine[HeldBlock]

_random = threading.RLock()
"""Layers draw from torch's one default generator."""


class Training(NamedTuple):
    """What came of some steps."""

    losses: list[float]
    digests: dict[str, int]
    """Of everything that owners hold, by slot and tensor."""
    followers_digests: dict[str, int]
    programs: dict[int, Program]
    ran: dict[int, list[str]]
    """The actions of each worker's last step, as its trace has them."""


def train(
    layout: Layout,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    steps: int = 3,
    change: Callable[[Machine], None] = lambda machine: None,
    model: Definition | None = None,
) -> Training:
    """Trains the small model under a layout.

    Args:
        layout: of as many layers and micro-batches as the model and the batch have.
        folder: for the text.
        settings: changes to `tests.integration.jobs.SMALL`.
        steps: to train.
        change: called with each worker's machine before its first step.
        model: what is trained; None: what the configuration describes.
    """
    validate_layout(layout)
    config = small_config(settings)
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps))
    blueprint = Blueprint(config, model)
    layout = blueprint.with_copies(msgspec.structs.replace(layout, shared=blueprint.state.shared))
    placement = place_blocks(layout, blueprint.blocks, scatter_width=blueprint.scatter_width)
    network = MemoryNetwork()
    transports = {worker: network.transport(worker) for worker in layout.workers}
    addresses = {worker: transport.address for worker, transport in transports.items()}
    source = blueprint.open_samples(folder)
    sampler = blueprint.sampler(source)

    def work(worker: int) -> tuple[Machine, list[float], TraceRecorder]:
        layers, store, progress = locked(materialise)(blueprint, worker, layout, placement, None)
        transport = transports[worker]
        transport.connect({peer: address for peer, address in addresses.items() if peer != worker}, 10.0)
        trace = TraceRecorder(worker)
        mailbox = Mailbox(worker, transport)
        timer = ActionTimer(worker, None, transport.rest)
        context = EngineContext(
            blueprint=blueprint,
            worker=worker,
            batches=lambda step, microbatch: source.batch(sampler.draws(step, microbatch), "train"),
            evaluation_batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "validation"),
            timer=timer,
            run_dir=folder,
        )
        links = TransportLinks(worker, blueprint.blocks, transport, mailbox.activity, lambda: None)
        watch = StepWatch(NoProbe(), mailbox, trace)
        engine = TorchEngine(context, layers)
        one_at_a_time(engine)
        disk: Any = SimpleNamespace(is_busy=False, is_due=lambda: False)
        outbox: Any = SimpleNamespace(request=lambda: Request.NONE)
        machine: Machine = WorkerMachine(
            Ports(worker, terms_of(blueprint), engine, links, watch, outbox, disk),
            ReplayedState(),
            InForce(layout, placement, blueprint.execution),
            store.held,
            progress,
        )
        watch.machine = machine
        change(machine)
        return machine, [complete(machine.steps.run_step(step), links).loss for step in range(1, steps + 1)], trace

    try:
        with ThreadPoolExecutor(len(layout.workers)) as pool:
            crew = list(pool.map(work, layout.workers))
    finally:
        for transport in transports.values():
            transport.close()
    losses = crew[0][1]
    assert all(each[1] == losses for each in crew), "workers disagree on the losses"
    digests: dict[ReplicaRole, Counter[str]] = {role: Counter() for role in ReplicaRole}
    for machine, _, _ in crew:
        for role, total in digests.items():
            for name, part in BlockStore(machine.copies).digest_parts(role).items():
                total[name] = (total[name] + part) % 2**64
    return Training(
        losses,
        dict(digests[ReplicaRole.OWNER]),
        dict(digests[ReplicaRole.FOLLOWER]),
        {machine.worker: machine.execution.program for machine, _, _ in crew},
        {
            trace.worker: [
                span[0] for span in trace._spans if span[1] == ACTION and (span[4] or {}).get("step") == steps
            ]
            for _, _, trace in crew
        },
    )


def locked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, while no other thread's layers seed and draw."""

    def call(*arguments: Any, **options: Any) -> Any:
        with _random:
            return function(*arguments, **options)

    return call


def complete(life: Life[T], links: TransportLinks) -> T:
    """Lets a worker do something to its end."""
    while True:
        try:
            links.wait(next(life))
        except StopIteration as end:
            result: T = end.value
            return result


def one_at_a_time(engine: TorchEngine) -> None:
    """Keeps the layers of other threads from seeding and drawing in between."""
    compute = engine.compute
    compute._run_layer = locked(compute._run_layer)  # type: ignore[method-assign]
    compute._check_forward = locked(compute._check_forward)  # type: ignore[method-assign]  # keeps generators
    compute._forward_loss = locked(compute._forward_loss)  # type: ignore[method-assign]
    compute.backward = locked(compute.backward)  # type: ignore[method-assign]  # a checkpoint may draw again
    compute.backward_input = locked(compute.backward_input)  # type: ignore[method-assign]
    compute.backward_weights = locked(compute.backward_weights)  # type: ignore[method-assign]
    engine._materialise = locked(engine._materialise)  # type: ignore[method-assign]
    engine.prepare_layout = locked(engine.prepare_layout)  # type: ignore[method-assign]
