"""Lion against its algorithm, element by element."""

import torch
from torch import nn

from modelwright.train.optim.build import Lion


def test_it_is_algorithm_2_of_the_paper():
    torch.manual_seed(0)
    ours = nn.Linear(5, 3)
    optimizer = Lion(
        [{"params": [ours.weight], "weight_decay": 0.3}, {"params": [ours.bias]}], lr=0.02, betas=(0.9, 0.99)
    )
    weights = {name: p.detach().double().clone() for name, p in ours.named_parameters()}
    momenta = {name: torch.zeros_like(value) for name, value in weights.items()}
    for number in range(6):
        ours(torch.randn(7, 5, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        if number == 3:
            ours.bias.grad = None  # a parameter that a step leaves out
        for name, parameter in ours.named_parameters():
            if parameter.grad is not None:
                gradient, decay = parameter.grad.double(), 0.3 if name == "weight" else 0.0
                move = torch.sign(0.9 * momenta[name] + 0.1 * gradient)
                weights[name] = weights[name] - 0.02 * (move + decay * weights[name])
                momenta[name] = 0.99 * momenta[name] + 0.01 * gradient
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.double(), weights[name], rtol=1e-5, atol=1e-6)
