"""dpo: preference optimization on pairs of a chosen and a rejected answer: DPO, IPO, ORPO."""

from modelwright.objectives.preference import Preference, PreferenceConfig
from modelwright.pipeline.stages.alignment import PAIR_ROWS, metric_charts, reference_model
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.stage_inputs import needed_start
from modelwright.pipeline.stages.training import FurtherModels, training_spec

DPO = training_spec(
    name="dpo",
    title="Preference optimization",
    report_title="Preference optimization",
    model_title="preference-optimized (DPO)",
    objective=lambda inputs: Preference(
        inputs.loader,
        inputs.training,
        reference_model(inputs, "dpo", inputs.training.reference) if inputs.training.has_reference else None,
    ),
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
    further=lambda run, config: FurtherModels(
        num_models=int(config.has_reference),
        num_forwards=int(config.has_reference),
        folders={"reference": config.reference} if config.has_reference and config.reference else {},
    ),
)
