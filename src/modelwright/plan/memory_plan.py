"""A plan for the memory of a training step: what to compute again and when to update, judged by traces of the step.

What blocks keep is chosen by `memory.budget` under a budget for activations; a trace of the whole step, with weights,
gradients, the head and the update in it, says what comes of it. Updates in backward join where they change no weight.
The plan is a configuration: training with it is what the second trace shows. Knows one process and no link.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelwright.core.config import dump
from modelwright.core.errors import ConfigError
from modelwright.memory.activations import BlockShape, block_shape, head_workspace_bytes, total_recomputed_flops
from modelwright.memory.budget import Budget, block_choices, least_budget
from modelwright.memory.checkpointing import segments_for
from modelwright.memory.config import ActivationConfig
from modelwright.memory.lifetimes import Timeline
from modelwright.model.config import ModelConfig
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.plan.traced_step import ObjectiveOf, trace_step
from modelwright.train.config import TrainConfig

MORE_COMPUTE = 0.2
"""Share of a step's FLOPs that a plan may add where nobody says otherwise."""
_CANDIDATES = 24


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """before: the step as configured; after: with `train`, which is the plan; more_flops: computed again, as a share of
    the step's model FLOPs."""

    before: Timeline
    after: Timeline
    train: TrainConfig
    more_flops: float

    @property
    def saved_share(self) -> float:
        """Of the peak."""
        return 1.0 - self.after.peak_bytes / self.before.peak_bytes

    def settings(self, configured: TrainConfig) -> dict[str, object]:
        """What the plan changes in the configuration."""
        planned, present = dump(self.train), dump(configured)
        return {name: value for name, value in planned.items() if value != present[name]}


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    train: TrainConfig
    more_flops: float


def plan_step(
    model: ModelConfig,
    train: TrainConfig,
    objective_of: ObjectiveOf,
    *,
    seq_len: int,
    budget_bytes: int = 0,
    more_compute: float = MORE_COMPUTE,
) -> StepPlan:
    """The least that is computed again such that the peak is at most `budget_bytes`; without a budget (0) the lowest
    peak for `more_compute` of the step's FLOPs.

    Raises `ConfigError` that names the lowest peak when the budget is too small.
    """
    before = trace_step(model, train, objective_of, seq_len=seq_len)
    candidates = _candidates(model, _with_updates_in_backward(train), seq_len)
    if not budget_bytes:
        chosen = ([one for one in candidates if one.more_flops <= more_compute] or candidates[:1])[-1]
        after = trace_step(model, chosen.train, objective_of, seq_len=seq_len)
        return StepPlan(before=before, after=after, train=chosen.train, more_flops=chosen.more_flops)
    if before.peak_bytes <= budget_bytes:
        return StepPlan(before=before, after=before, train=train, more_flops=0.0)
    low, high, found = 0, len(candidates) - 1, None
    while low <= high:  # peaks fall along the candidates
        middle = (low + high) // 2
        after = trace_step(model, candidates[middle].train, objective_of, seq_len=seq_len)
        if after.peak_bytes <= budget_bytes:
            found, high = (candidates[middle], after), middle - 1
        else:
            low, lowest = middle + 1, after.peak_bytes
    if found is None:
        raise ConfigError(
            f"budget: {budget_bytes} bytes are not enough; the lowest peak that recomputing reaches is {lowest}; "
            "use smaller microbatches, or divide the states (parallel.shard)"
        )
    return StepPlan(before=before, after=found[1], train=found[0].train, more_flops=found[0].more_flops)


def _with_updates_in_backward(train: TrainConfig) -> TrainConfig:
    """Where the settings let it be and weights stay as they are; else the same."""
    if train.update_in_backward != "none":
        return train
    try:
        return replace(train, update_in_backward="unclipped")
    except ConfigError:
        return train


def _candidates(model: ModelConfig, train: TrainConfig, seq_len: int) -> Sequence[_Candidate]:
    """Ways to treat the blocks, from what computes least again to what keeps least. The first is as configured."""
    shape = block_shape(model, compute=train.precision.planned_as, mean_context=model.max_seq_len / 2)
    num_tokens = train.batch_rows(seq_len) * seq_len // train.num_microbatches
    end_bytes = head_workspace_bytes(model, num_tokens=num_tokens, chunk_tokens=CHUNK_TOKENS)
    whole = num_tokens * (model.num_layers * shape.whole_bytes + shape.workspace_bytes) + end_bytes
    choices = block_choices(shape, num_tokens, model.num_layers)
    least = least_budget(choices, model.num_layers, Budget(num_bytes=whole, end_bytes=end_bytes))
    budgets = [whole - (whole - least) * step // _CANDIDATES for step in range(_CANDIDATES + 1)]
    flops = 3.0 * model.flops_per_token(seq_len / 2)
    found, seen = [_Candidate(train=train, more_flops=_again(train.activations, model, shape, num_tokens) / flops)], []
    for budget in budgets:
        config = ActivationConfig(mode="budget", budget_bytes=budget)
        segments = segments_for(config, model.num_layers, shape=shape, num_tokens=num_tokens, end_bytes=end_bytes)
        again = total_recomputed_flops(shape, segments) / flops
        if segments not in seen and again > found[-1].more_flops:
            seen.append(segments)
            found.append(_Candidate(train=replace(train, activations=config), more_flops=again))
    return found


def _again(config: ActivationConfig, model: ModelConfig, shape: BlockShape, num_tokens: int) -> float:
    """FLOPs a token that the present configuration computes again."""
    if config.mode == "budget":
        return 0.0  # a plan begins from what is kept without one
    return total_recomputed_flops(shape, segments_for(config, model.num_layers, shape=shape, num_tokens=num_tokens))
