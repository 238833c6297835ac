"""LoRA: a small language model whose weights stay frozen learns another kind of text through low-rank corrections.

elaswave run --workers 4 --fault kill:2@7:backward examples/lora.py

20 seconds on two cores, a third of it for the base: the transformer of own_model.py, which plain PyTorch teaches the
source code of the standard library. Then elaswave trains, on the prose of Python's documentation, only the corrections
(https://arxiv.org/abs/2106.09685). The frozen weights are in memory once, no gradient is kept for them and nothing of
them travels; only layers above the first correction run backward.
"""

import pydoc_data.topics

import torch
from own_model import WIDTH, Block, Bytes, Embed, loss, standard_library
from torch import Tensor, nn

import elaswave

RANK = 8


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank, which begins as zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, base.in_features] to [B, T, base.out_features]."""
        return self.base(x_BTC) + self.up(self.down(x_BTC))


def pretrained(num_steps: int) -> nn.Sequential:
    """The base, as plain PyTorch trains it."""
    torch.manual_seed(1)
    model = nn.Sequential(Embed(), *[Block() for _ in range(4)], nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    code = standard_library()
    for _ in range(num_steps):
        samples = [code[int(i)] for i in torch.randint(len(code), (32,))]
        inputs, targets = torch.utils.data.default_collate(samples)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def main() -> None:
    """Trains the base, then the corrections."""
    model = pretrained(num_steps=40).requires_grad_(False)
    for block in model[1:-1]:
        block.qkv, block.out = LowRank(block.qkv), LowRank(block.out)
        block.mlp[0], block.mlp[-1] = LowRank(block.mlp[0]), LowRank(block.mlp[-1])
    trainer = elaswave.Trainer(
        model,
        loss,
        Bytes("\n".join(pydoc_data.topics.topics.values()).encode()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
        grad_clip=1.0,
        config={"run.steps": 40, "batch.num_microbatches": 8, "batch.microbatch_size": 8},
    )
    result = trainer.train()
    result.load_into(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"trained {trained:,} of {total:,} parameters")
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
