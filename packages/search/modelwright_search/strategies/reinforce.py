"""A recurrent controller that learns from rewards which values to choose (Zoph and Le 2017, Neural Architecture Search
with Reinforcement Learning).

A two-layer LSTM chooses a value on each axis in turn, from the value before it, by a softmax. REINFORCE (Williams 1992)
with a running mean of earlier rewards as its baseline raises the probability of choices that were better than that.
For language models the paper's reward is c over the squared held-out perplexity. Limits are not in the paper: here a
candidate beyond one has the reward 0.

The paper trained thousands of children. With the few dozen that a budget here allows, the controller hardly leaves the
uniform distribution that it begins with, and its report says how far it has come.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright_search.space import Axis
from modelwright_search.workbench import SearchFinding, SearchStrategy, Workbench

HIDDEN_DIM, NUM_LAYERS = 35, 2
LEARNING_RATE = 6e-4
"""Adam's rate and the sizes of the LSTM are those of section 4.1 of the paper."""
INIT_RANGE = 0.08
"""Weights begin evenly between minus this and this (section 4.1)."""
REWARD_SCALE = 80.0
"""c of the reward c / perplexity^2 (section 4.2)."""
BASELINE_DECAY = 0.95
"""Decay of the exponential moving average of rewards; the paper leaves it open."""

MAX_LESSONS = 1000
"""Largest number of draws in a search, repeated ones included."""


class RecurrentController(nn.Module):
    """The policy over choices. Everything random comes from `generator`."""

    def __init__(self, axes: Sequence[Axis], generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = [len(axis.values) for axis in axes]
        self.start = nn.Parameter(torch.empty(HIDDEN_DIM))
        self.cells = nn.ModuleList(nn.LSTMCell(HIDDEN_DIM, HIDDEN_DIM) for _ in range(NUM_LAYERS))
        self.embeddings = nn.ModuleList(nn.Embedding(size, HIDDEN_DIM) for size in self.sizes)
        self.outputs = nn.ModuleList(nn.Linear(HIDDEN_DIM, size) for size in self.sizes)
        with torch.no_grad():
            for parameter in self.parameters():
                draw = torch.rand(parameter.shape, generator=generator)
                parameter.copy_((2.0 * draw - 1.0) * INIT_RANGE)

    def log_probs(self, places: Sequence[int]) -> list[Tensor]:
        """Returns the log-probabilities of all values of each axis, given the values at `places` on the axes before it:
        one tensor for each place, and one more if an axis is left.
        """
        states = [(torch.zeros(1, HIDDEN_DIM), torch.zeros(1, HIDDEN_DIM)) for _ in self.cells]
        value, results = self.start[None], list[Tensor]()
        for axis, output in enumerate(self.outputs):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(value, states[layer])
                value = states[layer][0]
            results.append(F.log_softmax(output(value)[0], dim=-1))
            if axis == len(places):
                break
            value = self.embeddings[axis](torch.tensor([places[axis]]))
        return results

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> list[int]:
        """Draws the place of a value on each axis."""
        places: list[int] = []
        for _ in self.sizes:
            probabilities = self.log_probs(places)[-1].exp()
            places.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return places

    def log_prob(self, places: Sequence[int]) -> Tensor:
        """Returns the log-probability of drawing these places."""
        steps = zip(self.log_probs(places), places, strict=True)
        return torch.stack([log_probs[place] for log_probs, place in steps]).sum()

    @torch.no_grad()
    def probabilities(self) -> list[float]:
        """Returns the probability of the likeliest value of each axis, each after the likeliest ones before it."""
        places: list[int] = []
        likeliest: list[float] = []
        for _ in self.sizes:
            probabilities = self.log_probs(places)[-1].exp()
            places.append(int(probabilities.argmax()))
            likeliest.append(float(probabilities.max()))
        return likeliest


def reward_of(loss: float | None) -> float:
    """Computes c / perplexity^2; 0 for a candidate without a loss."""
    return 0.0 if loss is None else REWARD_SCALE * math.exp(-2.0 * loss)


class Reinforce:
    """The controller with its optimizer, its baseline and its random numbers."""

    def __init__(self, axes: Sequence[Axis], seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        self.controller = RecurrentController(axes, self.generator)
        self.optimizer = torch.optim.Adam(self.controller.parameters(), lr=LEARNING_RATE)
        self.baseline = 0.0
        self.num_rewards = 0

    def draw(self) -> list[int]:
        return self.controller.draw(self.generator)

    def learn(self, places: Sequence[int], reward: float) -> None:
        """Makes a step of REINFORCE. The first reward is its own baseline, so its gradient is zero."""
        if not self.num_rewards:
            self.baseline = reward
        loss = -(reward - self.baseline) * self.controller.log_prob(places)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.baseline = BASELINE_DECAY * self.baseline + (1.0 - BASELINE_DECAY) * reward
        self.num_rewards += 1


def search_by_reinforce(bench: Workbench) -> SearchFinding:
    """Draws candidates from the controller, tries them on the workbench, and learns from each trial. A repeated
    candidate is a lesson again, but costs nothing. Returns the probabilities of the likeliest values next to those of
    an even draw.
    """
    axes = bench.space.axes
    learner = Reinforce(axes, bench.seed)
    for _ in range(MAX_LESSONS):
        places = learner.draw()
        choices = {axis.name: axis.values[place] for axis, place in zip(axes, places, strict=True)}
        trial = bench.try_out(choices)
        if trial is None:
            break
        learner.learn(places, reward_of(trial.loss))
    likeliest = dict(zip((axis.name for axis in axes), learner.controller.probabilities(), strict=True))
    words = ", ".join(f"{axis.name} {likeliest[axis.name]:.2f} (evenly {1.0 / len(axis.values):.2f})" for axis in axes)
    return SearchFinding(
        name="controller",
        figures={"likeliest": likeliest, "num_rewards": learner.num_rewards},
        text=f"Controller after {learner.num_rewards} rewards, probability of the likeliest value: {words}",
    )


REINFORCE = SearchStrategy(name="reinforce", run=search_by_reinforce)
