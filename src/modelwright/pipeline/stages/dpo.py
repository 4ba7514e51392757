"""dpo: preference optimization on pairs of a chosen and a rejected answer: DPO, IPO, ORPO."""

from modelwright.objectives.preference import Preference, PreferenceConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.alignment import PAIR_ROWS, metric_charts, reference_model
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.stage_inputs import needed_start
from modelwright.pipeline.stages.training import FurtherModels, training_spec


def _objective(inputs: StageInputs) -> Preference:
    config = inputs.training
    assert isinstance(config, PreferenceConfig)
    reference = reference_model(inputs, DPO.name, config.reference) if config.has_reference else None
    return Preference(inputs.loader, config, reference)


def _further(run: RunConfig, config: PreferenceConfig) -> FurtherModels:
    count = int(config.has_reference)
    folders = {"reference": config.reference} if config.has_reference and config.reference else {}
    return FurtherModels(num_models=count, num_forwards=count, folders=folders)


DPO = training_spec(
    name="dpo",
    title="Preference optimization",
    report_title="Preference optimization",
    model_title="preference-optimized (DPO)",
    objective=_objective,
    rows=PAIR_ROWS,
    run_needs=Preference.needs,
    needs=lambda config: (PACK.name, *needed_start(config, "dpo")),
    config=PreferenceConfig,
    only_if_named=True,
    loss_unit="",
    blocks=lambda stage: metric_charts(
        stage,
        {
            "Rewards": {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"},
            "Share of pairs in the right order": {"rewards/accuracies": "accuracy"},
        },
    ),
    further=_further,
)
