"""A T5 of transformers, encoder and decoder, cut into four parts by `elaswave.split`; it learns to turn texts round.

elaswave run --workers 4 --fault kill:random@5:any examples/t5.py

The decoder looks at what the encoder has made, so the encoder's output crosses every later cut; one table of vectors is
shared by encoder, decoder and head. Masks and buckets of positions are computed by each part.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration

import elaswave

VOCABULARY, LENGTH, ROWS = 24, 8, 4


class Reversed(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Random texts, and the same from their end; token 0 begins the decoder's input."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        text = torch.randint(2, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        turned = text.flip(0)
        inputs = {"input_ids": text, "decoder_input_ids": F.pad(turned[:-1], (1, 0))}
        return inputs, turned


def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), targets.flatten())


def main() -> None:
    """Cuts, trains, and loads the weights into the network."""
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, use_cache=False
    )  # fmt: skip
    network = T5ForConditionalGeneration(config)
    dataset = Reversed()
    example, _ = torch.utils.data.default_collate([dataset[i] for i in range(ROWS)])
    layers = elaswave.split(network, example, num_parts=4)
    print(
        f"{len(layers.graph)} operators, cut at {layers.cuts}: {', '.join(f'{s * 1e3:.0f}' for s in layers.part_s)} ms"
    )
    trainer = elaswave.Trainer(
        layers,
        loss,
        dataset,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        grad_clip=1.0,
        config={"run.steps": 40, "batch.num_microbatches": 8, "batch.microbatch_size": ROWS},
    )
    result = trainer.train()
    result.load_into(network)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
