"""Export: the newest checkpoint's weights, whole and named, as other programs load them."""

import builtins
import json
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from elaswave.api.export import export_safetensors
from elaswave.checkpoints.checkpoint import CheckpointRef, shard_folder
from elaswave.checkpoints.commit import commit_checkpoint
from elaswave.checkpoints.format import CheckpointMeta, TensorInfo, model_name, optimizer_name
from elaswave.checkpoints.shards import Piece, write_shard
from elaswave.cli.export import export_command
from elaswave.config.load import load_config
from elaswave.errors import CheckpointError, RunFolderError, UsageError
from elaswave.models.gpt import gpt
from elaswave.models.gpt import gpt2_name as gpt_name
from elaswave.models.layers import ModelSpec, build_layer
from elaswave.models.llama import huggingface_llama_name, llama
from elaswave.observability.run_folder import open_run_dir

load_file = pytest.importorskip("safetensors.torch").load_file
safe_open = pytest.importorskip("safetensors").safe_open

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "context_length": 16, "dropout": 0.0}
LLAMA_SIZES: dict[str, Any] = {**SIZES, "num_kv_heads": 2, "intermediate_size": 48, "rope_theta": 5000.0}


def build(model: ModelSpec) -> dict[str, torch.nn.Module]:
    return {spec.name: build_layer(spec, 7, index) for index, spec in enumerate(model.layers)}


def weights_of(modules: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.{name}": parameter.detach()
        for layer, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def save(
    run_dir: Path, step: int, weights: dict[str, torch.Tensor], config: dict[str, Any], *, is_old: bool = False
) -> CheckpointRef:
    """A checkpoint by two workers, each with half of every tensor."""
    state = {model_name(name): weight for name, weight in weights.items()}
    state |= {optimizer_name("exp_avg", name): torch.zeros_like(weight) for name, weight in weights.items()}
    folder = shard_folder(run_dir, step)
    items = []
    for worker in range(2):
        pieces = []
        for fqn, tensor in state.items():
            flat = tensor.reshape(-1)
            half = len(flat) // 2 + 3
            values = flat[half:] if worker else flat[:half]
            pieces.append(Piece(fqn, tuple(tensor.shape), half * worker, values))
        items += write_shard(folder, f"worker-{worker}", pieces)
    meta = CheckpointMeta(
        step=step,
        losses=[1.0] * step,
        grids={},
        seed=7,
        data_cursor=(0, 0),
        config={"model": config} if is_old else {"format": 2, "model": config},
        tensors={fqn: TensorInfo(tuple(tensor.shape)) for fqn, tensor in state.items()},
        elaswave_version="0.1.0",
    )
    return commit_checkpoint(folder, items, meta)


@pytest.fixture(scope="module")
def gpt_weights() -> dict[str, torch.Tensor]:
    return weights_of(build(gpt(vocab_size=40, **SIZES)))


GPT_CONFIG = {"family": "gpt", **SIZES}
LLAMA_CONFIG = {"family": "llama", **LLAMA_SIZES}


def test_a_gpt_can_keep_its_own_names(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    ref = save(tmp_path, 3, gpt_weights, GPT_CONFIG)
    summary = export_safetensors(tmp_path, own_names=True)
    output = tmp_path / "export" / "model.safetensors"
    assert (summary.output, summary.config_file, summary.checkpoint) == (str(output), None, str(ref.folder))
    loaded = load_file(output)
    assert loaded.keys() == gpt_weights.keys() and summary.num_tensors == len(loaded)
    assert all(torch.equal(loaded[name], weight) for name, weight in gpt_weights.items())
    assert summary.num_parameters == sum(weight.numel() for weight in gpt_weights.values())
    assert summary.num_bytes == output.stat().st_size
    assert [path.name for path in output.parent.iterdir()] == ["model.safetensors"]


def test_the_file_tells_where_it_comes_from(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    save(tmp_path, 3, gpt_weights, GPT_CONFIG)
    with safe_open(export_safetensors(tmp_path).output, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata.pop("config")) == {"format": 2, "model": GPT_CONFIG}
    assert metadata == {"format": "pt", "step": "3", "elaswave_version": "0.1.0"}


def test_plain_pytorch_loads_it_into_the_layers(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    save(tmp_path, 3, gpt_weights, GPT_CONFIG)
    modules = {spec.name: spec.build() for spec in gpt(vocab_size=40, **SIZES).layers}
    loaded = load_file(export_safetensors(tmp_path, own_names=True).output)
    for layer, module in modules.items():
        own = {name.removeprefix(f"{layer}."): t for name, t in loaded.items() if name.startswith(f"{layer}.")}
        module.load_state_dict(own)


def test_a_gpt_gets_the_names_and_shapes_of_gpt_2(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    save(tmp_path, 3, gpt_weights, GPT_CONFIG)
    summary = export_safetensors(tmp_path)
    loaded = load_file(summary.output)
    assert len(loaded) == len(gpt_weights)
    for own, theirs, transposed in [
        ("embedding.token.weight", "transformer.wte.weight", False),
        ("embedding.position.weight", "transformer.wpe.weight", False),
        ("block.1.attention_norm.bias", "transformer.h.1.ln_1.bias", False),
        ("block.1.attention.qkv.weight", "transformer.h.1.attn.c_attn.weight", True),
        ("block.1.attention.qkv.bias", "transformer.h.1.attn.c_attn.bias", False),
        ("block.0.attention.output.weight", "transformer.h.0.attn.c_proj.weight", True),
        ("block.0.mlp.up.weight", "transformer.h.0.mlp.c_fc.weight", True),
        ("block.0.mlp.down.weight", "transformer.h.0.mlp.c_proj.weight", True),
        ("head.norm.weight", "transformer.ln_f.weight", False),
        ("head.output.weight", "lm_head.weight", False),
    ]:
        assert torch.equal(loaded[theirs], gpt_weights[own].t() if transposed else gpt_weights[own])
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    expected = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 40,
                "activation_function": "gelu", "tie_word_embeddings": False}  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    for wrong in ("block.0.attention.qkv", "block.x.mlp.up.weight", "head.output.scale", "tail.weight"):
        with pytest.raises(ValueError, match="no parameter of a GPT is named"):
            gpt_name(wrong)


def test_the_initial_weights_can_be_exported(tmp_path: Path) -> None:
    config = load_config(None, ["model.num_layers=2", "model.hidden_size=32", "run.seed=7"])
    with open_run_dir(tmp_path / "run", config, now=datetime(2026, 11, 20, tzinfo=UTC)):
        pass
    arguments = [str(tmp_path / "run"), "--step", "0", "--own-names", "--json"]
    result = CliRunner().invoke(export_command, arguments, catch_exceptions=False)
    document = json.loads(result.stdout)
    assert (document["step"], document["checkpoint"], document["config_file"]) == (0, None, None)
    expected = weights_of(
        build(
            gpt(
                vocab_size=256,
                num_layers=2,
                hidden_size=32,
                num_heads=config.model.num_heads,
                context_length=config.model.context_length,
                dropout=config.model.dropout,
            )
        )
    )
    loaded = load_file(document["output"])
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def test_the_checkpoint_of_a_step_can_be_exported(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    for step in (1, 2):
        save(tmp_path, step, {name: weight + step for name, weight in gpt_weights.items()}, GPT_CONFIG)
    result = CliRunner().invoke(export_command, [str(tmp_path), "--step", "1"], catch_exceptions=False)
    assert "as of step 1" in result.stdout
    loaded = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(loaded["lm_head.weight"], gpt_weights["head.output.weight"] + 1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are those of steps 1, 2"):
        CliRunner().invoke(export_command, [str(tmp_path), "--step", "3"], catch_exceptions=False)


def test_a_llama_gets_hugging_faces_names_and_configuration(tmp_path: Path) -> None:
    weights = weights_of(build(llama(vocab_size=40, **LLAMA_SIZES)))
    save(tmp_path, 2, weights, LLAMA_CONFIG)
    summary = export_safetensors(tmp_path)
    loaded = load_file(summary.output)
    assert loaded.keys() == {huggingface_llama_name(name) for name in weights}
    assert all(torch.equal(loaded[huggingface_llama_name(name)], weight) for name, weight in weights.items())
    assert summary.config_file == str(tmp_path / "export" / "config.json")
    config = json.loads(Path(summary.config_file).read_text())
    expected = {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 16,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_a_checkpoint_of_before_there_was_a_format_is_refused_by_name(tmp_path: Path) -> None:
    """Its keys had other names: read as today's, its sizes would be others."""
    weights = weights_of(build(llama(vocab_size=40, **LLAMA_SIZES)))
    save(tmp_path, 2, weights, LLAMA_CONFIG, is_old=True)
    with pytest.raises(
        CheckpointError, match="meta.json: format: missing: an older version of elaswave has saved this"
    ):
        export_safetensors(tmp_path)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_transformers_computes_the_same_logits(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = LLAMA_SIZES if family == "llama" else SIZES
    modules = build({"llama": llama, "gpt": gpt}[family](vocab_size=40, **sizes))
    weights = weights_of(modules)
    generator = torch.Generator().manual_seed(1)
    for weight in weights.values():  # zero biases and unit norms would hide that they are mixed up
        weight += 0.1 * torch.randn(weight.shape, generator=generator)
    save(tmp_path, 2, weights, {"family": family, **sizes})
    export_safetensors(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager").eval()
    tokens = torch.randint(40, (4, 16), generator=torch.Generator().manual_seed(0))
    activations = tokens
    with torch.no_grad():
        for module in modules.values():
            activations = module.eval()(activations)
        torch.testing.assert_close(theirs(tokens).logits, activations, rtol=1e-5, atol=1e-5)


def test_a_config_json_of_another_origin_is_left_alone(tmp_path: Path) -> None:
    weights = weights_of(build(llama(vocab_size=40, **LLAMA_SIZES)))
    save(tmp_path, 2, weights, LLAMA_CONFIG)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for content in ('{"mine": 1}', "no JSON", "3"):
        (folder / "config.json").write_text(content)
        assert export_safetensors(tmp_path, folder / "w.safetensors").config_file is None
        assert (folder / "config.json").read_text() == content
    (folder / "config.json").unlink()
    for _ in range(2):  # its own is replaced
        assert export_safetensors(tmp_path, folder / "w.safetensors").config_file == str(folder / "config.json")


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    tmp_path: Path, gpt_weights: dict[str, torch.Tensor]
) -> None:
    save(tmp_path, 1, gpt_weights, GPT_CONFIG)
    newer = save(tmp_path, 2, {name: weight + 1 for name, weight in gpt_weights.items()}, GPT_CONFIG)
    shard = newer.folder / "worker-1.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 16
    shard.write_bytes(data)
    summary = export_safetensors(tmp_path)
    assert summary.step == 1 and [skipped.folder for skipped in summary.skipped] == [newer.folder]
    assert torch.equal(load_file(summary.output)["lm_head.weight"], gpt_weights["head.output.weight"])


def test_a_run_without_a_valid_checkpoint_is_an_error(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CheckpointError, match="no valid checkpoint to export; a run writes one at its end"):
        export_safetensors(tmp_path)
    ref = save(tmp_path, 1, gpt_weights, GPT_CONFIG)
    (ref.folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be used:\n  step-00000001: cannot read .*\.metadata"):
        export_safetensors(tmp_path)


def test_an_output_that_cannot_be_written_is_bad_input(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    save(tmp_path, 1, gpt_weights, GPT_CONFIG)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for output in ("file/w.safetensors", "folder", "x" * 300, "none/w.safetensors"):
        with pytest.raises(UsageError, match=r"cannot write (.|\n)*choose another --output"):
            export_safetensors(tmp_path, tmp_path / output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "file", "folder"]


def test_an_error_of_the_library_is_bad_input_too(
    tmp_path: Path, gpt_weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors
    import safetensors.torch

    def fail(*_: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    save(tmp_path, 1, gpt_weights, GPT_CONFIG)
    with pytest.raises(UsageError, match="No space left on device; choose another --output"):
        export_safetensors(tmp_path)
    assert list((tmp_path / "export").iterdir()) == []


def test_an_earlier_file_is_replaced_and_readable_by_all(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    save(tmp_path, 1, gpt_weights, GPT_CONFIG)
    output = tmp_path / "w.safetensors"
    output.write_text("earlier")
    (tmp_path / "plain").touch()
    export_safetensors(tmp_path, output)
    assert len(load_file(output)) == len(gpt_weights)
    assert stat.S_IMODE(output.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_safetensors(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_safetensors)
    for name in [name for name in sys.modules if name.startswith("safetensors")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"pip install safetensors"):
        export_safetensors(tmp_path)


# The command


def test_the_command_prints_one_json_document(tmp_path: Path, gpt_weights: dict[str, torch.Tensor]) -> None:
    ref = save(tmp_path, 1, gpt_weights, GPT_CONFIG)
    damaged = save(tmp_path, 2, gpt_weights, GPT_CONFIG)
    (damaged.folder / "meta.json").unlink()
    output = tmp_path / "w.safetensors"
    args = [str(tmp_path), "--format", "safetensors", "--output", str(output), "--json"]
    result = CliRunner().invoke(export_command, args, catch_exceptions=False)
    assert result.exit_code == 0 and "skipped step-00000002" in result.stderr
    document = json.loads(result.stdout)
    assert (document["output"], document["step"], document["checkpoint"]) == (str(output), 1, str(ref.folder))
    assert document["skipped"][0]["folder"] == str(damaged.folder)


def test_the_command_says_what_it_has_written(tmp_path: Path) -> None:
    weights = weights_of(build(llama(vocab_size=40, **LLAMA_SIZES)))
    save(tmp_path, 1, weights, LLAMA_CONFIG)
    result = CliRunner().invoke(export_command, [str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"{tmp_path}/export/model.safetensors: {len(weights)} tensors" in result.stdout
    assert "as of step 1" in result.stdout and "config.json: configuration for transformers" in result.stdout


def test_the_command_refuses_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run folder"):
        CliRunner().invoke(export_command, [str(tmp_path / "nowhere")], catch_exceptions=False)
    assert CliRunner().invoke(export_command, [str(tmp_path), "--format", "pickle"]).exit_code == 2
