"""pretrain: next-token prediction on prose and code, from random weights."""

from modelwright.objectives.next_token import NextToken
from modelwright.pipeline.report.results import training_facts, training_lines
from modelwright.pipeline.stages.pack import FIRST_TRAINING, PACK
from modelwright.pipeline.stages.rows import TEXT_ROWS
from modelwright.pipeline.stages.training import training_spec

PRETRAIN = training_spec(
    name=FIRST_TRAINING,
    title="Pretraining",
    report_title="Pretraining",
    model_title="pretrained",
    objective=lambda inputs: NextToken(inputs.loader),
    rows=TEXT_ROWS,
    run_needs=NextToken.needs,
    needs=lambda config: (PACK.name,),
    headline=training_facts,
    closing=training_lines,
    time_weight=9.0,
)
