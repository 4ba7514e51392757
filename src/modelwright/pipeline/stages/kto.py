"""kto: Kahneman-Tversky optimization on single answers with a label."""

from modelwright.objectives.kto import Kto, KtoConfig
from modelwright.pipeline.stages.alignment import LABELED_ROWS, metric_charts, reference_model
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.stage_inputs import needed_start
from modelwright.pipeline.stages.training import FurtherModels, training_spec

KTO = training_spec(
    name="kto",
    title="Preference optimization on single answers",
    report_title="Preference optimization on single answers",
    model_title="preference-optimized (KTO)",
    objective=lambda inputs: Kto(
        inputs.loader, inputs.training, reference_model(inputs, "kto", inputs.training.reference)
    ),
    rows=LABELED_ROWS,
    run_needs=Kto.needs,
    needs=lambda config: (PACK.name, *needed_start(config, "kto")),
    config=KtoConfig,
    only_if_named=True,
    loss_unit="",
    blocks=lambda stage: metric_charts(
        stage,
        {
            "Rewards": {"rewards/chosen": "desirable", "rewards/rejected": "undesirable"},
            "KL divergence, nats": {"kl": "mismatched answers"},
        },
    ),
    # Three forward passes: the reference evaluates answers and mismatched answers, the policy the latter.
    further=lambda run, config: FurtherModels(
        num_models=1, num_forwards=3, folders={"reference": config.reference} if config.reference else {}
    ),
)
