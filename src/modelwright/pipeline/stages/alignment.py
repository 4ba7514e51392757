"""Shared parts of the stages dpo and kto: rows of preference pairs and of labeled answers, the reference model, and
charts of rewards.
"""

from collections.abc import Mapping, Sequence
from itertools import tee
from pathlib import Path

from modelwright.core.errors import ConfigError, DataError
from modelwright.core.records import column
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document, Split
from modelwright.data.rows.examples import PreferenceFit, PromptedAnswer, with_mismatched_answers
from modelwright.data.rows.pack import TokenSequence
from modelwright.model.hf import deferred_model
from modelwright.pipeline.report.blocks import Block, Chart
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import RowSet, StageInputs
from modelwright.pipeline.stages.rows import PackJob, Sequences, new_fit, suggest_row_len
from modelwright.pipeline.stages.stage_inputs import model_before
from modelwright.train.frozen_model import FrozenModel


def _pack_pairs(job: PackJob, split: Split) -> None:
    """Packs groups of two rows: chosen answers, and the rejected answers to the same prompts. The value of a sequence
    is the margin of its pair, 0 without one.
    """
    fit = PreferenceFit(tokenizer=job.tokenizer, answers=new_fit(job))

    def sequences() -> Sequences:
        for document in read_kept(job.clean, split=split, kinds=("qa",)):
            if "rejected" not in document.meta:
                continue
            if answers := fit.pair(document):
                yield from _sequences(job, document, answers, float(document.meta.get("margin", 0.0)))

    _pack(job, PAIR_ROWS, split, sequences(), fit)


def _pack_labeled(job: PackJob, split: Split) -> None:
    """Packs groups of two rows: answers, and the same prompts with answers to other prompts. The value of a sequence is
    1 for a desirable answer, else 0.
    """
    fit = PreferenceFit(tokenizer=job.tokenizer, answers=new_fit(job))
    documents = (one for one in read_kept(job.clean, split=split, kinds=("qa",)) if "desirable" in one.meta)
    kept = ((one, answer) for one in documents if (answer := fit.single(one)))
    # Mismatching runs some answers ahead, so documents are paired with its results through a second iterator.
    ordered, encoded = tee(kept)

    def sequences() -> Sequences:
        pairs = with_mismatched_answers((answer for _, answer in encoded), seq_len=job.settings.seq_len)
        for (document, _), answers in zip(ordered, pairs, strict=False):
            yield from _sequences(job, document, answers, float(document.meta["desirable"]))

    report = _pack(job, LABELED_ROWS, split, sequences(), fit)
    if split == "train" and not report and fit.num_preferences > sum(fit.skipped.values()):
        raise DataError(
            "pack: all answers with a label have the same prompt; KTO compares answers to different prompts"
        )


def _sequences(
    job: PackJob, document: Document, answers: tuple[PromptedAnswer, PromptedAnswer], value: float
) -> Sequences:
    labels = job.labels(document)
    return iter([TokenSequence(one.ids, one.mask, *labels, value) for one in answers])


def _pack(job: PackJob, rows: RowSet, split: Split, sequences: Sequences, fit: PreferenceFit) -> bool:
    """Packs the groups of a split; returns False without any. Raises `DataError` if all of them were skipped."""
    report = job.pack(f"{rows.name}/{split}", sequences, group_size=2)
    if report:
        report |= {"num_sequences": fit.num_preferences, "num_cut": fit.answers.num_truncated}
        report["skipped"] = dict(fit.skipped)
    if split == "train" and fit.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(fit.skipped.items()))
        text = f"pack: of {fit.num_preferences:,} {rows.documents}s, some are left out ({reasons})"
        if fit.answers.num_overlong:
            suggestion = suggest_row_len(job.config, fit.answers)
            text += f"; a row has {fit.answers.seq_len} tokens (pack.seq_len): {suggestion}"
        if fit.num_preferences == sum(fit.skipped.values()):
            raise DataError(f"{text}; none is left")
        job.context.progress.note(text)
    return bool(report)


PAIR_ROWS = RowSet(
    name="preference_pairs", title="preference pairs", pack=_pack_pairs, documents="preference pair", trained_rows=2
)
LABELED_ROWS = RowSet(
    name="labeled_answers", title="answers with a label", pack=_pack_labeled, documents="answer with a label"
)


def reference_model(inputs: StageInputs, stage: str, folder: str) -> FrozenModel:
    """Returns the model of a folder, or, for "", the one from which the stage starts; frozen, and divided over ranks
    like the model in training. Raises `ConfigError` if the folder's model does not fit the tokens of the run.
    """
    start = inputs.parents[model_before(inputs.config, stage)]
    model = deferred_model(Path(folder) if folder else start)
    # Log-probabilities of both models are compared token by token, so the reference must know every id and position.
    needed, found = inputs.config.model, model.config
    if found.vocab_size < needed.vocab_size or found.max_seq_len < needed.max_seq_len:
        raise ConfigError(
            f"{stage}.reference: {folder} has a vocabulary of {found.vocab_size} and a context of "
            f"{found.max_seq_len} tokens, the model in training {needed.vocab_size} and {needed.max_seq_len}; choose "
            "a reference with the tokenizer of this run"
        )
    parallel = inputs.config.parallel
    is_divided = parallel.zero_stage == 3 or parallel.tensor > 1 or parallel.pipeline > 1
    return FrozenModel(model, inputs.world, sharded=is_divided and inputs.world.size > 1)


def metric_charts(stage: StageData, charts: Mapping[str, Mapping[str, str]]) -> Sequence[Block]:
    """Returns charts of an objective's metrics, smoothed in training and unsmoothed on held-out rows. charts: for each
    title the label of each metric.
    """
    records = stage.records()
    blocks: list[Block] = []
    for number, (title, metrics) in enumerate(charts.items()):
        lines: list[Line] = []
        for color, (metric, label) in enumerate(metrics.items()):
            if in_training := column(records, metric):
                lines.append(Line(label, smooth(in_training), color=color))
            if heldout := column(records, f"heldout/{metric}"):
                lines.append(Line(f"{label}, held out", heldout, marks=True, color=color))
        if any(line.points for line in lines):
            svg = line_chart(lines, name=f"{stage.name}-metrics-{number}", x_label="step", y_label=title.lower())
            blocks.append(Chart(title, svg))
    return blocks
