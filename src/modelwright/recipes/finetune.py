"""The run of `modelwright finetune`: the recipe `finetune`, a model, data, and lengths of rows and batches that fit the
records. The lengths are settings of the run like any others: config.yaml keeps them, and a resumed run takes them from
there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core.config import merge
from modelwright.core.errors import ConfigError, DataError
from modelwright.data.rows.fit import ConversationFit
from modelwright.data.sources.conversations import FORMS
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run_config import previous_config
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import ROW_LEN_STEP
from modelwright.pipeline.stages.sft import SFT
from modelwright.recipes.load import Request, find_target, load

RECIPE = "finetune"
LORA: Mapping[str, Any] = {SFT.name: {"lora": {"r": 16}, "learning_rate": 2e-4}}
"""Settings of `--lora`: the rank of PEFT's examples, with the rate of QLoRA (Dettmers et al. 2023, table 9)."""


def finetune_request(
    model: str,
    sources: Sequence[str],
    overrides: Mapping[str, Any],
    run_dir: str = "",
    *,
    lora: bool = False,
    num_processes: int = 1,
    only: Sequence[str] = (),
) -> Request:
    """Builds the request to fine-tune `model`, a Hugging Face folder or a run, on `sources`. lora: train low-rank
    adapters, which are merged into the model at the end; only: the stages named by `--stages`, as in `load`. A run that
    exists keeps the lengths that it was created with. Raises `ConfigError` and `DataError` as `load` does, and if the
    sources hold nothing to fine-tune on.
    """
    if not sources:
        raise ConfigError("finetune: name the files with the examples after the model: modelwright finetune MODEL DATA")
    found = find_model(find_target(model))
    # smollm-support for a model folder smollm and a file support.jsonl.zst
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(sources[0]).name.partition(".")[0] or "data")
    names = {"name": f"{found.source.name}-{stem}"}
    start = {"init_from": str(found.source.folder.resolve()), "data": {"sources": list(sources)}}
    settings = merge(merge(merge(names, start), LORA if lora else {}), overrides)
    # Loaded twice: the first time for the run's folder, its data and its model, from which the lengths follow.
    request = load(RECIPE, settings, run_dir)
    previous = previous_config(request.run)
    if previous is not None and previous.has(SFT):
        lengths: Mapping[str, Any] = {
            "validation_tokens": previous.validation_tokens,
            PACK.name: {"seq_len": previous.section(PACK).seq_len},
            SFT.name: {"batch_tokens": previous.section(SFT).batch_tokens},
        }
    else:
        lengths = fitted_lengths(
            found.source.folder,
            request.config.data,
            settings,
            max_seq_len=request.config.model.max_seq_len,
            num_microbatches=request.config.section(SFT).gradient_accumulation_steps,
            num_processes=num_processes,
        )
    request = load(RECIPE, merge(lengths, settings), run_dir, only)
    return replace(request, origin=f"{request.origin}, model {model}")


MOST_MEASURED = 5_000
"""Most records that are measured; of more, equally many of each file."""
EXAMPLES_PER_UPDATE = 16
"""Conversations of one update: between the 8 of TRL's default and the 32 that InstructGPT's fine-tuning took."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRecords:
    """The conversations of some sources, as a tokenizer and its chat template render them."""

    num_conversations: int
    mean_tokens: float
    row_len: int
    """Tokens that 99% of the conversations fit into."""


def measure_records(sources: SourceConfig, tokenizer: Tokenizer, *, max_seq_len: int) -> MeasuredRecords:
    """Measure the conversations of the sources. Raises `DataError` if the sources hold none, or if the chat
    template refuses one.
    """
    fit, num_tokens = ConversationFit(seq_len=max_seq_len, overlong="split"), 0
    for document in read_documents(sources, report=SourceReport(), sample=MOST_MEASURED):
        if document.kind != "qa" or document.is_undesirable:
            continue
        try:
            chats = tokenizer.encode_training_chats(document.messages, tools=document.tools)
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        for ids, mask in chats:
            fit.fit(ids, mask, stop_ids=tokenizer.stop_ids)
            num_tokens += len(ids)
    if not fit.num_conversations:
        raise DataError(
            f"{', '.join(sources.sources)}: no record is a question with its answer or a conversation, so there is "
            f"nothing to fine-tune on; accepted are {FORMS}"
        )
    return MeasuredRecords(
        num_conversations=fit.num_conversations, mean_tokens=num_tokens / fit.num_conversations, row_len=fit.row_len()
    )


def fitted_lengths(
    folder: Path,
    sources: SourceConfig,
    given: Mapping[str, Any],
    *,
    max_seq_len: int,
    num_microbatches: int,
    num_processes: int,
) -> dict[str, Any]:
    """Computes the row length and the batch that fit the records, as sections of a run, except for settings in `given`.
    folder: with the tokenizer; num_microbatches: of one update. A row is as long as 99% of the conversations need, a
    batch holds about `EXAMPLES_PER_UPDATE` of them in whole rows for every microbatch and process. The sample for
    validation during training is no larger than the held-out part, so that a time budget counts real tokens only.
    """
    own = {stage.name: given.get(stage.name, {}) for stage in (PACK, SFT)}
    measured = measure_records(sources, Tokenizer.load(folder), max_seq_len=max_seq_len)
    # Rounded up to the step in which rows are cut, within the model's context.
    row_len = min(-(-measured.row_len // ROW_LEN_STEP) * ROW_LEN_STEP, max_seq_len)
    row_len = int(own[PACK.name].get("seq_len", row_len))
    parts = num_microbatches * num_processes
    per_part = max(1, round(EXAMPLES_PER_UPDATE * measured.mean_tokens / (row_len * parts)))
    heldout = sources.validation_fraction * measured.num_conversations * measured.mean_tokens
    sections: dict[str, Any] = {
        PACK.name: {"seq_len": row_len, **own[PACK.name]},
        SFT.name: {"batch_tokens": per_part * parts * row_len, **own[SFT.name]},
    }
    # Only if all records were measured: the mean of a sample says too little about the number of held-out tokens.
    if measured.num_conversations < MOST_MEASURED:
        sections["validation_tokens"] = max(row_len, min(RunConfig.validation_tokens, math.ceil(heldout)))
    return sections
