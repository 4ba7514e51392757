"""kto: Kahneman-Tversky optimization on single answers with a label."""

from collections.abc import Sequence

from modelwright.objectives.kto import Kto, KtoConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Block
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.alignment import LABELED_ROWS, metric_charts, reference_model
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.stage_inputs import needed_start
from modelwright.pipeline.stages.training import FurtherModels, training_spec


def _objective(inputs: StageInputs) -> Kto:
    config = inputs.training
    assert isinstance(config, KtoConfig)
    return Kto(inputs.loader, config, reference_model(inputs, KTO.name, config.reference))


def _further(run: RunConfig, config: KtoConfig) -> FurtherModels:
    """The reference evaluates answers and mismatched answers, the policy the latter."""
    return FurtherModels(
        num_models=1, num_forwards=3, folders={"reference": config.reference} if config.reference else {}
    )


def _blocks(stage: StageData) -> Sequence[Block]:
    rewards = {"rewards/chosen": "desirable", "rewards/rejected": "undesirable"}
    return metric_charts(stage, {"Rewards": rewards, "KL divergence, nats": {"kl": "mismatched answers"}})


KTO = training_spec(
    name="kto",
    title="Preference optimization on single answers",
    report_title="Preference optimization on single answers",
    model_title="preference-optimized (KTO)",
    objective=_objective,
    rows=LABELED_ROWS,
    run_needs=Kto.needs,
    needs=lambda config: (PACK.name, *needed_start(config, "kto")),
    config=KtoConfig,
    only_if_named=True,
    loss_unit="",
    blocks=_blocks,
    further=_further,
)
