"""The sections of a run's configuration and their keys: types, ranges, defaults, meaning.

Every struct is frozen, takes keywords only and checks itself when it is made, from a file or in Python: a
configuration object that exists is valid. Rules between keys stand in ``rules``. ``None`` means unset; it is never
written to a file. This module reads no file and no environment.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from elaswave.blocks.domains import deal_over_hosts
from elaswave.config.rules import broken_rules, host_sizes
from elaswave.config.values import check_values, toml_document, toml_text, without_unused
from elaswave.config_format import FORMAT, FORMAT_KEY
from elaswave.data.token_files import VOCABULARY_MAX
from elaswave.errors import ConfigError
from elaswave.fences import CODEC_PATTERN, CODEC_WORDS, FENCE_RATIO_PATTERN

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
FractionBelowOne = Annotated[float, Meta(ge=0, lt=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]

BUILT_IN_POLICIES = (
    "elaswave",
    "recycle_normalized",
    "recycle_rerouting",
    "torchft",
    "torchft_batch_kept",
    "oobleck_aligned",
    "full_restart",
    "full_restart_spares",
)
"""Recovery policies that have a name, and can run here: elaswave.planning.policy.policies has more."""
Policy = Annotated[
    str,
    Meta(
        pattern=rf"^({'|'.join(BUILT_IN_POLICIES)}|.+:[^\W\d]\w*)$",
        extra={
            "words": f"one of {', '.join(map(json.dumps, BUILT_IN_POLICIES))}, or a function of your own as "
            '"module:function" or "file.py:function"'
        },
    ),
]

FenceText = Annotated[
    str,
    Meta(
        pattern=rf"^.+:({CODEC_PATTERN})\Z",
        extra={"words": f'"LAYER:CODEC", a layer\'s name and {CODEC_WORDS}'},
    ),
]

FenceRatioText = Annotated[
    str,
    Meta(pattern=rf"^{FENCE_RATIO_PATTERN}\Z", extra={"words": '"STEP:LAYER:RATIO", such as "1:block.0:100"'}),
]

Codec = Annotated[str, Meta(pattern=rf"^({CODEC_PATTERN})\Z", extra={"words": CODEC_WORDS})]

VOCABULARY_OF_BYTES = 256


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: checks every field when it is made, then the rules between its own keys."""

    section: ClassVar[str]
    """Name of the section, as in the file."""

    def __post_init__(self) -> None:
        """Checks the section.

        Raises:
            ConfigError: lists every problem.
        """
        good, problems = check_values(self.section, type(self), msgspec.structs.asdict(self))
        problems += broken_rules({f"{self.section}.{key}": value for key, value in good.items()})
        if problems:
            raise ConfigError(problems)
        for key, value in good.items():
            # The same value in the field's own type: a tuple for a list, 1.0 for 1.
            msgspec.structs.force_setattr(self, key, value)


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model: embedding, ``num_layers`` transformer blocks and a head, each a layer of the pipeline; or the layers
    that a script gives to ``elaswave.Trainer``."""

    section: ClassVar[str] = "model"

    family: Literal["gpt", "llama", "own"] = "gpt"
    """``gpt``: learned positions, LayerNorm, GELU. ``llama``: rotary positions, RMSNorm, SwiGLU, grouped queries.
    ``own``: set by ``elaswave.Trainer``, as are ``num_layers`` and ``dtype`` then; of the other keys only ``fences`` is
    used."""
    num_layers: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Number of transformer blocks; embedding and head are two layers more. own: number of layers."""
    hidden_size: Count = 128
    """Length of the vector that stands for a token."""
    num_heads: Count = 4
    """Number of attention heads; divides ``hidden_size``."""
    num_kv_heads: Count | None = None
    """llama: number of heads of keys and values, divides ``num_heads``; unset: as many as ``num_heads``."""
    intermediate_size: Count | None = None
    """llama: length of that vector inside the feed-forward part; unset: the family's rule."""
    rope_theta: Annotated[float, Meta(gt=0)] = 10000.0
    """llama: base of the rotary positions' wavelengths."""
    context_length: Count = 64
    """Number of tokens of a sample."""
    dropout: FractionBelowOne = 0.1
    """Share of activations that are dropped while training."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations; the masters that the optimizer updates are float32 always."""
    recompute: bool = False
    """Run a block's forward pass again in the backward pass instead of keeping its activations: less memory, more
    time, the same bits."""
    fences: tuple[FenceText, ...] = ()
    """Boundaries at which a codec shortens what passes, forward and backward, each as ``LAYER:CODEC``, the layer before
    it and one of ``none``, ``bf16``, ``int8``, ``int4``, ``topkR`` (one number of R is kept), ``topkR-own`` and
    ``adatopkR`` (at most R). They are part of the model: other fences, other bits. The built-in models have the layers
    ``embedding``, ``block.0`` and so on, and ``head`` (docs/own-models/fences.md)."""
    fence_ratios: tuple[FenceRatioText, ...] = ()
    """Ratios of ``adatopkR`` fences by step, each as ``STEP:LAYER:RATIO``: from that step on; as ``fence_ratios`` of a
    run's ``result.json`` has them. With them a run chooses none itself, and has the bits of the run that did. Unset: by
    the network of ``sites``, anew with each planned change of layout."""
    cuts: tuple[int, ...] = ()
    """own: where ``elaswave.split`` has cut the network; set by ``elaswave.Trainer``, so that a resumed run has the
    same parts."""
    network: str = ""
    """own: fingerprint of the operators of that network; set by ``elaswave.Trainer``."""
    foreign: tuple[str, ...] = ()
    """own: ``LAYER: KIND`` of each foreign part: software, versions, code and processor of its server
    (docs/foreign.md); set by ``elaswave.Trainer``. Every server of the run is of this kind."""


class DataConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the tokens come from."""

    section: ClassVar[str] = "data"

    source: Name | Annotated[tuple[Name, ...], Meta(min_length=1)] = "python-docs"
    """``python-docs`` (the text of Python's own documentation), the path of a text file that is read as bytes, or the
    path of a ``.bin`` file of tokens (``elaswave data tokenize`` makes them). A list, or a pattern such as
    ``shards/*.bin``, is one source: its files follow each other, those of a pattern sorted by name."""
    vocab_size: Annotated[int, Meta(ge=2, le=VOCABULARY_MAX)] | None = None
    """Number of different tokens; unset: what ``.bin`` files say in their headers, or 256, one for each byte. A
    ``.bin`` file without a header (uint16, as nanoGPT writes them) needs it."""
    validation_fraction: FractionBelowOne = 0.1
    """Share of the tokens, at the end of the source, that is kept for evaluation."""
    verify: Literal["sample", "full"] = "sample"
    """What a resumed run compares with the data that it began with, beside the size: 64 blocks spread over the file, or
    the whole content, which is read once at every start."""

    @property
    def resolved_vocab_size(self) -> int:
        """The vocabulary's size, given or by the rule."""
        return VOCABULARY_OF_BYTES if self.vocab_size is None else self.vocab_size


class BatchConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The global batch: always the same list of micro-batches, whichever workers run them."""

    section: ClassVar[str] = "batch"

    num_microbatches: Annotated[int, Meta(ge=1, le=65536)] = 8
    """Number of micro-batches of a step, over all workers."""
    microbatch_size: Count = 8
    """Number of samples of a micro-batch."""


class LayoutConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs what. ``stages`` with ``replicas``, or ``widths``; nothing given: 2 stages x 2 replicas."""

    section: ClassVar[str] = "layout"

    stages: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Number of pipeline stages; goes with ``replicas``."""
    replicas: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Number of workers of each stage; goes with ``stages``."""
    widths: Annotated[tuple[Count, ...], Meta(min_length=1)] | None = None
    """Number of workers of each stage, stage by stage: ``[1, 3]``."""
    layers: Annotated[tuple[Count, ...], Meta(min_length=1)] | None = None
    """Number of layers of each stage, embedding and head included; unset: balanced by their estimated cost."""
    schedule: Literal["1f1b", "gpipe", "zero-bubble", "zero-bubble-h2"] = "1f1b"
    """Order of forward and backward passes; the bits are the same. ``1f1b`` needs least memory. ``zero-bubble``
    computes weights' gradients apart, when a worker would wait; it pays with deep pipelines and few micro-batches.
    ``zero-bubble-h2`` holds up to twice the activations: faster where stages are uneven, as they are after a loss."""


class OptimizerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients become updates. Keys of the other algorithm, or of the other schedule, are not used."""

    section: ClassVar[str] = "optimizer"

    name: Literal["adamw", "sgd", "own"] = "adamw"
    """``adamw``: Adam with decoupled weight decay. ``sgd``: with momentum; weight decay is added to the gradient.
    ``own``: set by ``elaswave.Trainer`` with an optimizer, as is ``grad_clip`` then; the other keys are not used."""
    lr: NonNegative = 2e-3
    """Largest learning rate, reached at the end of the warm-up."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """adamw: how much of the averages of gradient and squared gradient each step keeps."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """adamw: added to the denominator."""
    weight_decay: NonNegative = 0.1
    """Decay of the parameters that the model marks for it (matrices, not biases and norms)."""
    momentum: FractionBelowOne = 0.9
    """sgd: how much of the running gradient each step keeps."""
    grad_clip: NonNegative = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it. 0: off."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "step"] = "cosine"
    """Learning rate after the warm-up: constant; a half cosine or a line down to ``min_lr_ratio`` at ``run.steps``;
    constant and then, over the last ``decay_steps``, such a line (``wsd``: warm-up, stable, decay); or times
    ``step_factor`` after every ``step_every`` steps."""
    warmup_steps: CountOrZero = 10
    """Steps over which the learning rate grows linearly to ``lr``."""
    min_lr_ratio: Fraction = 0.1
    """cosine, linear, wsd: last learning rate as a share of ``lr``."""
    decay_steps: Count | None = None
    """wsd: number of the last steps, in which the learning rate falls; unset: a tenth of ``run.steps``."""
    step_every: Count | None = None
    """step: steps from one fall of the learning rate to the next, counted from the end of the warm-up."""
    step_factor: Fraction = 0.1
    """step: what the learning rate is multiplied by at each fall."""
    ema_decay: FractionBelowOne = 0.0
    """What an exponential moving average of the weights keeps of itself in each update; 0: there is no average."""


class ElasticConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes the run elastic: exact sums, copies of the state, the checks of the vote, and the bounds."""

    section: ClassVar[str] = "elastic"

    consistency: Literal["bitwise", "scaled"] = "bitwise"
    """``bitwise``: exact sums, the layout does not show in the result. ``scaled``: float32 sums; same batch and
    gradient scale, the rounding may differ."""
    accumulator_bits: Literal[64, 48] = 64
    """Width of an exact sum, and of what workers send of it: 8 bytes per parameter, or 6. With 48 a sum has 33 bits
    below its tensor's largest gradient instead of 43, gradients may grow 2**10-fold between two steps instead of
    2**16-fold before a step is tried again, and the bits of the result are others. Not used by ``scaled``."""
    num_followers: CountOrZero | Literal["auto"] = "auto"
    """Live copies of every block of state beside its owner's, in its stage as far as that has workers; at most the
    number of workers - 1 are made. ``auto``: all other workers of the stage hold one, so that any of them may be lost
    at one instant while one is left; as many as fit where that takes more than ``copies_memory``."""
    copies_memory: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Share of a worker's memory that its copies of others' blocks may take with ``num_followers = "auto"``."""
    worker_memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Memory of each worker that ``auto`` counts with. Unset: an emulated device's; of real ones what the machine that
    starts the job has for each of its workers."""
    scatter_width: Count | None = None
    """Workers over which the first copies of one worker's blocks are spread. Two workers lost at one instant take all
    copies of a block with them only if one is among these for the other. Unset: 2, or as many more as the emulated
    devices' memory asks for."""
    block_size: Annotated[int, Meta(ge=32, multiple_of=32)] | None = None
    """Elements of a block, the unit of ownership and verification; unset: 16384, in models of 4 M parameters and more
    up to 65536, and above 17 billion more, so that there are at most some 262144 blocks."""
    refill_bytes_per_step: Annotated[int, Meta(ge=1)] = 4 << 20
    """After a loss, bytes of state that a worker sends during one step, and receives, to make new copies of blocks; at
    least a block."""
    copy_bytes_per_step: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of state that a worker sends during one step, and receives, when blocks move to other workers by plan;
    unset: what makes a step at most 5 % longer, as measured."""
    hosts: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """The hosts that workers are told apart by, to try out on one machine what a host's loss does: ``["a", "b"]``, or
    with a number of workers for each, ``["a=3", "b=1"]``; a rack, switch or zone stands before a slash, ``"rack-1/a"``.
    Each stage is dealt over them, and the first copy of a block is on another host than its owner. Unset: all workers
    are on one host."""
    verify: bool = True
    """Compare the copies of gradients and state, and the checksums of partial sums, in every vote. Off only to measure
    what it costs."""
    spot_checks: Annotated[float, Meta(ge=0, le=1)] = 0.005
    """Share of the time that layers take in which their runs are done again, or their probes, and compared bit for bit:
    in steps and micro-batches drawn from ``run.seed``; more often in the first steps (docs/own-models/determinism.md).
    0, or no ``verify``: none."""
    salvage: bool = True
    """When a step is tried again after a loss, survivors keep what they have of it, and only what depended on the lost
    worker runs again; needs ``consistency = "bitwise"``. Off: the whole step runs again."""
    policy: Policy = "elaswave"
    """How a run goes on after a loss. ``elaswave`` also plans for workers that join, leave or become slower, and so
    does a function of your own (docs/policies.md); the others are baselines, for comparison; those of ReCycle and
    Oobleck lack what cannot run here (docs/simulation.md). With ``torchft`` the batch shrinks, so losses and state are
    others; with ``full_restart`` all workers go back to the last durable checkpoint, or to the start; with
    ``full_restart_spares`` also, and workers that join stand by until then."""
    rebalance: bool = True
    """elaswave: after a loss, or when workers have become slower or faster, plan a better layout while training goes
    on, and change to it between two steps. A function of your own: ask it when workers join, leave or change speed."""
    respawn: bool = True
    """elaswave, or a function of your own: when a worker's process has ended, start another one that joins in its
    place, under a new id: after 1 s, then 2 s and so on, up to a minute. A place whose processes end three times before
    a committed step stays empty."""
    drain_deadline_s: NonNegative = 30.0
    """Seconds that a worker has which is asked to leave; one that has not left by then is lost."""
    horizon_s: Annotated[float, Meta(gt=0)] | None = None
    """Expected seconds until the next event, in which a change of layout must repay itself; unset: by public rates."""
    restart_s: NonNegative = 30.0
    """full_restart, full_restart_spares: seconds that stopping and starting the job takes."""
    min_workers: Count = 1
    """The run ends with an error rather than go on with fewer workers."""
    max_failures_per_hour: Count = 100
    """The run ends with an error when workers are lost more often than this within an hour. Workers that are lost
    together count once, as do those that are lost before it is decided how the others go on."""

    @property
    def planned_followers(self) -> int:
        """Copies that layouts are planned with: more of them must not shrink a layout, since they may be given up."""
        return 1 if self.num_followers == "auto" else self.num_followers

    @property
    def respawns(self) -> bool:
        """Whether the place of a lost worker is taken again: the baselines have no joins of this kind."""
        return self.respawn and (self.policy == "elaswave" or self.policy_is_code)

    @property
    def policy_is_code(self) -> bool:
        """Whether the policy is a person's own function."""
        return self.policy not in BUILT_IN_POLICIES


class DeviceConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What workers compute on. ``emulated``: after its own tiny computation a worker rests until the described device
    would have done the described model's; the described model has as many blocks as ``model.num_layers``."""

    section: ClassVar[str] = "device"

    kind: Literal["cpu", "emulated", "cuda", "loopback"] = "cpu"
    """``cpu``: this machine's processor, one thread per worker. ``emulated``: see above; keys below describe it.
    ``cuda``: NVIDIA GPUs. ``loopback``: the code of an accelerator with the processor in its place, to test it
    (docs/devices.md)."""
    workers_per_device: Annotated[int, Meta(ge=1)] = 1
    """cuda: workers that share a GPU, so that pipelines and recoveries run on a single one. A host has room for as many
    workers as GPUs times this."""
    model: Annotated[str, Meta(min_length=1)] = "llama-2-13b"
    """emulated: the described model; micro-batches of one sample."""
    name: Annotated[str, Meta(min_length=1)] = "ascend-910b"
    """emulated: the described device."""
    time_scale: Annotated[float, Meta(gt=0)] = 1.0
    """emulated: seconds that a described second takes; above 1 where the processor is too busy to keep the pace."""
    speeds: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)] | None = None
    """Speed of each worker relative to the device's, by id; an emulated one keeps to it, a real one is planned with it;
    1.0 for those that join later; unset: 1.0 for all."""
    frequency: Literal["none", "emulated", "cgroup", "nvidia"] = "none"
    """What sets the frequency level that a plan gives a worker: nothing; the emulated device; a CPU quota of a control
    group; an NVIDIA GPU's clocks (extra ``gpu``)."""
    quota: Annotated[float, Meta(gt=0, le=1)] | None = None
    """frequency = "cgroup": the share of a core that each worker may use. A plan may give a worker more, up to a whole
    core, if others are lost or have nothing to do. Unset: no worker is bounded, and no frequencies are planned."""


class SitesConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers at several sites that slow links join (docs/far-apart.md). Each worker is a machine of its own."""

    section: ClassVar[str] = "sites"

    network: Name | None = None
    """File with sites, their workers and links. Unset: all workers are at one place. Where no layout is given, OP-Fence
    plans one for the file's workers: stages, schedule, who is where, and speeds of emulated devices."""
    links: Literal["emulated", "real"] = "emulated"
    """"emulated": frames between workers of this machine arrive when the described links would have brought them.
    "real": workers are where the file says; data leaves at nine tenths of a link's rate, so that heartbeats do not
    stand behind it. Needs TCP."""
    rate: Annotated[float, Meta(gt=0)] = 1.0
    """Bandwidth of each link, as a share of what the file says: the run's model may be smaller than the one that the
    links are for."""
    delay: NonNegative = 1.0
    """Delay of each link, the same."""
    of_workers: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None
    """Site of each worker, by id; those that join later take their turn through the list. Unset: as OP-Fence plans, or
    in the order of the file."""
    codec: Codec | None = None
    """Where OP-Fence plans the layout: codec of the fences at the boundaries between sites, which become
    ``model.fences`` if there are none. Unset: no fences."""
    use_all: bool = False
    """Where OP-Fence plans the layout: leave out no worker, also where that were faster."""
    copies: Literal["outside", "inside"] = "outside"
    """Where followers are. "outside" of their owner's site, as far as there are other sites: the job goes on in place
    when it loses a whole site; mean gradients cross slow links in each step. "inside": nothing crosses them for copies,
    and the loss of a site, or of the only worker of one, leads back to the last durable checkpoint."""
    coordinator: Name | None = None
    """Site of the coordinator: what it and workers of other sites tell each other, heartbeats too, takes the links of
    the network. Unset: it is near all of them."""


class ControlConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts, and where coordinators keep what they decide."""

    section: ClassVar[str] = "control"

    hosts: Count = 1
    """Hosts with which the job begins, each with an agent (``elaswave agent``); each stage is dealt over them. More may
    come later. Their names are ``elastic.hosts``, or else ``host-0``, ``host-1`` and so on, as they come."""
    hosts_wait_s: Annotated[float, Meta(gt=0)] = 600.0
    """How long the job waits for these hosts before it ends with exit code 75."""

    store: Annotated[
        str,
        Meta(
            pattern=r"^(file|etcd://[^\s,/]+(,[^\s,/]+)*)$",
            extra={"words": '"file", or members of etcd as "etcd://HOST:PORT,HOST:PORT,..."'},
        ),
    ] = "file"
    """"file": a journal on this machine. ``etcd://HOST:PORT,...``: members of a cluster of etcd 3.4 or newer; name
    several, so that one may fail. See docs/store.md."""
    store_patience_s: Annotated[float, Meta(gt=0)] = 60.0
    """How long a decision waits for etcd to answer before the job ends with exit code 75. Steps go on meanwhile."""
    store_ca: Name | None = None
    """PEM file of the authority of etcd's certificates: connections use TLS, and names are checked. Unset: no TLS,
    which is refused where a member is not on loopback, unless ``net.trusted`` is set."""
    store_cert: Name | None = None
    """PEM file of the certificate that etcd asks clients for."""
    store_key: Name | None = None
    """PEM file of its private key, without a passphrase."""
    store_credentials: Name | None = None
    """File with USER:PASSWORD of a user of etcd; nobody else may read it."""


class NetConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the processes of a job reach each other. All but ``transport`` is for TCP (docs/security.md)."""

    section: ClassVar[str] = "net"

    transport: Literal["unix", "tcp"] = "unix"
    """``unix``: sockets in a private folder of this machine. ``tcp``: for control connections and workers' links."""
    bind: Name | None = None
    """Numeric address to listen at; ``0.0.0.0`` or ``::``, all of this machine's, need ``advertise``. Unset:
    ``127.0.0.1``."""
    interface: Name | None = None
    """Listen at the first address of this network interface instead, IPv4 before IPv6."""
    advertise: Name | None = None
    """Host that others dial, and that the certificate must name; unset: the address that is listened at."""
    ports: Annotated[str, Meta(pattern=r"^\d{1,5}-\d{1,5}$", extra={"words": 'ports as "FIRST-LAST"'})] | None = None
    """Ports that may be listened at: one for the coordinator, one for each worker of this host, more for those that
    join. Unset: the system chooses."""
    tls: Literal["off", "required"] = "off"
    """``required``: mutual TLS 1.3 on control connections and links, with names checked; needs ``keys``."""
    keys: Name | None = None
    """Folder of this host's certificate, made by ``elaswave keys``."""
    trusted: bool = False
    """Allows TCP without TLS at an address that other machines reach: frames are then neither encrypted nor signed."""


class RunConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the run lasts, what it draws from, what it keeps."""

    section: ClassVar[str] = "run"

    steps: Annotated[int, Meta(ge=1, le=2**32 - 1)] = 150
    """Number of the last step, counted from the very first one, also after a resume."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1
    """What initial values, dropout and the order of the data are derived from."""
    checkpoint_every: CountOrZero = 0
    """Steps between durable checkpoints; 0: they do not depend on the number of steps."""
    checkpoint_every_s: NonNegative = 1200.0
    """Most seconds from one durable checkpoint to the next, up to the end of a step; 0: no limit. With both at 0 there
    is only the checkpoint after the last step."""
    keep_checkpoints: Count = 2
    """Number of checkpoints that are kept; older ones are removed."""
    spare_checkpoints: Name | None = None
    """Folder on another disk for checkpoints that the run's own folder does not take, as it is full or read-only; all
    workers must see it. The run has a folder of its own in it."""
    eval_every: CountOrZero = 0
    """Steps between evaluations on the validation split; 0: none."""
    eval_microbatches: Annotated[int, Meta(ge=1, le=65536)] = 8
    """Number of micro-batches of an evaluation, always the same samples."""
    skip_nonfinite: bool = False
    """Commit a step whose loss or gradient is not finite without an update, instead of ending the run."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of a run."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = msgspec.field(default_factory=DataConfig)
    """The data."""
    batch: BatchConfig = msgspec.field(default_factory=BatchConfig)
    """The global batch."""
    layout: LayoutConfig = msgspec.field(default_factory=LayoutConfig)
    """Who runs what."""
    optimizer: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)
    """The optimizer."""
    elastic: ElasticConfig = msgspec.field(default_factory=ElasticConfig)
    """Consistency, copies, bounds."""
    device: DeviceConfig = msgspec.field(default_factory=DeviceConfig)
    """What workers compute on."""
    sites: SitesConfig = msgspec.field(default_factory=SitesConfig)
    """Where workers are."""
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)
    """The coordinator's store."""
    net: NetConfig = msgspec.field(default_factory=NetConfig)
    """Sockets, addresses, TLS."""
    run: RunConfig = msgspec.field(default_factory=RunConfig)
    """Length, seed, checkpoints, evaluation."""

    def __post_init__(self) -> None:
        """Checks the rules between sections.

        Raises:
            ConfigError: lists every problem.
        """
        problems = [
            f"{name}: got {toml_text(getattr(self, name))}, expected a {section.__name__}"
            for name, section in SECTIONS.items()
            if not isinstance(getattr(self, name), section)
        ]
        problems = problems or broken_rules(self.flat())
        if problems:
            raise ConfigError(problems)

    @property
    def widths(self) -> tuple[int, ...]:
        """Workers of each stage, of a resolved configuration."""
        assert self.layout.widths is not None, "the layout is not resolved"
        return self.layout.widths

    @property
    def hosts(self) -> dict[str, int] | None:
        """Host -> number of workers that the run begins with, of a resolved configuration; None: all are on one."""
        hosts = self.elastic.hosts
        if hosts is None and self.control.hosts > 1:
            hosts = tuple(f"host-{number}" for number in range(self.control.hosts))
        return None if hosts is None else host_sizes(hosts, sum(self.widths))

    @property
    def host_of(self) -> dict[int, str]:
        """Worker -> host, of those that the run begins with; empty where all are on one."""
        return {} if self.hosts is None else dict(deal_over_hosts(self.widths, self.hosts))

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers of each stage, of a resolved configuration."""
        assert self.layout.layers is not None, "the layout is not resolved"
        return self.layout.layers

    def flat(self) -> dict[str, Any]:
        """Returns every value by its dotted key, unset ones included."""
        return {
            f"{name}.{key}": value
            for name in SECTIONS
            for key, value in msgspec.structs.asdict(getattr(self, name)).items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the format's number, and the set values by key, by section: plain data for JSON.

        Keys that are not used for a script's own model or optimizer are left out.
        """
        sections = {
            name: {key: value for key, value in section.items() if value is not None}
            for name, section in msgspec.to_builtins(self).items()
        }
        return {FORMAT_KEY: FORMAT, **without_unused(sections)}

    def to_toml(self) -> str:
        """Returns the text of a TOML file from which the same configuration is read; unset keys are left out."""
        return toml_document(self.to_dict())


SECTIONS: dict[str, type[Section]] = {
    struct.section: struct
    for struct in (
        ModelConfig,
        DataConfig,
        BatchConfig,
        LayoutConfig,
        OptimizerConfig,
        ElasticConfig,
        DeviceConfig,
        SitesConfig,
        ControlConfig,
        NetConfig,
        RunConfig,
    )
}
"""Type of every section, by its name."""
