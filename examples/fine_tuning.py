"""Fine-tuning from safetensors: a Llama of transformers, read from a sharded checkpoint, each worker its own layers.

elaswave run --workers 4 --fault kill:2@7:backward examples/fine_tuning.py

Half a minute on two cores, most of it to load transformers and to make the checkpoint: a small Llama that plain PyTorch
teaches the source code of the standard library, byte by byte. Then elaswave trains it on the prose of Python's
documentation. A checkpoint with a tokenizer needs no script: elaswave train --hf DIR --data book.txt.
"""

import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
from own_model import Bytes, standard_library
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import elaswave


class Labelled(Dataset):
    """Tokens with labels that are the same tokens: the loss of `elaswave.hf` shifts them, as transformers does."""

    def __init__(self, text: bytes) -> None:
        self.samples = Bytes(text)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.samples[index]
        return {"input_ids": tokens, "labels": tokens}


def write_checkpoint(folder: Path, num_steps: int) -> None:
    """A small Llama as plain PyTorch trains it, in several files."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, max_position_embeddings=128, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    code = standard_library()
    for _ in range(num_steps):
        tokens = torch.stack([code[int(i)][0] for i in torch.randint(len(code), (32,))])
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(folder, max_shard_size="300KB")


def main() -> None:
    """Makes the checkpoint, trains it, and gives the weights back to transformers."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), num_steps=40)
        layers = elaswave.hf(folder)
        trainer = elaswave.Trainer(
            layers,
            layers.loss,
            Labelled("\n".join(pydoc_data.topics.topics.values()).encode()),
            config={"run.steps": 40, "optimizer.lr": 2e-3, "batch.num_microbatches": 8, "batch.microbatch_size": 8},
        )
        result = trainer.train()
        model = LlamaForCausalLM.from_pretrained(folder)
    result.load_into(model)  # every tensor has the name that it has there
    print(f"{len(layers)} layers, {sum(each.numel() for each in model.parameters()):,} parameters")
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
