"""A mixture of experts: each byte is worked on by 2 of 8 small networks, which a router chooses.

elaswave run --workers 4 --fault kill:random@5:any examples/moe.py

11 seconds on two cores. The router says its balance loss from inside of its layer (elaswave.aux_loss), so it needs
no way through the pipeline; the share of choices that found no room in their expert stays in a buffer, so it is in
checkpoints. Data, embedding and attention are those of own_model.py.
"""

import argparse

import torch
from own_model import WIDTH, Block, Embed, loss, standard_library
from torch import Tensor, nn

import elaswave

NUM_EXPERTS, NUM_CHOICES, ROOM = 8, 2, 1.25


class Experts(nn.Module):
    """Feed-forward networks with a router, as in Switch Transformers (https://arxiv.org/abs/2101.03961).

    Each expert has room for the same number of choices, those with the highest weights; the others pass by. So shapes
    are the same in every micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.enter = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.leave = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5)
        self.register_buffer("dropped", torch.zeros(()))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]; N = B x T bytes, E experts with room for R choices each."""
        x_NC = x_BTC.flatten(0, 1)
        probability_NE = self.router(x_NC).softmax(-1)
        chosen_NE = torch.zeros_like(probability_NE).scatter(1, probability_NE.topk(NUM_CHOICES).indices, 1.0)
        elaswave.aux_loss(0.01 * NUM_EXPERTS * (chosen_NE.mean(0) * probability_NE.mean(0)).sum() / NUM_CHOICES)

        room = int(ROOM * NUM_CHOICES * len(x_NC) / NUM_EXPERTS)
        weight_ER, byte_ER = (probability_NE * chosen_NE).t().topk(room)
        if self.training:
            self.dropped.copy_(1 - (weight_ER > 0).sum() / (NUM_CHOICES * len(x_NC)))
        made_ERC = nn.functional.gelu(x_NC[byte_ER] @ self.enter) @ self.leave
        mixed_NC = torch.zeros_like(x_NC).index_add(
            0, byte_ER.flatten(), (made_ERC * weight_ER[..., None]).flatten(0, 1)
        )
        return mixed_NC.view_as(x_BTC)


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=4)
    blocks = parser.parse_args().blocks

    def block() -> nn.Module:
        made = Block()
        made.mlp = Experts()
        return made

    trainer = elaswave.Trainer(
        # Builders: a worker makes only the layers that it holds.
        [
            elaswave.Layer("embed", Embed),
            *[elaswave.Layer(f"block{i}", block) for i in range(blocks)],
            elaswave.Layer("head", lambda: nn.Linear(WIDTH, 256)),
        ],
        loss,
        standard_library(),
        optimizer=lambda parameters: torch.optim.AdamW(
            [
                {"params": parameters.named("*norm*", "*.bias"), "weight_decay": 0.0},
                {"params": parameters.except_named("*norm*", "*.bias"), "weight_decay": 0.1},
            ],
            lr=3e-3,
        ),
        grad_clip=1.0,
        config={"run.steps": 30, "batch.num_microbatches": 8, "batch.microbatch_size": 4},
    )
    result = trainer.train()
    state = result.state_dict()
    dropped = torch.stack([values for name, values in state.items() if name.endswith(".dropped")])
    print(f"choices without room, by block: {[round(share, 3) for share in dropped.tolist()]}")
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, state {result.state_digest}")


if __name__ == "__main__":
    main()
