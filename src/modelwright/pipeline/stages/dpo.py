"""dpo: preference optimization on pairs of a chosen and a rejected answer: DPO, IPO, ORPO.

Also what it shares with the stages kto and reward, and with those that learn from rollouts: groups of answers as rows,
and the reference model.
"""

from pathlib import Path

from modelwright.core.config import ConfigError, DataError
from modelwright.data.document import Document, Split
from modelwright.data.rows.examples import PreferenceFit, PromptedAnswer
from modelwright.data.rows.pack import TokenSequence
from modelwright.model.hf import deferred_model
from modelwright.objectives.preference import Preference, PreferenceConfig
from modelwright.pipeline.stage import RowSet, StageInputs
from modelwright.pipeline.stages.pack import PACK, model_before, needed_start
from modelwright.pipeline.stages.rows import PackJob, Sequences, new_fit, suggest_row_len
from modelwright.pipeline.stages.training import FurtherModels, metric_charts, training_spec
from modelwright.train.frozen_model import FrozenModel


def _pack_pairs(job: PackJob, split: Split) -> None:
    """Packs groups of two rows: chosen answers, and the rejected answers to the same prompts. The value of a sequence
    is the margin of its pair, 0 without one.
    """
    fit = PreferenceFit(tokenizer=job.tokenizer, answers=new_fit(job))

    def sequences() -> Sequences:
        for document in job.documents(split, "qa"):
            if "rejected" not in document.meta:
                continue
            if answers := fit.pair(document):
                yield from answer_sequences(job, document, answers, float(document.meta.get("margin", 0.0)))

    pack_groups(job, PAIR_ROWS, split, sequences(), fit)


def answer_sequences(
    job: PackJob, document: Document, answers: tuple[PromptedAnswer, PromptedAnswer], value: float
) -> Sequences:
    labels = job.labels(document)
    return iter([TokenSequence(one.ids, one.mask, *labels, value) for one in answers])


def pack_groups(job: PackJob, rows: RowSet, split: Split, sequences: Sequences, fit: PreferenceFit) -> bool:
    """Packs the groups of a split; returns False without any. Raises `DataError` if all of them were skipped."""
    # A group stays in one batch: the loss compares its two rows piece by piece.
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
