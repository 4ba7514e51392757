"""Fits the lengths of rows and batches of a fine-tuning to its records, before the run is created.

The lengths are settings of the run like any others: config.yaml keeps them, and a resumed run takes them from there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.errors import DataError
from modelwright.data.rows.fit import ConversationFit
from modelwright.data.sources.conversations import FORMS
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import ROW_LEN_STEP
from modelwright.pipeline.stages.sft import SFT

MOST_MEASURED = 5_000
"""Records that are measured; of more, as many of each file."""
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
    """Measure the conversations of the sources. Raises `DataError` if there are none, or if the chat template refuses
    one.
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
        num_conversations=fit.num_conversations,
        mean_tokens=num_tokens / fit.num_conversations,
        row_len=fit.row_len(),
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
    """The row length and the batch that fit the records, as sections of a run, except for what is `given`.

    folder: with the tokenizer; num_microbatches: of one update. A row is as long as 99% of the conversations need, a
    batch holds about `EXAMPLES_PER_UPDATE` of them in whole rows for every microbatch and process. The sample that is
    validated while training is no larger than what is held out, so that a time budget counts what there is.
    """
    own = {stage.name: given.get(stage.name, {}) for stage in (PACK, SFT)}
    measured = measure_records(sources, Tokenizer.load(folder), max_seq_len=max_seq_len)
    row_len = min(-(-measured.row_len // ROW_LEN_STEP) * ROW_LEN_STEP, max_seq_len)
    row_len = int(own[PACK.name].get("seq_len", row_len))
    parts = num_microbatches * num_processes
    per_part = max(1, round(EXAMPLES_PER_UPDATE * measured.mean_tokens / (row_len * parts)))
    heldout = sources.validation_fraction * measured.num_conversations * measured.mean_tokens
    is_whole = measured.num_conversations < MOST_MEASURED
    return {
        **(
            {"validation_tokens": max(row_len, min(RunConfig.validation_tokens, math.ceil(heldout)))}
            if is_whole
            else {}
        ),
        PACK.name: {"seq_len": row_len, **own[PACK.name]},
        SFT.name: {"batch_tokens": per_part * parts * row_len, **own[SFT.name]},
    }
