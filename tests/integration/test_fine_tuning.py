"""``elaswave train --hf``: one command from a checkpoint and a text to a checkpoint, also when workers are killed."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file
from tests.hugging_face import config_of, edit_json, original, save, save_tokenizer
from tests.integration.jobs import nothing_left
from tests.integration.scripts import ROOT, run

import elaswave
from elaswave.cli.main import cli
from elaswave.errors import RunFolderError, UsageError
from elaswave.job.script import JobOptions, ScriptSession, active
from elaswave.observability.run_folder import resume_command, saved_config

TEXT = (
    "".join(f"the {one} sees the {other}.\n" for one in "cat dog fox owl".split() for other in "bee ant".split()) * 20
)
SHORT = ("--set", "batch.num_microbatches=5", "--set", "batch.microbatch_size=2", "--set", "elastic.respawn=false",
         "--set", "optimizer.lr=1e-3")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, and a book beside it."""
    path = tmp_path_factory.mktemp("checkpoint")
    source = save(original(config_of("llama", tie_word_embeddings=True)), path / "tiny-llama")
    save_tokenizer(source, TEXT)
    (path / "book.txt").write_text(TEXT)
    return source


def train(*arguments: str | Path) -> str:
    """Runs the command in this process, with workers of its own."""
    with nothing_left():
        done = CliRunner().invoke(cli, ["train", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: str | Path) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(cli, ["train", *map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    return str(caught.value)


def test_from_a_checkpoint_and_a_text_to_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    given = ("--hf", folder, "--data", folder.parent / "book.txt", *SHORT)
    output = train(*given, "--set", "run.steps=4", "--fault", "kill:1@3:backward", "--run-dir", tmp_path / "two",
                   "--set", "optimizer.schedule=constant")  # fmt: skip
    assert "worker 1 (stage 0) lost in backward of step 3" in output
    assert resume_command(saved_config(tmp_path / "two"), tmp_path / "two").startswith("elaswave train --resume")
    constant = ("--set", "optimizer.schedule=constant", "--run-dir", tmp_path / "whole")
    train(*given, "--set", "run.steps=6", "--workers", "1", *constant)
    train("--resume", "--run-dir", tmp_path / "two", "--workers", "2", "--set", "run.steps=6")
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("two", "whole")]
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["state_digest"] == results[1]["state_digest"]
    assert results[0]["losses"][-1] < results[0]["losses"][0]

    done = CliRunner().invoke(cli, ["export", str(tmp_path / "two"), "--format", "hf"], catch_exceptions=False)
    assert done.exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "export")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "two" / "export")
    assert model(**tokenizer("the cat sees", return_tensors="pt")).logits.isfinite().all()
    again = elaswave.hf(tmp_path / "two" / "export")
    assert torch.equal(again[0].build().weight, model.model.embed_tokens.weight)


def test_a_run_that_changes_nothing_exports_the_bits_that_came_in(folder: Path, tmp_path: Path) -> None:
    train("--hf", folder, "--data", folder.parent / "book.txt", *SHORT, "--set", "optimizer.lr=0", "--run-dir",
          tmp_path / "run", "--set", "run.steps=1", "--set", "layout.widths=[1,1]")  # fmt: skip
    args = ["export", str(tmp_path / "run"), "--format", "hf", "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(cli, args, catch_exceptions=False).exit_code == 0
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    beside = {path.name for path in folder.iterdir()}
    assert beside == {path.name for path in (tmp_path / "out").iterdir()}


def test_weights_of_a_script_go_back_into_the_original(folder: Path, tmp_path: Path) -> None:
    layers = elaswave.hf(folder)
    ids = torch.randint(97, (20, 8), generator=torch.Generator().manual_seed(1))
    config = {"run.steps": 1, "layout.widths": [1], "batch.num_microbatches": 2, "batch.microbatch_size": 2}
    with nothing_left():
        trainer = elaswave.Trainer(
            layers, layers.loss, [(one, one) for one in ids], config=config, run_dir=tmp_path / "r"
        )
        result = trainer.train()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    result.load_into(model)
    assert all(torch.equal(value, result.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "--hf needs --data" in refused("--hf", folder)
    assert "--data goes with --hf" in refused("--data", "book.txt")
    assert "leave --hf out" in refused("--hf", folder, "--data", "book.txt", "--print-config")
    text = folder.parent / "book.txt"
    assert "has 32 positions" in refused("--hf", folder, "--data", text, "--context-length", "64")
    other = tmp_path / "other"
    save(original(config_of("llama", vocab_size=40)), other)
    assert "has no tokenizer.json" in refused("--hf", other, "--data", text)
    save_tokenizer(other, TEXT)
    size = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    if len(size) > 40:
        assert "they are not of one model" in refused("--hf", other, "--data", text)
    edit_json(other / "config.json", model_type="t5")
    assert "'t5'" in refused("--hf", other, "--data", text)


def test_a_run_whose_record_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    train("--hf", folder, "--data", folder.parent / "book.txt", *SHORT, "--run-dir", tmp_path / "run", "--set",
          "run.steps=1", "--workers", "1")  # fmt: skip
    (tmp_path / "run" / "huggingface" / "fine-tuning.json").write_text("{")
    with pytest.raises(RunFolderError, match="give --hf and --data again"):
        CliRunner().invoke(
            cli,
            ["train", "--resume", "--run-dir", str(tmp_path / "run")],
            catch_exceptions=False,
            standalone_mode=False,
        )


def test_the_pieces_of_the_page_train(folder: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-models" / "huggingface.md").read_text()
    usage, by_hand = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    short = ("run.steps=2", "batch.num_microbatches=2", "batch.microbatch_size=2", "layout.widths=[1,1]")
    ids = torch.randint(97, (640,), generator=torch.Generator().manual_seed(1))
    names = {"folder": folder, "tokens": ids, "elaswave": elaswave, "__name__": "page"}
    exec(compile(usage, "the page", "exec"), names)
    exec(compile(by_hand, "the page", "exec"), names)
    config = transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    by_hand_trainer = elaswave.Trainer(
        names["layers_of"](config), names["layers"].loss, [(one, one) for one in ids.unfold(0, 16, 16)]
    )
    for name, trainer in (("usage", names["trainer"]), ("by hand", by_hand_trainer)):
        with nothing_left(), active(ScriptSession(JobOptions(run_dir=tmp_path / name), None, short)):
            assert len(trainer.train().losses) == 2


@pytest.mark.slow
def test_the_command_as_it_is_typed(folder: Path, tmp_path: Path) -> None:
    given = ("--hf", str(folder), "--data", str(folder.parent / "book.txt"), "--set", "run.steps=20")
    elaswave_command = ("python", "-m", "elaswave")
    struck = run(tmp_path, *elaswave_command, "train", *given, "--fault", "kill:1@5:backward", "--run-dir", "a")
    calm = run(tmp_path, *elaswave_command, "train", *given, "--workers", "1", "--run-dir", "b")
    assert (struck.returncode, calm.returncode) == (0, 0), struck.stderr + calm.stderr
    diff = run(tmp_path, *elaswave_command, "inspect", "diff", "a", "b")
    assert diff.returncode == 0 and "same computation: 20 steps" in diff.stdout
