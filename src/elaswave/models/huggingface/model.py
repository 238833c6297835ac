"""`hf`: a transformers model as layers for `elaswave.Trainer`, from a configuration or from a folder of weights."""

import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from elaswave.errors import UsageError
from elaswave.models.huggingface.parts import (
    FAMILIES,
    HEAD,
    Family,
    family_of,
    outside,
    type_and_shape,
    unknown_architecture,
)
from elaswave.models.huggingface.stored import DTYPES as STORED_DTYPES
from elaswave.models.huggingface.stored import StoredTensor, stored_tensors
from elaswave.models.layers import Layer, LossOutput
from elaswave.untrusted import read_bytes, read_json, reason, stays_inside
from elaswave.visible import visible

ATTENTIONS = ("sdpa", "eager")
"""Kernels that give the same bits wherever they run."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IGNORED = -100
"""The label of a token that is not to be predicted, as in transformers."""
CONFIG_FILE = "config.json"
_COMPANIONS = ("generation_config.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt")
_COMPANION_PATTERNS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "spiece.model")
_COMPANION_BYTES_MAX = 1 << 26
_CONFIG_BYTES_MAX = 1 << 24
LAYERS_UNSEEN_MAX = 1 << 10
"""Of layers that are built, without values, although the files have fewer tensors: what they lack is told then."""
COUNT_MAX = 1 << 17
"""Of layers, labels, experts or positions that a configuration may count."""
_OLD_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of tensors that older releases wrote, and that follow from the configuration."""


class HuggingFaceModel(list[Layer]):
    """The layers of a transformers model, for `elaswave.Trainer`.

    Args:
        layers: in their order.
        config: transformers' configuration.
        dtype: of the parameters.
        files: what an export needs beside the weights, by name: configuration, tokenizer.
    """

    def __init__(self, layers: Sequence[Layer], config: Any, dtype: torch.dtype, files: Mapping[str, bytes]) -> None:
        super().__init__(layers)
        self.config = config
        self.dtype = dtype
        self.files = files

    @staticmethod
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> LossOutput:
        """Computes the loss for `elaswave.Trainer`: cross entropy of the next token, as transformers has it for
        ``labels=``.

        The labels are the tokens themselves, *not shifted*: they are shifted here, once. -100 is not to be predicted.

        Args:
            logits: [samples, tokens, vocabulary].
            labels: [samples, tokens].
        Returns:
            The sum in float32, and the number of tokens that it is over.
        Raises:
            UsageError: there is not one label of the vocabulary for each token.
        """
        if labels.shape != logits.shape[:-1] or labels.dtype != torch.long:
            raise UsageError(
                f"the labels are {type_and_shape(labels)}, needed: int64 {list(logits.shape[:-1])}, the token numbers "
                f"themselves, not shifted; {IGNORED} where nothing is to be predicted"
            )
        following = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # the last position predicts nothing
        try:
            total = F.cross_entropy(
                logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        except IndexError as error:
            raise UsageError(outside("labels", labels, logits.shape[-1])) from error
        return LossOutput(total, (following != IGNORED).sum())


def hf(folder_or_config: Any, *, dtype: Any = None, attn: str = "sdpa") -> HuggingFaceModel:
    """Makes layers of a transformers model, split into token table, blocks, norm and head without changing its classes.

    No weight is read here. Each worker reads the byte ranges of its own layers from the folder's safetensors; from a
    configuration alone, it draws its layers' initial values as transformers does, seeded by (``run.seed``, layer).

    Args:
        folder_or_config: a local folder with config.json and safetensors, or a transformers configuration.
        dtype: of parameters and activations, "float32" or "bfloat16"; None: what the configuration says, else float32.
        attn: kernel of the attention: "sdpa" or "eager".
    Returns:
        A list of `elaswave.Layer`; its ``loss`` shifts the labels.
    Raises:
        UsageError: transformers is not installed, the folder cannot be used, or the architecture is not known.
    """
    if attn not in ATTENTIONS:
        raise UsageError(
            f"attn = {attn!r}, needed: one of {', '.join(ATTENTIONS)}; others are not known to give the same bits in "
            "every process"
        )
    _require_transformers()
    is_path = isinstance(folder_or_config, str | os.PathLike)
    folder = Path(folder_or_config).expanduser().absolute() if is_path else None
    if folder is None and not hasattr(folder_or_config, "model_type"):
        raise UsageError(
            f"hf was given {folder_or_config!r:.80} of type {type(folder_or_config).__name__}, needed: a local folder, "
            "or a configuration of transformers"
        )
    if folder is None:
        return _model_of(copy.deepcopy(folder_or_config), None, dtype, attn)
    try:
        return _model_of(_stored_config(folder), folder, dtype, attn)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"{folder / CONFIG_FILE} describes no model that can be made ({type(error).__name__}: {error}): bring the "
            "file again"
        ) from error


def _model_of(config: Any, folder: Path | None, dtype: Any, attn: str) -> HuggingFaceModel:
    """Makes the model of a configuration, and of the values in a folder."""
    family = family_of(config)
    kind = _dtype(dtype, config)
    config.use_cache, config._attn_implementation = False, attn
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # one expert after the other; kernels for all at once round otherwise
    stored = None if folder is None else stored_tensors(folder)
    if stored is not None and config.tie_word_embeddings and _has_another_head(family, stored):
        warnings.warn(
            f"{folder} holds a head ({HEAD}.weight) with other values than the token table, although {CONFIG_FILE} "
            "says that they are tied: both are taken as they are, not tied, as transformers does. Set "
            f"tie_word_embeddings to false in {CONFIG_FILE} to say so, or leave the head out of the files to tie them",
            stacklevel=2,
        )
        config.tie_word_embeddings = False
    if stored is not None and config.num_hidden_layers > max(len(stored), LAYERS_UNSEEN_MAX):
        raise UsageError(
            f"{CONFIG_FILE} in {folder} has {config.num_hidden_layers} layers, and the files {len(stored)} tensors: "
            "they are not of one checkpoint; bring them again"
        )
    names = tuple(family.parts(family, config))
    layers = _layers(family, config, kind, names, stored)
    return HuggingFaceModel(layers, config, kind, _files(folder, config, family, kind))


def _has_another_head(family: Family, stored: Mapping[str, StoredTensor]) -> bool:
    """Tells whether files hold a head whose values are not the token table's."""
    head = stored.get(f"{HEAD}.weight")
    table = stored.get(family.embedding) or stored.get(family.embedding.removeprefix(family.base))
    if head is None or table is None:
        return False
    return head.shape != table.shape or not head.equals(table)


def _require_transformers() -> None:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"elaswave.hf needs the package transformers ({error}): pip install 'elaswave[hf]'") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UsageError(
            f"transformers {transformers.__version__} is installed, needed: 5.0 or newer; pip install 'elaswave[hf]'"
        )


def _stored_config(folder: Path) -> Any:
    """Reads the configuration in a folder."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        what = f"{folder} has no {CONFIG_FILE}" if folder.is_dir() else f"there is no folder {folder}"
        raise UsageError(
            f"{what}; needed: a local folder as save_pretrained writes it. elaswave downloads nothing: fetch a model "
            "with `hf download NAME --local-dir DIR` and give DIR"
        )
    try:
        described = read_json(path, most_bytes=_CONFIG_BYTES_MAX)
        model_type = str(described["model_type"])
        _check_values(described)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no configuration of transformers ({type(error).__name__}: {reason(error)}): bring the "
            "file again"
        ) from error
    if model_type not in FAMILIES:  # before transformers looks at it, which may not know it either
        raise unknown_architecture(model_type, str(path))
    from transformers import CONFIG_MAPPING

    try:  # of what was read and checked: from_pretrained would read again, and perhaps another file that this one names
        return CONFIG_MAPPING[model_type].from_dict(described)
    except Exception as error:  # of any kind: transformers checks the values itself
        raise UsageError(f"transformers cannot read {path}: {error}\nCorrect that value") from error


def _check_values(described: Any) -> None:
    """Refuses counts for each of which transformers would make something (layers, labels, experts), and texts that a
    terminal would obey: transformers prints some of them.

    Raises:
        ValueError: names the key.
    """
    for key, value in described.items():
        if isinstance(value, dict):
            _check_values(value)
        elif isinstance(value, int) and key.startswith(("num_", "n_")) and value > COUNT_MAX:
            raise ValueError(f"{key} is {value}, and at most {COUNT_MAX} are of any model")
        if visible(str(value)) != str(value):
            raise ValueError(f"{key} holds characters that a terminal would obey")


def _dtype(asked: Any, config: Any) -> torch.dtype:
    """Finds the type of parameters and activations.

    Raises:
        UsageError: none that can be trained.
    """
    found = asked if asked is not None else getattr(config, "dtype", None) or "float32"
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        where = "dtype is" if asked is not None else "the configuration says that the weights are"
        raise UsageError(
            f"{where} {name}, needed: {' or '.join(DTYPES)}; give dtype='float32' (4 bytes per parameter) or "
            "dtype='bfloat16'"
        )
    return DTYPES[name]


@dataclass(frozen=True)
class Build:
    """Builds one layer: reads its values, or draws them.

    Args:
        name: of the layer.
        config: of the model.
        dtype: of parameters.
        places: where the values of each parameter lie, in pieces one behind the other; None: they are drawn.
    """

    name: str
    config: Any
    dtype: torch.dtype
    places: Mapping[str, Sequence[StoredTensor]] | None

    def __call__(self) -> nn.Module:
        """Makes the module.

        Raises:
            UsageError: a file is gone, or has changed.
        """
        family = family_of(self.config)
        make = family.parts(family, self.config)[self.name]
        if torch.empty(0).device.type == "meta":
            module = make()
        elif self.places is None:
            module = make()
            module.apply(_initialiser(family, self.config))
        else:
            with _WithoutDraws():
                module = make()
            for name, parameter in module.named_parameters():
                parameter.data = _read(self.places[name], parameter.shape, self.dtype)
        for parameter in module.parameters():  # not module.to(): rotary tables stay in float32, as in transformers
            parameter.data = parameter.data.to(self.dtype)
        return module


def _read(places: Sequence[StoredTensor], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Reads the values of a parameter."""
    if len(places) == 1:
        return places[0].read().to(dtype).view(shape)
    return torch.cat([place.read().to(dtype).view(-1) for place in places]).view(shape)


class _WithoutDraws(TorchFunctionMode):
    """Leaves out initial values that are overwritten at once: they take longer than reading."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def _initialiser(family: Family, config: Any) -> Callable[[nn.Module], None]:
    """Makes what transformers calls for each module of a new model: its base class, without any layer, knows how."""
    base = family.kind("PreTrainedModel")(config)

    def initialise(module: nn.Module) -> None:
        with torch.no_grad():
            base._init_weights(module)

    return initialise


def _layers(
    family: Family, config: Any, dtype: torch.dtype, names: Sequence[str], stored: Mapping[str, StoredTensor] | None
) -> list[Layer]:
    """Makes the layers, with the places of their values.

    Raises:
        UsageError: the files lack tensors, have them in another shape, or have more of them.
    """
    ties = {"weight": family.embedding} if config.tie_word_embeddings else {}
    finder = None if stored is None else _Finder(family, stored)
    layers = []
    for name in names:
        build, tied = Build(name, config, dtype, None), ties if name == HEAD else {}
        module = _described(build)
        if finder is not None:
            places = {own: finder.find(tied.get(own, f"{name}.{own}"), each) for own, each in module.named_parameters()}
            build = Build(name, config, dtype, places)
        layers.append(Layer(name, build, ties=tied))
    if finder is not None:
        finder.finish({f"{HEAD}.weight"} if ties else set())
    return layers


def _described(build: Build) -> nn.Module:
    """Makes a layer without values.

    Raises:
        UsageError: transformers makes none from the configuration.
    """
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # of any kind: transformers looks values up where it uses them
        raise UsageError(
            f"transformers cannot make {build.name} of the configuration ({type(error).__name__}: {error}): correct "
            f"that value, in {CONFIG_FILE} if there is a folder"
        ) from error


class _Finder:
    """Finds parameters in files.

    Args:
        family: of the model.
        stored: what the files hold.
    """

    def __init__(self, family: Family, stored: Mapping[str, StoredTensor]) -> None:
        self._family, self._stored = family, stored
        self._used: set[str] = set()
        self._problems: list[str] = []

    def find(self, name: str, parameter: nn.Parameter) -> tuple[StoredTensor, ...]:
        """Finds where the values of a parameter lie; what is wrong is said at the end."""
        places = []
        for piece, shape in self._family.pieces(name, parameter.shape):
            # Files of the model without its head have no prefix.
            stored = piece if piece in self._stored else piece.removeprefix(self._family.base)
            place = self._stored.get(stored)
            self._used.add(stored)
            if place is None:
                self._problems.append(f"there is no {piece}")
            elif place.shape != shape:
                self._problems.append(f"{stored} has shape {list(place.shape)}, and {list(shape)} by {CONFIG_FILE}")
            elif place.dtype not in STORED_DTYPES:
                self._problems.append(f"{stored} is of type {place.dtype}, which is not one to be trained in")
            else:
                places.append(place)
        return tuple(places)

    def finish(self, known: set[str]) -> None:
        """Refuses files that do not fit.

        Args:
            known: names that may be there without being used.
        Raises:
            UsageError: names what is missing, other, or too much.
        """
        known |= self._used
        unused = [name for name in self._stored if name not in known and not name.endswith(_OLD_BUFFERS)]
        problems = self._problems + [f"no layer takes {name}" for name in unused]
        if problems:
            more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UsageError(
                f"the weights do not fit {self._family.causal}: {'; '.join(problems[:5])}{more}. Load the folder with "
                "from_pretrained, which says what it makes of them, and write it with save_pretrained"
            )


def _companions(folder: Path) -> dict[str, bytes]:
    """Reads the files of a tokenizer, and what else an export needs, by name.

    Raises:
        UsageError: one is a link to a file elsewhere, which the export would hold; or it cannot be read.
    """
    patterns = (*_COMPANIONS, *_COMPANION_PATTERNS)
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    found = {}
    for path in paths:
        if not stays_inside(path):
            raise UsageError(
                f"{path} is a link to {path.resolve()}, out of the folder, and an export would hold a copy of that: "
                "put the file itself there, or remove the link"
            )
        try:
            if path.stat().st_size <= _COMPANION_BYTES_MAX:
                found[path.name] = read_bytes(path, _COMPANION_BYTES_MAX)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {reason(error)}; bring the file again") from error
    return found


def _files(folder: Path | None, config: Any, family: Family, dtype: torch.dtype) -> dict[str, bytes]:
    """Makes what stands beside the weights in a folder that ``from_pretrained`` loads."""
    if folder is None:
        described = json.loads(config.to_json_string())
        found = {}
    else:
        described, found = read_json(folder / CONFIG_FILE, most_bytes=_CONFIG_BYTES_MAX), _companions(folder)
    described |= {"architectures": [family.causal], "dtype": str(dtype).removeprefix("torch."), "use_cache": True}
    described["tie_word_embeddings"] = bool(config.tie_word_embeddings)
    described.pop("torch_dtype", None)  # the name of dtype before transformers 5
    return found | {CONFIG_FILE: (json.dumps(described, indent=2) + "\n").encode()}
