"""sft: fine-tuning on question/answer pairs; without any, the model is passed on unchanged."""

from modelwright.objectives.next_token import NextToken
from modelwright.pipeline.stages.pack import PACK, needed_start
from modelwright.pipeline.stages.rows import CHAT_ROWS
from modelwright.pipeline.stages.training import training_spec

SFT = training_spec(
    name="sft",
    title="Fine-tuning on questions and answers",
    report_title="Fine-tuning",
    model_title="fine-tuned",
    objective=lambda inputs: NextToken(inputs.loader, answers_only=inputs.config.section(PACK).chat_loss != "all"),
    rows=CHAT_ROWS,
    run_needs=NextToken.needs,
    needs=lambda config: (PACK.name, *needed_start(config, "sft")),
)
