"""The configuration of a script's own model: which keys the script decides itself, and which are without use.

A script gives layers, dataset and optimizer to ``elaswave.Trainer``. What they decide is no key of the configuration,
so such a key is refused wherever it is set; the few facts that the configuration keeps are written by the Trainer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

OWN = "own"
"""Value of ``model.family`` and ``optimizer.name`` for what a script brings."""
TOKENS_PER_S, SAMPLES_PER_S = "tokens/s", "samples/s"
"""Units of throughput: of the built-in models, and of a script's own, whose samples are not counted in tokens."""

_MODEL_KEYS = ("family", "num_layers", "dtype")
_SET_KEYS = ("fences", "fence_ratios", "cuts", "network", "foreign")
"""Kept as far as they say anything."""
_OPTIMIZER_KEYS = ("name", "grad_clip", "ema_decay")
_FREE_KEYS = ("optimizer.ema_decay", "model.fences", "model.fence_ratios")
"""Of those sections, what a person may set: the average is of weights, whichever optimizer makes them; and fences stand
between layers, whatever these are."""
_ADVICE = {
    "model.recompute": "give elaswave.Layer(..., recompute=True)",
    "model": "the model decides its sizes and types itself, and gets them as arguments of its layers",
    "data.validation_fraction": "give eval_dataset to the Trainer",
    "data": "the dataset is an argument of the Trainer",
    "optimizer.grad_clip": "give grad_clip to the Trainer",
    "optimizer": "the optimizer is an argument of the Trainer, and gets its settings there",
}


class OwnModel(NamedTuple):
    """What a configuration has to know of a script's model and optimizer."""

    layer_parameters: tuple[int, ...]
    """Number of parameters of each layer."""
    dtype: str
    """That the layers compute in: "float32" or "bfloat16"."""
    has_optimizer: bool
    """Whether the script brings an optimizer too."""
    grad_clip: float
    """With an optimizer: largest norm of the whole gradient; 0: off."""
    cuts: tuple[int, ...] = ()
    """Of a network that `elaswave.split` has cut."""
    network: str = ""
    """Fingerprint of that network."""
    foreign: tuple[str, ...] = ()
    """``LAYER: KIND`` of each foreign part."""

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """What the configuration says of it, by section and key."""
        model: dict[str, Any] = {"family": OWN, "num_layers": len(self.layer_parameters), "dtype": self.dtype}
        if self.network:
            model |= {"cuts": self.cuts, "network": self.network}
        if self.foreign:
            model["foreign"] = self.foreign
        optimizer = {"optimizer": {"name": OWN, "grad_clip": self.grad_clip}} if self.has_optimizer else {}
        return {"model": model, **optimizer}


def problems_with_own(own: OwnModel | None, values: Mapping[str, Any]) -> list[str]:
    """What a person sets although a script decides it, or sets as if there were a script.

    Args:
        own: what the script brings; None: there is no script.
        values: what is set, by section and key.
    """
    if own is None:
        return [
            f'{section}.{key}: "{OWN}" is for the model or optimizer of a script, which gives them to '
            "elaswave.Trainer; run it with: elaswave run SCRIPT.py"
            for section, key in (("model", "family"), ("optimizer", "name"))
            if isinstance(values.get(section), Mapping) and values[section].get(key) == OWN
        ]
    sections = ("model", "data", "optimizer") if own.has_optimizer else ("model", "data")
    return [
        f"{section}.{key}: not for a script's own {'dataset' if section == 'data' else section}; leave it out: "
        + _ADVICE.get(f"{section}.{key}", _ADVICE[section])
        for section in sections
        if isinstance(values.get(section), Mapping)
        for key in values[section]
        if f"{section}.{key}" not in _FREE_KEYS
    ]


def free_keys(section: str, table: Any) -> dict[str, Any]:
    """The keys of a section that a person may set also where a script decides the others."""
    return {
        key: value
        for key, value in (table.items() if isinstance(table, Mapping) else ())
        if f"{section}.{key}" in _FREE_KEYS
    }


def without_unused(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections without the keys that a script's own model, dataset or optimizer leaves without use.

    Args:
        sections: values by key, by section.
    """
    kept = {name: dict(section) for name, section in sections.items()}
    if kept["model"].get("family") == OWN:
        kept["model"] = {
            key: value for key, value in kept["model"].items() if key in _MODEL_KEYS or (key in _SET_KEYS and value)
        }
        kept["data"] = {}
    if kept["optimizer"].get("name") == OWN:
        kept["optimizer"] = {key: value for key, value in kept["optimizer"].items() if key in _OPTIMIZER_KEYS}
    return kept
