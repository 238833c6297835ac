"""What a script gives, as texts: the same in each process, another one where something is computed otherwise."""

import functools
import os
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from elaswave.config.values import plain
from elaswave.models.admission import CopyOf
from elaswave.training.given import hash_of_code, options_given

SCALE = 2.0


def helper(value: float) -> float:
    return value * SCALE


def loss(value: float) -> float:
    return helper(value) + 1


class Block(nn.Module):
    def __init__(self, rate: float = 0.1, sizes: tuple[int, ...] = (3, 4)) -> None:
        super().__init__()
        self.inner, self.sizes = nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate)), set(sizes)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(value) if 3 in self.sizes else value
        return made


def weighted(weight: Any) -> Any:
    return lambda value: value * weight


def other_class() -> type:
    class Block2(Block):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(value)

    return Block2


SAME = {
    "function": (lambda: loss, lambda: loss),
    "values of tensors": (lambda: CopyOf(Block(), "a"), lambda: CopyOf(Block(), "a")),
    "numpy's numbers": (lambda: weighted(np.float64(0.5)), lambda: weighted(0.5)),
    "order of a set": (lambda: Block(sizes=(3, 4, 5)), lambda: Block(sizes=(5, 4, 3))),
    "mode": (lambda: Block().eval(), lambda: Block().train()),
}
OTHER = {
    "captured value": (lambda: weighted(0.5), lambda: weighted(0.25)),
    "setting deep inside": (lambda: CopyOf(Block(0.1), "a"), lambda: CopyOf(Block(0.2), "a")),
    "argument of a partial": (lambda: functools.partial(loss, 1.0), lambda: functools.partial(loss, 2.0)),
    "default": (lambda: lambda value, rate=1: rate, lambda: lambda value, rate=2: rate),
    "constant": (lambda: lambda value: value + 1, lambda: lambda value: value + 2),
    "inner function": (lambda: lambda v: (lambda: v + 1)(), lambda: lambda v: (lambda: v + 2)()),
    "class": (Block, lambda: other_class()()),
    "option of the loss": (nn.CrossEntropyLoss, lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "method": (lambda: Block(0.1).forward, lambda: Block(0.3).forward),
}


@pytest.mark.parametrize("case", [*SAME, *OTHER])
def test_what_computes_the_same_has_one_hash_and_what_does_not_another(case: str) -> None:
    one, other = (SAME | OTHER)[case]
    assert (hash_of_code(one()) == hash_of_code(other())) == (case in SAME)


def test_what_a_function_calls_in_its_own_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of_code(loss)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert hash_of_code(loss) != before
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "helper", lambda value: value)
    assert hash_of_code(loss) != before


def test_another_process_has_the_same_hash_whatever_its_hash_seed() -> None:
    code = f"from {__name__} import *; print(hash_of_code(loss), hash_of_code(CopyOf(Block(), 'a')))"
    root = str(Path(__file__).resolve().parents[3])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([root, *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert made == f"{hash_of_code(loss)} {hash_of_code(CopyOf(Block(), 'a'))}\n"


def test_objects_that_hold_themselves_and_empty_cells_are_described() -> None:
    holder: Any = Block()
    holder.me = [holder]
    assert hash_of_code(holder) == hash_of_code(holder)
    if holder is None:
        later = 1
    assert len(hash_of_code(lambda: later)) == 16


def test_options_of_optimizer_and_scheduler_have_their_values() -> None:
    def made(lr: float, decay: float) -> dict[str, str]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=lr)
        return options_given(optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: decay**step))

    then, now = made(0.5, 0.9), made(0.25, 0.9)
    assert then["optimizer.groups[0].lr"] == "0.5" and then["lr_scheduler"] == "LambdaLR"
    changed = {name for name in then if then[name] != now[name]}
    assert changed == {"optimizer.groups[0].lr", "optimizer.groups[0].initial_lr"}
    assert {name for name in then if then[name] != made(0.5, 0.8)[name]} == {"a function of lr_scheduler"}


def test_numpys_numbers_become_pythons() -> None:
    value = plain({"a": (np.float64(0.5), [np.int64(3), np.bool_(True)]), "b": "text"})
    assert value == {"a": (0.5, [3, True]), "b": "text"}
    assert plain((np.arange(2), 1)) == ([0, 1], 1)
    counted = plain(Counter(np.array([3, 3, 5])))
    assert type(counted) is Counter and [(type(key), counted[key]) for key in counted] == [(int, 2), (int, 1)]
    ordered = plain(OrderedDict([(np.str_("b"), np.int64(1)), ("a", 2)]))
    assert type(ordered) is OrderedDict and [type(part) for item in ordered.items() for part in item] == [str, int] * 2
    same = (1, [2.0, "a"])
    assert plain(same) is same
    assert [type(each) for each in (value["a"][0], *value["a"][1])] == [float, int, bool]
