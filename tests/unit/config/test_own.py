"""The configuration of a script's own model: what it says, what it refuses, and how it is read back."""

from pathlib import Path

import pytest

from elaswave.config.cluster import estimated_costs
from elaswave.config.load import load_config
from elaswave.config.values import OWN, OwnModel
from elaswave.errors import ConfigError
from elaswave.launcher.resources import least_memory

MODEL = OwnModel((1000, 0, 500, 500), "bfloat16", has_optimizer=False, grad_clip=0.0)
WITH_OPTIMIZER = MODEL._replace(has_optimizer=True, grad_clip=0.5)


def test_it_says_how_many_layers_there_are_and_their_type_and_reads_back(tmp_path: Path) -> None:
    config = load_config(None, ["run.steps=9"], 3, settings={"run": {"steps": 5}, "run.seed": 4}, own=MODEL)
    assert (config.run.steps, config.run.seed, config.widths) == (9, 4, (3,))
    document = config.to_dict()
    assert document["model"] == {"family": OWN, "num_layers": 4, "dtype": "bfloat16"}
    assert document["data"] == {} and document["optimizer"]["name"] == "adamw"
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml", is_saved=True) == config
    with pytest.raises(ConfigError, match=r'model\.family: "own" is for the model or optimizer of a script'):
        load_config(tmp_path / "config.toml")


def test_an_optimizer_of_the_scripts_own_leaves_its_section_to_it() -> None:
    config = load_config(own=WITH_OPTIMIZER)
    assert config.to_dict()["optimizer"] == {"name": OWN, "grad_clip": 0.5, "ema_decay": 0.0}
    with pytest.raises(ConfigError, match=r"optimizer\.grad_clip: not for .* leave it out: give grad_clip to"):
        load_config(None, ["optimizer.grad_clip=1"], own=WITH_OPTIMIZER)
    resumed = load_config(base=config, own=MODEL)
    assert resumed.optimizer.name == "adamw", "the script gives none any more"


def test_layers_are_taken_to_cost_as_much_as_they_have_parameters() -> None:
    config = load_config(None, ["layout.widths=[1,1]"], own=MODEL)
    assert config.layers_per_stage == (1, 3)
    assert load_config(None, ["layout.widths=[1,1]"], own=MODEL._replace(layer_parameters=(1, 1, 1, 900))
                       ).layers_per_stage == (3, 1)  # fmt: skip
    times = [layer.forward_s for layer in estimated_costs(config, MODEL.layer_parameters).layers]
    assert times == pytest.approx([1e-6, 1e-9, 5e-7, 5e-7])


def test_its_memory_is_that_of_its_parameters() -> None:
    config = load_config(None, ["layout.widths=[2]", "elastic.num_followers=0"], own=MODEL)
    memory = least_memory(config, MODEL.layer_parameters)
    assert (memory.num_parameters, memory.parameters, memory.sums) == (2000, 4000, 16000)
    assert memory.activations == 0 and memory.optimizer == 2000 * 12 / 2
