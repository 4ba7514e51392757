"""pack: kept documents to rows of tokens, training and held-out, for each set of rows (`rows.py`).

`tokenizer_stage` and the functions next to it name the stages that provide the tokenizer, the start of a training, the
reward model, and the final model.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from modelwright.core.artifacts import Manifest, RunDir
from modelwright.core.config import ConfigError, DataError, dump
from modelwright.data.clean.folder import kept_files
from modelwright.data.document import SPLITS, Kind
from modelwright.data.rows.pack import PackConfig
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.report.page import tokens_section
from modelwright.pipeline.stage import RowSet, RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.estimates import moving_estimate
from modelwright.pipeline.stages.imported import check_packing, check_tokenizer, imported_stage
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.rows import CHAT_ROWS, TEXT_KINDS, TEXT_ROWS, PackJob
from modelwright.pipeline.stages.tokenize import TOKENIZE

FIRST_TRAINING = "pretrain"
"""The stage that makes a model out of random weights."""


def tokenizer_stage(config: RunConfig) -> str:
    """The stage whose artifact contains the tokenizer."""
    return INIT.name if config.init_from else TOKENIZE.name


def model_before(config: RunConfig, stage: str) -> str:
    """The stage whose model training in `stage` starts from, "" for random weights. The model of `stage` itself need
    not be one of those that later stages continue (a reward model is not).
    """
    earlier = takewhile(lambda one: one.name != stage, config.stages)
    return next((one.name for one in reversed(list(earlier)) if one.model_title), "")


def reward_model_before(config: RunConfig, stage: str) -> str:
    """The last stage before `stage` whose artifact is a reward model, "" without one."""
    earlier = takewhile(lambda one: one.name != stage, config.stages)
    return next((one.name for one in reversed(list(earlier)) if one.is_reward_model), "")


def final_model(config: RunConfig) -> str:
    """The stage whose model is the run's result, "" if the run trains none."""
    return config.model_names[-1] if config.model_names else ""


def needed_model(config: RunConfig) -> tuple[str, ...]:
    """Returns the requirement of a stage that uses the final model: a stage that produces one."""
    return (final_model(config) or FIRST_TRAINING,)


def needed_start(config: RunConfig, stage: str) -> tuple[str, ...]:
    """Returns the requirement of a stage that continues the training of a model: an earlier stage that produces one."""
    return (model_before(config, stage) or FIRST_TRAINING,)


BYTES_PER_S = 3e6
QA_ONLY: tuple[Kind, ...] = ("qa",)


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Artifact: a folder for each set of rows. Facts: one packing report per folder, `pairs/<split>` on how the
    conversations fitted into the rows, and `pretrain_kinds`."""
    tokenizer_from = tokenizer_stage(config)
    settings = with_labels(config)
    # Settings with the value from before they existed stay out of the digest: artifacts of older runs remain valid.
    always = {"chat_loss": "assistant", "text_kinds": list(TEXT_KINDS)}
    identity = {name: one for name, one in dump(settings).items() if name not in always or always[name] != one}
    if config.rows_from:  # reuses rows that were packed with the same settings and tokenizer, for all trainings

        def check(context: StageContext, manifest: Manifest) -> None:
            check_packing(config, dump(settings), dump(PackConfig()), PACK.name, context)
            source = TOKENIZE.name if TOKENIZE.name in manifest.inputs else INIT.name
            if source != tokenizer_from or config.init_from:
                check_tokenizer(config, context.parents[tokenizer_from], source, context)
            for stage in config.trainings:
                if stage.rows and not stage.rows.if_empty and f"{stage.rows.name}/train" not in manifest.facts:
                    raise ConfigError(
                        f"rows_from: {config.rows_from} lacks the rows of {stage.rows.title} that {stage.name} learns "
                        f"from; pack them there in a run with the stage {stage.name}"
                    )

        return imported_stage(config, PACK, settings=identity, parents=(tokenizer_from,), check=check)
    labels = {"score": settings.score, "group_by": settings.group_by, "keep_documents": settings.keep_documents}
    identity |= {name: value for name, value in labels.items() if value not in ("", "none", False)}
    if further := [rows.name for rows in row_sets(config)[2:]]:
        identity["rows"] = further
    if decided := {rows.name: dict(decides) for rows in row_sets(config) if (decides := rows.decides(config))}:
        identity["decided"] = decided

    def pack(context: StageContext) -> None:
        tokenizer = Tokenizer.load(context.parents[tokenizer_from])
        clean, facts = context.parents[CLEAN.name], context.output.facts
        has_text = not kept_files(clean).get("train", {}).keys().isdisjoint(settings.text_kinds)
        kinds = settings.text_kinds if has_text else QA_ONLY
        facts["pretrain_kinds"] = list(kinds)
        if kinds != settings.text_kinds and any(stage.rows is TEXT_ROWS for stage in config.trainings):
            context.progress.note(
                f"pack: no training document of pack.text_kinds ({', '.join(settings.text_kinds)}) was kept; "
                "pretraining learns from question/answer pairs as text"
            )
        job = PackJob(
            context=context, config=config, settings=settings, tokenizer=tokenizer, clean=clean, text_kinds=kinds
        )
        for split in SPLITS:
            for rows in row_sets(config):
                rows.pack(job, split)
        if not any(f"{rows.name}/train" in facts for rows in row_sets(config)):
            raise DataError(
                "pack: no training document is left after cleaning; see the dropped documents of the clean stage"
            )

    return Stage(
        name=PACK.name,
        title=PACK.title,
        settings=identity,
        parents=(CLEAN.name, tokenizer_from),
        run=pack,
        version=2,
    )


def with_labels(config: RunConfig) -> PackConfig:
    """Returns the settings of packing, with the labels of rows that the trainings of the run ask for. Raises
    `ConfigError` if they ask for different ones.
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


def row_sets(config: RunConfig) -> tuple[RowSet, ...]:
    """Returns text and conversations, and the further sets of rows that the run's training stages need."""
    return tuple(dict.fromkeys([TEXT_ROWS, CHAT_ROWS, *(stage.rows for stage in config.trainings if stage.rows)]))


def packed_row_len(config: RunConfig) -> int:
    """Returns the tokens of a row; in a run without packing, the model's context."""
    return config.section(PACK).seq_len if config.has(PACK) else config.model.max_seq_len


PACK = StageSpec(
    name="pack",
    title="Packing rows of tokens",
    config=PackConfig,
    needs=lambda config: (*(() if config.rows_from else (CLEAN.name,)), tokenizer_stage(config)),
    build=_build,
    estimate=lambda config, run, rates: moving_estimate("pack", config, bytes_per_s=BYTES_PER_S),
    report=lambda data, stage: tokens_section(
        stage,
        data.done(tokenizer_stage(data.config)),
        {
            f"{rows.name}/{split}": f"{rows.title}, {title}"
            for rows in row_sets(data.config)
            for split, title in zip(SPLITS, ("training", "held out"), strict=True)
        },
        data.config.section(PACK).seq_len,
    ),
)
