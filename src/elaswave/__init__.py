"""elaswave: elastic training of PyTorch models that computes the same bits whatever happens to its machines."""

import importlib
from typing import TYPE_CHECKING, Any

from elaswave._version import __version__

if TYPE_CHECKING:
    from elaswave.api.result import Result
    from elaswave.api.trainer import Trainer
    from elaswave.data.samples import sample_order
    from elaswave.models.foreign.layer import Foreign
    from elaswave.models.huggingface.model import hf
    from elaswave.models.layers import Layer, LossOutput, aux_loss, batch
    from elaswave.models.splitting.graph import OperatorGraph
    from elaswave.models.splitting.split import operator_graph, split

__all__ = [
    "Foreign",
    "Layer",
    "LossOutput",
    "OperatorGraph",
    "Result",
    "Trainer",
    "__version__",
    "aux_loss",
    "batch",
    "hf",
    "operator_graph",
    "sample_order",
    "split",
]

_PLACES = {
    "Foreign": "elaswave.models.foreign.layer",
    "Layer": "elaswave.models.layers",
    "LossOutput": "elaswave.models.layers",
    "OperatorGraph": "elaswave.models.splitting.graph",
    "Result": "elaswave.api.result",
    "Trainer": "elaswave.api.trainer",
    "aux_loss": "elaswave.models.layers",
    "batch": "elaswave.models.layers",
    "hf": "elaswave.models.huggingface.model",
    "operator_graph": "elaswave.models.splitting.split",
    "sample_order": "elaswave.data.samples",
    "split": "elaswave.models.splitting.split",
}
"""Where each public name stands; imported when it is asked for, since most need torch."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
