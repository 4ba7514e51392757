"""Moves layers between pipeline stages that have drifted apart, by asking the trainer for another layout."""

from modelwright.parallel.pipeline.balance import LoadBalanceConfig, StageBalance, flop_costs
from modelwright.train.technique import Relayout, Runtime, StepInfo, Technique


def pipeline_rebalancing(config: LoadBalanceConfig, run: Runtime, *, every: int) -> Technique | None:
    """every: steps between comparisons of the stages, 0 for `config.window`."""
    executor = run.executor
    if not config.pipeline or not executor.layers_per_stage:
        return None
    shape = run.model.config
    costs = flop_costs(shape, mean_context=shape.max_seq_len / 2)
    balance = StageBalance(costs, executor.layers_per_stage, config)

    def on_step_end(info: StepInfo) -> Relayout | None:
        balance.observe(executor.stage_spans())
        # All ranks get here at the same steps, because a proposal is collective.
        if info.step % (every or config.window_steps) or info.step >= run.num_steps:
            return None
        proposed = balance.propose(run.mesh)
        if proposed == balance.layers_per_stage:
            return None
        run.note(f"after step {info.step} the stages hold {proposed} layers instead of {balance.layers_per_stage}")
        return Relayout(layers_per_stage=proposed)

    return Technique(name="pipeline_rebalancing", on_step_end=on_step_end, needs=frozenset())
