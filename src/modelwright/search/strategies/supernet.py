"""One-shot search: weights that all shapes share are trained once, and rank candidates by what these lose with them
(Bender et al. 2018; Yu and Huang 2019). What training the shared weights and ranking cost is a part of the budget.

How well that ranking agrees with stand-alone training is always reported, by Kendall's tau over all candidates that
were trained alone for the full length: the literature finds it between none and good (Yu et al. 2020).
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from modelwright.core.config import digest
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.batch import TokenBatch
from modelwright.memory.config import ActivationCheckpointingConfig
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.optim.sparse import BatchSelectionConfig, SparseUpdateConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import build_mesh
from modelwright.parallel.pipeline.rebalance import LoadBalanceConfig
from modelwright.precision.adaptive_config import AdaptiveConfig
from modelwright.search.candidates import short_training
from modelwright.search.rank_agreement import rank_agreement
from modelwright.search.sandwich import Sandwich, Turn, sub_networks
from modelwright.search.space import ATTENTION_KINDS, GATES, Choices, Space, Value
from modelwright.search.strategy import SearchFinding, SearchStrategy
from modelwright.search.subnetwork import containing_shape, subnetwork
from modelwright.search.trial import Trial
from modelwright.search.workbench import Workbench
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import evaluate_heldout
from modelwright.train.job import TrainJob
from modelwright.train.runner import WholeModel

NUM_RANDOM = 2
"""Random sub-networks of a step, beside the largest and the smallest: as published."""
TRAINING_SHARE = 0.5
"""Share of the budget for training the shared weights."""
RANKING_SHARE = 0.2
"""Share of the budget for ranking by them."""
NUM_RANKED = 64
"""Candidates that are ranked, at most."""
RANKING_TOKENS = 0.05
"""Held-out tokens by which each is ranked, as a share of the tokens of a training, at least one batch: all of them
would take as much of the budget as training does."""


def search_by_supernet(bench: Workbench) -> None:
    """Train the shared weights, rank random candidates, and train some of them alone: the best, and as many at random,
    so that the agreement of the two is not that of the best alone.
    """
    supernet = Supernet(bench)
    bench.extra_cost += supernet.training_cost
    ranked = supernet.ranked()
    generator = random.Random(derive_seed(bench.seed, "which"))
    others = ranked.copy()
    generator.shuffle(others)
    for pair in zip(ranked, others, strict=True):
        for choices in pair:
            if bench.find(choices, 1.0) is None:
                bench.try_out(choices)  # None where it costs more than is left: a smaller one may not


class Supernet:
    """The shared weights of one search; trained when they are first needed. bench: of the strategy."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.training = bench.space.standard.training
        self.largest = corner(bench.space, -1)
        self.smallest = corner(bench.space, 0)
        gates = [str(value) for axis in bench.space.axes if axis.name == "gate" for value in axis.values]
        self.container = containing_shape(bench.space.candidate(self.largest).model, gates)
        self.num_steps, self.training_cost = self._length()
        self._trained: Decoder | None = None

    def shapes(self, step: int) -> list[ModelConfig]:
        """The sub-networks of a step: the largest, the smallest, and random ones; a function of the step alone."""
        generator = random.Random(derive_seed(self.bench.seed, "step", step))
        drawn = [self.bench.space.draw(generator) for _ in range(NUM_RANDOM)]
        return [self.bench.space.candidate(choices).model for choices in (self.largest, self.smallest, *drawn)]

    def _length(self) -> tuple[int, float]:
        """Updates that `TRAINING_SHARE` of the budget allows, at least one, and what they cost."""
        candidates, standard = self.bench.candidates, self.bench.space.standard
        whole, num_steps, cost = candidates.flops(standard, 1.0), 0, 0.0
        while cost <= TRAINING_SHARE * self.bench.budget:
            per_token = sum(shape.flops_per_token(candidates.mean_context) for shape in self.shapes(num_steps))
            step_cost = 3.0 * per_token * self.training.batch_tokens / whole
            if num_steps and cost + step_cost > TRAINING_SHARE * self.bench.budget:
                break
            num_steps, cost = num_steps + 1, cost + step_cost
        return num_steps, cost

    def weights(self) -> Decoder:
        """The shared weights, trained by the loop of all trainings: from its checkpoint if that is there."""
        if self._trained is None:
            bench, candidates = self.bench, self.bench.candidates
            stage = StageDir(candidates.folder / "supernet" / bench.strategy)
            seed = derive_seed(bench.seed, "weights")
            model = Decoder(self.container)
            model.init_weights(seed)
            num_networks = len(self.shapes(0))
            sandwich = Sandwich(
                inner=candidates.objective(self.training, 0, stage.path),
                shapes=self.shapes,
                num_networks=num_networks,
                turn=Turn(microbatches=self.training.gradient_accumulation_steps),
            )
            job = TrainJob(
                model=model,
                objective=sandwich,
                config=sandwich_training(short_training(self.training, self.num_steps), num_networks),
                num_steps=self.num_steps,
                stage=stage,
                seed=seed,
                name=f"{bench.strategy} weights",
                input_digest=digest([self.num_steps, seed, vars(self.container)]),
                techniques=[sub_networks(sandwich)],
            )
            train(job, candidates.world, candidates.progress)
            self._trained = model
        return self._trained

    def loss(self, choices: Choices) -> float:
        """The held-out loss of a candidate with the shared weights."""
        candidates, shape = self.bench.candidates, self.bench.space.candidate(choices).model
        mesh = build_mesh(candidates.world, ParallelConfig())
        objective = candidates.objective(self.training, 0, candidates.folder)
        weights = self.weights()
        with torch.no_grad():
            network = WholeModel(subnetwork(weights, shape), mesh.context, scatters_each=False)
        return evaluate_heldout(network, objective, self.heldout(), mesh, alive=lambda: None).loss

    def losses(self, name: str, many: Sequence[Choices]) -> list[float]:
        """The same of many, once."""
        record = self.bench.candidates.journal.once(
            "shared losses", f"{self.bench.strategy}/{name}", lambda: {"losses": [self.loss(one) for one in many]}
        )
        return list(record["losses"])

    def heldout(self) -> Sequence[TokenBatch]:
        """The held-out batches by which candidates are ranked."""
        all_batches = self.bench.candidates.heldout()
        num_batches = int(RANKING_TOKENS * self.bench.candidates.num_tokens / all_batches[0].num_tokens)
        return all_batches[: max(1, num_batches)]

    def ranked(self) -> list[dict[str, Value]]:
        """Random candidates within the limit of parameters, those with the lowest loss first. Each is charged its
        forward passes.
        """
        bench, generator = self.bench, random.Random(derive_seed(self.bench.seed, "ranked"))
        num_tokens = sum(batch.num_tokens for batch in self.heldout())
        drawn: dict[str, dict[str, Value]] = {}
        cost = 0.0
        for _ in range(10 * NUM_RANKED):
            choices = bench.space.draw(generator)
            fits_limit = bench.space.candidate(choices).model.num_parameters <= bench.limits.num_parameters
            if digest(choices) in drawn or not fits_limit:
                continue
            forward_cost = bench.cost(choices) / 3.0 * num_tokens / bench.candidates.num_tokens
            if len(drawn) == NUM_RANKED or cost + forward_cost > RANKING_SHARE * bench.budget:
                break
            drawn[digest(choices)], cost = choices, cost + forward_cost
        bench.extra_cost += cost
        many = list(drawn.values())
        losses = self.losses("ranked", many)
        order = sorted(range(len(many)), key=lambda place: (losses[place], place))
        return [many[place] for place in order]


def corner(space: Space, place: int) -> dict[str, Value]:
    """The candidate with the smallest (0) or the largest (-1) values on all axes, for words by what they cost."""
    order: dict[str, Sequence[Value]] = {"attention": ATTENTION_KINDS[::-1], "gate": GATES}
    ends: dict[str, Value] = {}
    for axis in space.axes:
        by_size = [value for value in order.get(axis.name, axis.values) if value in axis.values]
        ends[axis.name] = by_size[place]
    return ends


def sandwich_training(training: TrainConfig, num_networks: int) -> TrainConfig:
    """With one microbatch, or more, for each sub-network, and without what looks at the layers of the whole model or
    moves rows from one microbatch to another.
    """
    return replace(
        training,
        batch_tokens=training.batch_tokens * num_networks,
        gradient_accumulation_steps=training.gradient_accumulation_steps * num_networks,
        learning_rate=training.peak_learning_rate,
        lr_scaling="none",
        compile=False,
        activation_checkpointing=ActivationCheckpointingConfig(),
        precision=replace(training.precision, adaptive=AdaptiveConfig()),
        sparse_updates=SparseUpdateConfig(),
        batch_selection=BatchSelectionConfig(),
        load_balance=LoadBalanceConfig(),
        fault_tolerance=replace(training.fault_tolerance, on_out_of_memory="fail"),
    )


def agreement(bench: Workbench, trials: Sequence[Trial]) -> SearchFinding:
    """Kendall's tau over all candidates of the search that were trained alone for the full length. The evaluations with
    shared weights serve the report alone and are not charged.
    """
    alone: dict[str, Trial] = {}
    for trial in trials:
        if trial.is_full and fits(bench.space, trial.choices):
            alone.setdefault(digest(dict(trial.choices)), trial)
    many = [dict(trial.choices) for trial in alone.values()]
    name = f"agreement {digest(many)[:16]}"
    shared = Supernet(bench).losses(name, many) if many else []
    stand_alone = [trial.loss for trial in alone.values() if trial.loss is not None]
    tau = rank_agreement(shared, stand_alone)
    value = "not defined" if tau.tau is None else f"{tau.tau:.2f}"
    return SearchFinding(
        name="kendall_tau",
        figures=vars(tau),
        text=f"Kendall's tau of losses with shared weights and of stand-alone training: {value}, 95% interval "
        f"{tau.low:.2f} to {tau.high:.2f}, {tau.num_candidates} candidates",
    )


def fits(space: Space, choices: Choices) -> bool:
    """Whether a candidate is a sub-network of the shared weights: one off the grid may be larger."""
    ends = corner(space, -1)
    return all(
        value <= ends[name]  # pyright: ignore[reportOperatorIssue]
        for name, value in choices.items()
        if not isinstance(value, str)
    ) and all(choices[axis.name] in axis.values for axis in space.axes if not axis.is_ordered)


SUPERNET = SearchStrategy(
    name="supernet",
    summary="weights shared by all shapes rank candidates, of which some are trained alone",
    run=search_by_supernet,
    conclude=agreement,
    needs_shapes=True,
)
