# A training stage: after pretraining, the model learns each text from its end to its beginning, on rows of its own.
# modelwright run tiny --stages clean,tokenize,pack,pretrain,backward,report --backward.num_steps 20
# Steps, checkpoints, resumption, estimates and the section of the report are those of the package's own stages.
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Split
from modelwright.data.rows.pack import TokenSequence
from modelwright.objectives.next_token import NextToken
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.pack import PACK, needed_start
from modelwright.pipeline.stages.rows import PackJob
from modelwright.pipeline.stages.training import training_spec


def pack_backward(job: PackJob, split: Split) -> None:
    texts = (document.text[::-1] for document in read_kept(job.clean, split=split, kinds=("prose",)))
    encoded = job.tokenizer.encode_documents(texts, num_threads=1)
    job.pack(f"{ROWS.name}/{split}", (TokenSequence(ids) for ids in encoded))


ROWS = RowSet(name="backward", title="reversed text", pack=pack_backward)
BACKWARD = training_spec(
    name="backward",
    title="Training on reversed text",
    report_title="Reversed text",
    model_title="backward model",
    objective=lambda inputs: NextToken(inputs.loader),
    run_needs=NextToken.needs,
    rows=ROWS,
    needs=lambda config: (PACK.name, *needed_start(config, "backward")),
    follows="pretrain",
)
