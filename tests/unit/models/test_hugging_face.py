"""transformers' models as layers: logits of the original, bytes that are read, what is refused and how."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hugging_face import CONFIGS, VOCABULARY, WIDTH, call, config_of, edit_json, original, save, tokens

import elaswave
from elaswave.errors import UsageError
from elaswave.models.huggingface import stored
from elaswave.models.layers import Call, build_layer, inside


@pytest.fixture(scope="module", params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return original(config_of(family))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp(model.config.model_type))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(original(config_of("llama")), tmp_path_factory.mktemp("llama"))


def test_logits_and_loss_are_those_of_the_original(model: Any, folder: Path) -> None:
    layers, input_ids = elaswave.hf(folder), tokens(2)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for inputs in (
        {"input_ids": input_ids},
        {"input_ids": input_ids, "attention_mask": mask},
        {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions},
    ):
        out = model(**inputs, labels=input_ids)
        logits = call(layers, inputs)
        torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-5)
        loss = layers.loss(logits, input_ids)
        assert loss.count == 2 * 11
        torch.testing.assert_close(loss.total / loss.count, out.loss, rtol=1e-6, atol=0)
    assert torch.equal(call(layers, input_ids), call(layers, {"input_ids": input_ids}))


def test_the_other_kernel_is_that_of_the_original_too(model: Any, folder: Path) -> None:
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    inputs = {"input_ids": tokens(2), "attention_mask": mask}
    model.set_attn_implementation("eager")
    try:
        logits = model(**inputs).logits
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(call(elaswave.hf(folder, attn="eager"), inputs)[1, 5:], logits[1, 5:], rtol=0, atol=1e-5)


def test_tensors_have_the_names_of_the_original(model: Any, folder: Path) -> None:
    state = {
        f"{layer.name}.{name}": value
        for layer in elaswave.hf(folder)
        for name, value in layer.build().state_dict().items()
    }
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_new_weights_are_drawn_as_the_original_draws_them(family: str) -> None:
    config = config_of(family, initializer_range=0.5)
    layers = elaswave.hf(config)
    ours = {
        f"{layer.name}.{name}": value
        for index, layer in enumerate(layers)
        for name, value in build_layer(layer, 1, index).named_parameters()
    }
    for name, theirs in original(config).named_parameters():
        if theirs.dim() > 1:
            assert float(ours[name].detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.5), name
    assert all(
        torch.equal(ours[name], torch.ones(WIDTH))
        for name in ours
        if name.endswith(("ln_f.weight", "model.norm.weight"))
    )
    again = build_layer(layers[2], 1, 2).state_dict()
    assert all(torch.equal(value, ours[f"{layers[2].name}.{name}"]) for name, value in again.items())


class Counted:
    """Every range that is read of a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        preadv = os.preadv

        def counting(descriptor: int, buffers: Any, offset: int) -> int:
            count = preadv(descriptor, buffers, offset)
            self.ranges.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, offset, offset + count))
            return count

        monkeypatch.setattr(os, "preadv", counting)


def extents(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Where each tensor lies, by the files' own headers."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for name, each in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = each["data_offsets"]
                found[name] = (path.name, 8 + length + start, 8 + length + stop)
    return found


@pytest.mark.parametrize("size", ["20KB", "1GB"], ids=["sharded", "one file"])
def test_a_stage_reads_its_own_bytes_only(
    size: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model, tmp_path, max_shard_size=size)
    assert (tmp_path / stored.INDEX).exists() == (size == "20KB")
    layers, where = elaswave.hf(tmp_path), extents(tmp_path)
    mine = layers[1:3]
    counted = Counted(monkeypatch)
    for layer in mine:
        layer.build()
    wanted = [
        place
        for name, place in where.items()
        if any(name.replace("block_sparse_moe", "mlp").startswith(f"{layer.name}.") for layer in mine)
    ]
    assert sorted(counted.ranges) == sorted(wanted)
    read = sum(stop - start for _, start, stop in counted.ranges)
    assert 0 < read == 4 * sum(each.numel() for layer in mine for each in layer.build().parameters())


def test_no_weight_is_read_before_a_layer_is_built(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    layers = pickle.loads(pickle.dumps(elaswave.hf(llama)))
    with torch.device("meta"):
        for layer in layers:
            layer.build()
    assert counted.ranges == []


def test_rotary_tables_are_of_the_configuration() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8}  # fmt: skip
    model = original(config_of("llama", rope_parameters=scaled))
    built = elaswave.hf(model.config)[1].build().rotary_emb.inv_freq
    assert torch.equal(built, model.model.rotary_emb.inv_freq) and built.count_nonzero() == len(built)


def test_a_checkpoint_of_the_model_without_its_head(tmp_path: Path) -> None:
    """As the first GPT-2 was published: no prefix, and masks as buffers."""
    from safetensors.torch import save_file

    model = original(config_of("gpt2"))
    save(model, tmp_path)
    state = {
        name.removeprefix("transformer."): value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    state["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(call(elaswave.hf(tmp_path), tokens(2)), model(tokens(2)).logits, rtol=0, atol=1e-5)


def test_bfloat16_is_of_parameters_and_not_of_rotary_tables(llama: Path) -> None:
    layers = elaswave.hf(llama, dtype="bfloat16")
    block = layers[1].build()
    assert {each.dtype for each in block.parameters()} == {torch.bfloat16}
    assert block.rotary_emb.inv_freq.dtype == torch.float32
    assert layers.dtype == torch.bfloat16 and json.loads(layers.files["config.json"])["dtype"] == "bfloat16"
    assert elaswave.hf(config_of("llama", dtype="bfloat16")).dtype == torch.bfloat16
    assert elaswave.hf(llama, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_routers_balance_is_that_of_the_original(family: str, masked: bool) -> None:
    """Over all blocks, one of which has no router."""
    model = original(config_of(family, output_router_logits=True, router_aux_loss_coef=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter.mul_(3)
    layers, inputs = elaswave.hf(model.config), {"input_ids": tokens(2)}
    if masked:
        inputs["attention_mask"] = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    modules = [layer.build() for layer in layers]
    for layer, module in zip(layers, modules, strict=True):
        module.load_state_dict({name: model.state_dict()[f"{layer.name}.{name}"] for name in module.state_dict()})
    value: Any = inputs
    told = Call(lambda: inputs)
    with inside(told):
        for module in modules:
            value = module(value)
    out = model(**inputs)
    torch.testing.assert_close(value, out.logits, rtol=0, atol=1e-5)
    (aux,) = told.aux_losses
    torch.testing.assert_close(aux, 0.5 * out.aux_loss, rtol=1e-6, atol=0)
    aux.backward()
    (0.5 * out.aux_loss).backward()
    (gate,) = [name for name, _ in modules[1].named_parameters() if name.endswith("gate.weight")]
    theirs = model.get_parameter(f"model.layers.0.{gate}").grad
    assert theirs.abs().max() > 0
    torch.testing.assert_close(modules[1].get_parameter(gate).grad, theirs, rtol=1e-4, atol=1e-7)


def test_a_tied_head_is_one_tensor_with_the_table() -> None:
    (head,) = [layer for layer in elaswave.hf(config_of("gpt2")) if layer.ties]
    assert head.name == "lm_head" and head.ties == {"weight": "transformer.wte.weight"}


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_stored_head_that_is_not_the_table_is_kept(name: str, tmp_path: Path) -> None:
    """A configuration may say that both are tied and the files that they are not: then transformers ties nothing."""
    from safetensors.torch import load_file, save_file

    model = original(config_of(name, tie_word_embeddings=True))
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same = elaswave.hf(tmp_path)  # equal values: they are tied, without a word
    assert [dict(layer.ties) for layer in same if layer.ties] == [{"weight": model_table(name)}]

    state["lm_head.weight"][-1, -1] += 1.0
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"holds a head \(lm_head\.weight\) with other values than the token table"):
        layers = elaswave.hf(tmp_path)
    assert not any(layer.ties for layer in layers)
    assert json.loads(layers.files["config.json"])["tie_word_embeddings"] is False, "an export is loaded alike"
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert not torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)
    torch.testing.assert_close(call(layers, tokens(2)), theirs(tokens(2)).logits, rtol=0, atol=1e-5)


def model_table(name: str) -> str:
    return "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"


def refused(source: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        elaswave.hf(source, **options)
    return str(caught.value)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    from transformers import T5Config

    for source in (T5Config(), tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
        message = refused(source)
        assert "'t5'" in message and "gpt2, llama" in message and "docs/own-models/huggingface.md" in message


def test_a_model_for_another_task_is_named(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "a LlamaForSequenceClassification, needed: LlamaForCausalLM" in refused(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"bits": 4}}, "quantized weights (quantization_config)"),
        ({"transformers_weights": "adapted.safetensors"}, "of another file than model.safetensors"),
        ({"dtype": "float16"}, "the weights are float16, needed: float32 or bfloat16"),
        ({"num_hidden_layers": 4}, "there is no model.layers.3."),
        ({"num_hidden_layers": 2}, "no layer takes model.layers.2."),
        ({"intermediate_size": 41}, "has shape [40, 16], and [41, 16] by config.json"),
        ({"hidden_act": "zilu"}, "cannot make model.layers.0 of the configuration (KeyError: 'zilu'): correct that"),
    ],
)
def test_configurations_that_do_not_fit(changes: dict[str, Any], said: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", **changes)
    assert said in refused(tmp_path)


def test_folders_that_are_none(llama: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused("gpt2-medium") and "elaswave downloads nothing" in refused("gpt2-medium")
    assert "has no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "is no configuration of transformers" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    assert "transformers cannot read" in refused(tmp_path)
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "it has pytorch_model.bin" in refused(tmp_path)


def test_arguments_that_are_none(llama: Path) -> None:
    assert "attn = 'flash_attention_2', needed: one of sdpa, eager" in refused(llama, attn="flash_attention_2")
    assert "dtype is float64, needed" in refused(llama, dtype=torch.float64)
    assert "hf was given 3 of type int, needed: a local folder, or a configuration" in refused(3)


def test_files_that_are_damaged(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    layers = elaswave.hf(tmp_path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="ends before byte"):
        [layer.build() for layer in layers]
    assert "is no whole safetensors file" in refused(tmp_path)
    path.write_bytes(b"\xff" * 100)
    assert "a header of" in refused(tmp_path)
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "x of shape [3] has 8 bytes" in refused(tmp_path)
    header = json.dumps({"model.norm.weight": {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert "there is no model.embed_tokens.weight" in refused(tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        layers[0].build()


def test_one_file_comes_before_an_index_as_in_the_original(llama: Path, tmp_path: Path) -> None:
    """Where a folder has both, from_pretrained takes the one file."""
    one, several = original(config_of("llama"), seed=7), tmp_path / "several"
    save(original(config_of("llama"), seed=8), several, max_shard_size="5KB")
    save(one, tmp_path)
    for path in several.glob("model*"):
        shutil.copy(path, tmp_path)
    loaded = type(one).from_pretrained(tmp_path).state_dict()["model.norm.weight"]
    (norm,) = [layer.build() for layer in elaswave.hf(tmp_path) if layer.name == "model.norm"]
    assert torch.equal(norm.weight, loaded) and torch.equal(loaded, one.state_dict()["model.norm.weight"])


def test_indices_that_are_damaged(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    index = tmp_path / stored.INDEX
    index.write_text(json.dumps({"weight_map": {"gone.weight": "first.safetensors"}}))
    assert "gone.weight is in first.safetensors, which does not have it" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    assert "needed: a file in the same folder" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert "gone.safetensors cannot be read" in refused(tmp_path)
    index.write_text("[]")
    assert "cannot be read as an index" in refused(tmp_path)


def test_inputs_that_are_none(llama: Path) -> None:
    layers, ids = elaswave.hf(llama), tokens(2, 12)
    for inputs, said in (
        ({"input_ids": ids, "token_type_ids": ids}, "'token_type_ids'"),
        (ids.float(), r"input_ids is float32 \[2, 12\], needed: whole numbers"),
        (ids[0], r"input_ids is int64 \[12\], needed: whole numbers \(int64\) \[samples, tokens\]"),
        (ids + VOCABULARY, rf"input_ids .* from \d+ to \d+, needed: 0 to {VOCABULARY - 1}, .*tokenizer of this"),
        ({"input_ids": ids, "attention_mask": ids[:, :5]}, r"attention_mask is int64 \[2, 5\], needed: .*\[2, 12\]"),
        ({"input_ids": ids, "position_ids": ids[0]}, r"position_ids is int64 \[12\], needed: .* or \[1, 12\]"),
    ):
        with pytest.raises(UsageError, match=said):
            call(layers, inputs)
    with pytest.raises(ValueError, match="40 tokens does not fit the 32 positions"):
        call(layers, tokens(2, 40))
    assert VOCABULARY > int(tokens(2).max())


def test_positions_that_are_none() -> None:
    layers = elaswave.hf(config_of("gpt2"))
    with pytest.raises(UsageError, match="position_ids of this .* from 32 to 43, needed: 0 to 31"):
        call(layers[:2], {"input_ids": tokens(1, 12), "position_ids": torch.arange(32, 44)[None]})


def test_labels_that_are_none(llama: Path) -> None:
    loss, logits = elaswave.hf(llama).loss, torch.zeros(2, 12, VOCABULARY)
    for labels, said in (
        (tokens(2, 11), r"labels are int64 \[2, 11\], needed: int64 \[2, 12\], .*not shifted"),
        (tokens(2, 12).float(), r"labels are float32 \[2, 12\], needed: int64"),
        (tokens(2, 12) + VOCABULARY, rf"labels of this micro-batch .*, needed: 0 to {VOCABULARY - 1}"),
    ):
        with pytest.raises(UsageError, match=said):
            loss(logits, labels)
