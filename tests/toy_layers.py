# SPDX-License-Identifier: Apache-2.0
"""Five decoder layers of plain torch with routers, called as DeepSeek-V4.1's are; kernels that stand in."""

import torch

HIDDEN, EXPERTS, PICKS, LAYERS = 32, 8, 2, 5
PROMPTS, STEPS = (3, 20), 4


class ToyMoE(torch.nn.Module):
    scoring_func, n_activated_experts = "sqrtsoftplus", PICKS

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate.e_score_correction_bias = torch.linspace(0, 0.1, EXPERTS)
        self.up = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def mix(self, x):
        return self.up(x)

    def forward(self, x):
        self.gate(x)
        return self.mix(x)


class ToyDecoderLayer(torch.nn.Module):
    """``kernels`` computes the same without the router; ``scale`` is a fault of theirs."""

    def __init__(self, kernels, scale):
        super().__init__()
        self.ffn, self.kernels, self.scale = ToyMoE(), kernels, scale

    def forward(self, x, positions, residual=None):
        residual = x if residual is None else residual + x
        whole = self.ffn.mix(residual) * self.scale if self.kernels else self.ffn(residual)
        return whole, residual, None, None, None


class ToyModel(torch.nn.Module):
    def __init__(self, kernels=False, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(512, HIDDEN)
        self.layers = torch.nn.ModuleList(ToyDecoderLayer(kernels, scale) for _ in range(LAYERS))

    @torch.no_grad()
    def forward(self, positions):
        x, residual = self.embed(positions), None
        for layer in self.layers:
            x, residual, *_ = layer(x, positions=positions, residual=residual)
        return x


def decode(model, steps=STEPS, prompts=PROMPTS):
    """The prompts, and then a row of each request a step."""
    model(torch.cat([torch.arange(length) for length in prompts]))
    for step in range(steps):
        model(torch.tensor([length + step for length in prompts]))
