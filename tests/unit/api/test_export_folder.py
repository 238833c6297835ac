"""A run's weights as a folder for transformers: a round trip changes no bit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tests.hugging_face import CONFIGS, config_of, original, save, save_tokenizer
from tests.unit.api.test_export import GPT_CONFIG, LLAMA_CONFIG, LLAMA_SIZES, SIZES, build, weights_of
from tests.unit.api.test_export import save as save_checkpoint

import elaswave
from elaswave.api.export import ExportSummary, Weights, export_folder, initial_weights
from elaswave.cli.export import export_command
from elaswave.errors import UsageError
from elaswave.models.gpt import gpt
from elaswave.models.layers import ModelSpec
from elaswave.models.llama import llama
from elaswave.observability.run_folder import huggingface_files, keep_huggingface


def round_trip(folder: Path, output: Path, fences: tuple[str, ...] = ()) -> ExportSummary:
    """In through `elaswave.hf`, and out."""
    layers = elaswave.hf(folder)
    model = {"family": "own", "fences": fences}
    weights = initial_weights(ModelSpec(tuple(layers), layers.loss), 1, {"model": model})
    keep_huggingface(output.parent, layers.files)
    return export_folder(output.parent, huggingface_files(output.parent), output, weights=weights)


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value.view(torch.uint8), other[name].view(torch.uint8))
        for name, value in one.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_trip_changes_no_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = original(config_of(family, dtype=dtype)).to(dtype)
    source = save(model, tmp_path / "source")
    save_tokenizer(source, "to be or not to be")
    (tmp_path / "run").mkdir()
    summary = round_trip(source, tmp_path / "run" / "out")
    assert summary.notes == ()
    assert same_bits(load_file(source / "model.safetensors"), load_file(summary.output))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "out")
    assert loaded.dtype == dtype and loaded.config.use_cache
    assert same_bits(model.state_dict(), loaded.state_dict())
    is_tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert is_tied == model.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "out").encode("to be") == (
        AutoTokenizer.from_pretrained(source).encode("to be")
    )


@pytest.mark.parametrize("config", [GPT_CONFIG, dict(LLAMA_CONFIG, dropout=0.1)], ids=["gpt", "llama"])
def test_the_built_in_models_say_what_is_left_out(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    is_llama = config["family"] == "llama"
    weights = weights_of(build(llama(vocab_size=40, **LLAMA_SIZES) if is_llama else gpt(vocab_size=40, **SIZES)))
    save_checkpoint(tmp_path, 2, weights, config)
    result = CliRunner().invoke(export_command, [str(tmp_path), "--format", "hf"], catch_exceptions=False)
    assert ("dropout 0.1 is left out" in result.stdout) == is_llama and "no tokenizer" in result.stdout
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert torch.equal(state["lm_head.weight"], weights["head.output.weight"])


def test_a_run_of_a_script_is_refused(tmp_path: Path) -> None:
    weights = Weights(1, {"model": {"family": "own"}}, "0", {"0.weight": torch.ones(2)})
    with pytest.raises(UsageError, match="trained a script's own model, which is none of transformers"):
        export_folder(tmp_path, {}, tmp_path / "out", weights=weights)


def test_somebody_elses_model_is_not_overwritten(tmp_path: Path) -> None:
    source = save(original(config_of("llama")), tmp_path / "source")
    (tmp_path / "run").mkdir()
    before = (source / "model.safetensors").read_bytes()
    layers = elaswave.hf(source)
    weights = initial_weights(ModelSpec(tuple(layers), layers.loss), 1, {})
    with pytest.raises(UsageError, match="holds config.json, which elaswave has not written"):
        export_folder(tmp_path / "run", layers.files, source, weights=weights)
    assert (source / "model.safetensors").read_bytes() == before
    for _ in range(2):  # its own is replaced
        summary = round_trip(source, tmp_path / "run" / "out", ("a:int8", "b:none"))
    assert summary.notes == (
        "no tokenizer: the folder that was trained from had none",
        "the model was trained with the fences a:int8, which transformers leaves out",
    )
    with pytest.raises(UsageError, match="there is no folder"):
        export_folder(tmp_path / "run", layers.files, tmp_path / "nowhere" / "out", weights=weights)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        export_folder(tmp_path / "run", layers.files, tmp_path / "file", weights=weights)


def test_options_of_the_command_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave it out with --format hf"):
        CliRunner().invoke(export_command, [str(tmp_path), "--format", "hf", "--own-names"], catch_exceptions=False)
    with pytest.raises(UsageError, match="is a folder; name a file in it, or add --format hf"):
        CliRunner().invoke(export_command, [str(tmp_path), "--output", str(tmp_path)], catch_exceptions=False)


def test_weights_of_other_shards_are_exported_too(tmp_path: Path) -> None:
    source = save(original(config_of("qwen3_moe")), tmp_path / "source", max_shard_size="10KB")
    (tmp_path / "run").mkdir()
    summary = round_trip(source, tmp_path / "run" / "out")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert load_file(summary.output).keys() == index.keys()
