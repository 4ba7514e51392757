"""kto: Kahneman-Tversky optimization on single answers with a label."""

from itertools import tee

from modelwright.core.config import DataError
from modelwright.data.document import Split
from modelwright.data.rows.examples import PreferenceFit, with_mismatched_answers
from modelwright.objectives.preference import Kto, KtoConfig
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.dpo import answer_sequences, pack_groups, reference_model
from modelwright.pipeline.stages.pack import PACK, needed_start
from modelwright.pipeline.stages.rows import PackJob, Sequences, new_fit
from modelwright.pipeline.stages.training import FurtherModels, metric_charts, training_spec


def _pack_labeled(job: PackJob, split: Split) -> None:
    """Packs groups of two rows: answers, and the same prompts with answers to other prompts. The value of a sequence is
    1 for a desirable answer, else 0.
    """
    fit = PreferenceFit(tokenizer=job.tokenizer, answers=new_fit(job))
    documents = (one for one in job.documents(split, "qa") if "desirable" in one.meta)
    kept = ((one, answer) for one in documents if (answer := fit.single(one)))
    # Mismatching runs some answers ahead, so documents are paired with its results through a second iterator.
    ordered, encoded = tee(kept)

    def sequences() -> Sequences:
        pairs = with_mismatched_answers((answer for _, answer in encoded), seq_len=job.settings.seq_len)
        for (document, _), answers in zip(ordered, pairs, strict=False):
            yield from answer_sequences(job, document, answers, float(document.meta["desirable"]))

    report = pack_groups(job, LABELED_ROWS, split, sequences(), fit)
    if split == "train" and not report and fit.num_preferences > sum(fit.skipped.values()):
        raise DataError(
            "pack: all answers with a label have the same prompt; KTO compares answers to different prompts"
        )


LABELED_ROWS = RowSet(
    name="labeled_answers", title="answers with a label", pack=_pack_labeled, documents="answer with a label"
)
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
