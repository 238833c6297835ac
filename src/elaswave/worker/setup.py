"""What a worker's process is given when it starts, and what one says of itself that is no member yet.

A joiner says which libraries, configuration, model, data and bits it has (`first_words`). It finds that out by itself,
before it connects, so that the others wait for nothing. Bits are those of the determinism check
(`elaswave.engine.checks.determinism_check`), of the first layer of each kind: forward, backward and update at the run's
shapes, on made-up numbers. Layers are built one after the other, and never are two of them here.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from elaswave.checkpoints.format import CheckpointMeta
from elaswave.config.schema import Config
from elaswave.data.fingerprint import fingerprint_of_all
from elaswave.devices.interface import HOST, Device
from elaswave.engine.batches import BatchMaker, BatchName
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks.determinism_check import environment_of
from elaswave.engine.checks.values import flatten, unflatten
from elaswave.engine.compute import Compute, ComputeRules
from elaswave.faults.injection import Probe
from elaswave.job.plan import identity_of
from elaswave.models.foreign.layer import kinds_here
from elaswave.protocol.messages import PROTOCOL_VERSION, Joining
from elaswave.protocol.step.ballot import ENVIRONMENT
from elaswave.state.flat import FlatLayer, FlatUnit
from elaswave.training.definition import Training
from elaswave.training.tokens import open_tokens
from elaswave.transport.addresses import Endpoint
from elaswave.transport.handshake import Key
from elaswave.worker.links import SiteLinks


class WorkerSetup(NamedTuple):
    """What a worker is started with."""

    config: Config
    worker: int
    run_dir: Path
    key: Key
    """Of those who take part."""
    listen: Endpoint | str
    """Where the data plane listens."""
    checkpoint: tuple[Path, CheckpointMeta] | None
    probe: Probe
    profile: bool
    training: Training | None = None
    """What is trained; None: what the configuration describes."""
    loaders: socket.socket | None = None
    """Where the forkserver hands over lines to loaders; None: the worker makes its micro-batches itself."""
    frozen: Mapping[str, torch.Tensor] | None = None
    """Frozen parameters that the checkpoint has otherwise than they are built; None: they are still to be compared."""
    joins: bool = False
    """Whether it joins a job that runs: it begins without state, and says `Joining` before it registers."""
    sites: SiteLinks | None = None
    """The transport's links to other sites; None: there is only one."""
    domain: str = ""
    """Where it runs, as a joiner says it, see `elaswave.blocks.domains`; empty: the coordinator knows, or nobody."""
    device: Device = HOST
    """What it computes on; `run_worker` opens the configured one."""


def first_words(setup: WorkerSetup, address: str) -> Joining:
    """Finds out what a joiner has to say.

    Args:
        setup: what it is started with.
        address: where its data plane listens.
    Raises:
        BatchError, DataError: the data cannot be read.
        LayerError: a layer cannot be run.
        ForeignError: a foreign part's server does not say what it is.
    """
    blueprint = Blueprint(setup.config, setup.training)
    identity = identity_of(blueprint, _data_facts(setup, blueprint))
    text, determinism_hashes = "", {}
    pinned = setup.config.model.foreign
    foreign = kinds_here(blueprint.model.layers) if pinned else ()
    if setup.config.elastic.verify:
        own = environment_of(blueprint, setup.device)
        text = own.text
        if foreign == pinned:  # else it is refused for that
            inputs = _first_inputs(setup, blueprint)
            determinism_hashes = {
                ENVIRONMENT: own.determinism_hash,
                **layer_determinism_hashes(blueprint, inputs, setup.device),
            }
    return Joining(
        worker=setup.worker,
        address=address,
        protocol=PROTOCOL_VERSION,
        libraries=identity.libraries,
        environment=text,
        config_hash=identity.config_hash,
        model_hash=identity.model_hash,
        data_hash=identity.data_hash,
        domain=setup.domain,
        foreign=foreign,
        determinism_hashes=determinism_hashes,
    )


def _data_facts(setup: WorkerSetup, blueprint: Blueprint) -> Mapping[str, object]:
    """Collects what is known of the data here, as the launcher has written it for those that began."""
    if setup.training is None:
        paths = open_tokens(setup.config, setup.run_dir / "data").paths
        facts: dict[str, object] = msgspec.to_builtins(fingerprint_of_all(paths, whole=False))
        return facts
    samples: Any = blueprint.open_samples(setup.run_dir / "data")
    return {"num_samples": samples.sizes}


def _first_inputs(setup: WorkerSetup, blueprint: Blueprint) -> Any:
    """Inputs of the first micro-batch of all; only their shapes count."""
    samples = blueprint.open_samples(setup.run_dir / "data")
    inputs, _ = BatchMaker(setup.config, samples, blueprint.sampler(samples)).get(BatchName("train", 1, 0))
    return inputs


def layer_determinism_hashes(blueprint: Blueprint, inputs: Any, device: Device = HOST) -> dict[int, int]:
    """Computes determinism hashes of the first layer of each kind, by place.

    Args:
        blueprint: the run.
        inputs: of a micro-batch, on the host.
        device: that is to run them.
    """
    structure, leaves = flatten(inputs)
    inputs = unflatten(structure, list(map(device.bring, leaves)))
    layers: dict[int, FlatLayer] = {}
    compute = Compute(
        ComputeRules(
            blueprint.model,
            blueprint.config.run.seed,
            lowest_trained=blueprint.state.lowest_trained,
            has_determinism_check=True,
        ),
        layers,
        {},
        inputs=lambda step, microbatch, train: inputs,
        device=device,
    )
    place = None if device.is_host else device.place
    kinds: set[str] = set()
    value = inputs
    for index in range(blueprint.state.num_layers):
        module = blueprint.build(index)
        kind = _kind(module)
        layers[index] = _alone(blueprint, index, module, place)
        value = compute.try_out(index, value, prove=kind not in kinds)
        kinds.add(kind)
        del layers[index], module
    return {ENVIRONMENT + 1 + index: determinism_hash for index, determinism_hash in compute.determinism_hashes.items()}


def _kind(module: nn.Module) -> str:
    """Describes what layers have in common of which one is enough: modules, and shapes and types of parameters."""
    parameters = [
        f"{name} {tuple(values.shape)} {values.dtype} {values.requires_grad}"
        for name, values in module.named_parameters()
    ]
    return f"{module!r} {parameters}"


def _alone(blueprint: Blueprint, index: int, module: nn.Module, place: torch.device | None) -> FlatLayer:
    """Makes a layer with what it shares with others, which are not here."""
    first = blueprint.state.num_layers
    shared = range(first, len(blueprint.shapes))
    units = {
        unit: FlatUnit(blueprint.shapes[unit], blueprint.dtype, place)
        for unit in shared
        if index in blueprint.shapes[unit].users
    }
    return blueprint.flat_layer(index, units, module, place)
