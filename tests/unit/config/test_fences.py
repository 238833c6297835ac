"""Fences in a configuration: how they are written, what is refused, and that they are part of the model."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from elaswave.config.cluster import emulated_costs
from elaswave.config.load import load_config
from elaswave.config.values import OwnModel
from elaswave.errors import ConfigError, RunFolderError
from elaswave.observability.run_folder import check_same_computation

OWN_MODEL = OwnModel((10, 10), "float32", has_optimizer=False, grad_clip=0.0)


def test_they_are_written_and_read_back(tmp_path: Path) -> None:
    config = load_config(None, ['model.fences=["block.0:int8","embedding:none"]'])
    assert config.model.fences == ("block.0:int8", "embedding:none")
    assert tomllib.loads(config.to_toml())["model"]["fences"] == ["block.0:int8", "embedding:none"]
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('["block.0:int7"]', r'model.fences: got \["block.0:int7"\], expected a list of values, each "LAYER:CODEC", a '
         "layer's name and one of none, bf16, int8, int4, topkR"),
        ('["block.0:int8\\n"]', "model.fences: got .* expected a list of values"),
        ('["block.0:topk1"]', "model.fences: got .* expected a list of values"),
        ('"block.0:int8"', "model.fences: got .* expected a list of values"),
        ('["block.4:int8"]', 'model.fences: "block.4:int8": the model has no layer block.4'),
        ('["head:int8"]', 'model.fences: "head:int8": head is the last layer'),
        ('["block.1:int8","block.1:int4"]', "a boundary has one fence"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"model.fences={given}"])


def test_a_scripts_own_model_has_them_too_and_keeps_them_over_a_resume() -> None:
    config = load_config(None, ['model.fences=["0:int4"]'], own=OWN_MODEL)
    assert config.to_dict()["model"]["fences"] == ("0:int4",)
    assert load_config(base=config, own=OWN_MODEL).model.fences == ("0:int4",)
    assert "fences" not in load_config(own=OWN_MODEL).to_dict()["model"]


def test_a_resume_with_other_fences_is_refused_with_both_sides(tmp_path: Path) -> None:
    first, other = (load_config(None, [f"model.fences={fences}"]) for fences in ('["block.0:int8"]', "[]"))
    there = msgspec.json.decode(msgspec.json.encode(first.to_dict()))
    with pytest.raises(RunFolderError, match=r'model.fences is \["block.0:int8"\] there and \[\] here'):
        check_same_computation(there, other, tmp_path)
    check_same_computation(there, first, tmp_path)


def test_emulated_devices_plan_with_the_smaller_bytes() -> None:
    settings = ["device.kind=emulated", "device.model=gpt2-small", "model.num_layers=12"]
    plain, fenced = (
        emulated_costs(load_config(None, [*settings, f"model.fences={fences}"]))
        for fences in ("[]", '["block.3:int4"]')
    )
    ratio = fenced.layers[4].boundary_bytes / plain.layers[4].boundary_bytes
    assert ratio == pytest.approx(4.25 / 16, rel=1e-4)
    assert fenced.layers[3] == plain.layers[3]


def test_fences_and_foreign_parts_are_refused_on_gpus_and_not_on_the_loopback_device() -> None:
    for settings, what in (
        (['model.fences=["block.0:int8"]'], "fences"),
        (["model.family=own", 'model.foreign=["part: numpy"]'], "foreign parts"),
    ):
        with pytest.raises(ConfigError, match=f"device.kind: {what} compute in host memory only, not on a GPU"):
            load_config(None, [*settings, "device.kind=cuda"])
    load_config(None, ['model.fences=["block.0:int8"]', "device.kind=loopback"])
