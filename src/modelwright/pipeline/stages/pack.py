"""pack: kept documents to rows of tokens, training and held-out, for each set of rows (`rows.py`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import Manifest
from modelwright.core.config import dump
from modelwright.core.errors import ConfigError, DataError
from modelwright.core.rundir import RunDir
from modelwright.data.clean.folder import kept_files
from modelwright.data.document import SPLITS, Kind
from modelwright.data.rows.pack import PackConfig
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.blocks import Section
from modelwright.pipeline.report.corpus import tokens_section
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import Rates, RowSet, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.estimates import IMPORT_S, fixed_estimate, moving_estimate
from modelwright.pipeline.stages.imported import check_packing, check_tokenizer, imported_stage
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.rows import CHAT_ROWS, TEXT_KINDS, TEXT_ROWS, PackJob
from modelwright.pipeline.stages.stage_inputs import tokenizer_stage
from modelwright.pipeline.stages.tokenize import TOKENIZE

BYTES_PER_S = 3e6
QA_ONLY: tuple[Kind, ...] = ("qa",)


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Artifact: a folder for each set of rows. Facts: one packing report per folder, `pairs/<split>` on how the
    conversations fitted into the rows, and `pretrain_kinds`."""
    tokenizer_from = tokenizer_stage(config)
    settings = with_labels(config)
    if config.rows_from:
        return _imported(config, settings, tokenizer_from)
    further = [rows.name for rows in row_sets(config)[2:]]
    decided = {rows.name: dict(found) for rows in row_sets(config) if (found := rows.decides(config))}
    return Stage(
        name=PACK.name,
        title=PACK.title,
        settings=_settings(settings)
        | _label_settings(settings)
        | ({"rows": further} if further else {})
        | ({"decided": decided} if decided else {}),
        parents=(CLEAN.name, tokenizer_from),
        run=lambda context: _run(context, config, settings, Tokenizer.load(context.parents[tokenizer_from])),
        version=2,
    )


def _imported(config: RunConfig, settings: PackConfig, tokenizer_from: str) -> Stage:
    """Takes over rows that were packed with the same settings and tokenizer, for all trainings of the run."""

    def check(context: StageContext, manifest: Manifest) -> None:
        check_packing(config, dump(settings), dump(PackConfig()), PACK.name, context)
        source = TOKENIZE.name if TOKENIZE.name in manifest.inputs else INIT.name
        if source != tokenizer_from or config.init_from:
            check_tokenizer(config, context.parents[tokenizer_from], source, context)
        for stage in config.trainings:
            if stage.rows and not stage.rows.if_empty and f"{stage.rows.name}/train" not in manifest.facts:
                raise ConfigError(
                    f"rows_from: {config.rows_from} has no rows of {stage.rows.title}, which {stage.name} learns from; "
                    f"pack them there in a run with the stage {stage.name}"
                )

    return imported_stage(config, PACK, settings=_settings(settings), parents=(tokenizer_from,), check=check)


def with_labels(config: RunConfig) -> PackConfig:
    """The settings of packing, with the labels of rows that the trainings of the run ask for. Raises `ConfigError` if
    they ask for different ones.
    """
    wanted = [config.section(stage).batching for stage in config.trainings]
    scores = sorted({batching.curriculum.score for batching in wanted} - {""})
    groups = sorted({batching.mixture.group_by for batching in wanted} - {"none"})
    for setting, names in (("curriculum.by", scores), ("mixture.weights", groups)):
        if len(names) > 1:
            raise ConfigError(
                f"batching.{setting}: the training stages need rows by {' and by '.join(names)}; choose one for all"
            )
    return replace(
        config.section(PACK),
        score=scores[0] if scores else "",
        group_by=groups[0] if groups else "none",
        keep_documents=config.augmentation.is_on,
    )


def _settings(config: PackConfig) -> dict[str, Any]:
    """The settings for the digest; without those that have the value that there always was."""
    always = {
        "chat_loss": "assistant", "text_kinds": list(TEXT_KINDS), "chunk_overlap": 50, "min_chunk_tokens": 256,
        "count_overlap": False,
    }  # fmt: skip
    return {name: value for name, value in dump(config).items() if name not in always or always[name] != value}


def _label_settings(config: PackConfig) -> dict[str, str | bool]:
    """The labels of rows that are not the default, for the digest."""
    labels = {"score": config.score, "group_by": config.group_by, "keep_documents": config.keep_documents}
    return {name: value for name, value in labels.items() if value not in ("", "none", False)}


def _run(context: StageContext, config: RunConfig, settings: PackConfig, tokenizer: Tokenizer) -> None:
    clean, facts = context.parents[CLEAN.name], context.output.facts
    kinds = pretraining_kinds(clean, settings.text_kinds)
    facts["pretrain_kinds"] = list(kinds)
    if kinds != settings.text_kinds and any(stage.rows is TEXT_ROWS for stage in config.trainings):
        context.progress.note(
            f"pack: no training document of pack.text_kinds ({', '.join(settings.text_kinds)}) was kept; pretraining "
            "learns from question/answer pairs as text"
        )
    job = PackJob(
        context=context,
        config=config,
        settings=settings,
        tokenizer=tokenizer,
        clean=clean,
        text_kinds=kinds,
    )
    for split in SPLITS:
        for rows in row_sets(config):
            rows.pack(job, split)
    if not any(f"{rows.name}/train" in facts for rows in row_sets(config)):
        raise DataError(
            "pack: no training document is left after cleaning; see the dropped documents of the clean stage"
        )


def row_sets(config: RunConfig) -> tuple[RowSet, ...]:
    """Text and conversations, and what the run's training stages need besides."""
    return tuple(dict.fromkeys([TEXT_ROWS, CHAT_ROWS, *(stage.rows for stage in config.trainings if stage.rows)]))


def packed_row_len(config: RunConfig) -> int:
    """Tokens of a row; of a run that packs none, the model's context."""
    return config.section(PACK).seq_len if config.has(PACK) else config.model.max_seq_len


def pretraining_kinds(clean: Path, wanted: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """The kinds of documents that pretraining learns from: those that are wanted, or pairs where there are none."""
    return wanted if not kept_files(clean).get("train", {}).keys().isdisjoint(wanted) else QA_ONLY


def check_context(config: RunConfig) -> None:
    """Raise `ConfigError` if a row is longer than the model's context. With `init_from`, call it once `config.model` is
    that of the folder.
    """
    if not config.has(PACK) or config.section(PACK).seq_len <= config.model.max_seq_len:
        return
    if config.init_from:
        context, remedy = f"of {config.init_from} ({config.model.max_seq_len})", "lower pack.seq_len"
    else:
        context, remedy = f"(model.max_seq_len {config.model.max_seq_len})", "make one equal to the other"
    raise ConfigError(
        f"pack.seq_len: {config.section(PACK).seq_len} is more than the model's context {context}; {remedy}"
    )


def _estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    if config.rows_from:
        return fixed_estimate(PACK.name, seconds=IMPORT_S)
    return moving_estimate(PACK.name, config, bytes_per_s=BYTES_PER_S)


def _report(data: RunData, stage: StageData) -> Section:
    titles = {
        f"{rows.name}/{split}": f"{rows.title}, {title}"
        for rows in row_sets(data.config)
        for split, title in zip(SPLITS, ("training", "held out"), strict=True)
    }
    return tokens_section(stage, data.done(tokenizer_stage(data.config)), titles, data.config.section(PACK).seq_len)


PACK = StageSpec(
    name="pack",
    title="Packing rows of tokens",
    config=PackConfig,
    needs=lambda config: (*(() if config.rows_from else (CLEAN.name,)), tokenizer_stage(config)),
    build=_build,
    estimate=_estimate,
    report=_report,
)
