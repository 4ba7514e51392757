"""The set of rows of stages that generate what they learn from: one prompt a row, and beside the rows what the records
say about the right answers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from modelwright.core.errors import DataError
from modelwright.core.seeds import derive_seed
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Split
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import TokenSequence
from modelwright.data.rows.prompts import PromptRecord, write_prompts
from modelwright.objectives.heldout_rewards import heldout_batch
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.rows import PackJob, Sequences


def _pack_prompts(job: PackJob, split: Split) -> None:
    """The tokens of each prompt, and a token that stands for the answer: the only target."""
    prompts, name = list[PromptRecord](), f"{PROMPT_ROWS.name}/{split}"
    num_long = 0
    for document in read_kept(job.clean, split=split, kinds=("qa",)):
        try:
            prompt = PromptRecord.of(document, job.tokenizer)
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        fits = len(prompt.ids) < job.settings.seq_len
        num_long += not fits
        if fits:
            prompts.append(prompt)
    if not prompts:
        if split == "train":
            raise DataError(
                f"pack: there is no prompt to generate completions of ({num_long} are longer than a row); give records "
                "with a question and its reference answer, in one of the forms of docs/data.md, or raise pack.seq_len"
            )
        return
    if num_long:
        job.context.progress.note(
            f"pack: {num_long:,} of {num_long + len(prompts):,} prompts of {split} are longer than a row (pack.seq_len "
            f"{job.settings.seq_len}) and are left out of {PROMPT_ROWS.name}"
        )
    one_per_row = replace(job.settings, mode="one_per_row", group_by="none", score="")
    replace(job, settings=one_per_row).pack(name, _sequences(prompts, job.tokenizer.end_id))
    job.context.output.facts[name]["num_long_prompts"] = num_long
    write_prompts(job.context.output.path / name, prompts)


def _sequences(prompts: Sequence[PromptRecord], end_id: int) -> Sequences:
    for prompt in prompts:
        yield TokenSequence([*prompt.ids, end_id], [0] * len(prompt.ids) + [1])


def heldout_prompts(folder: Path, config: RunConfig, *, batch_rows: int) -> Sequence[TokenBatch]:
    """The held-out prompts that training is evaluated on: as many as rows make about `config.validation_tokens`, always
    the same ones. A single batch, whatever `batch_rows` is: all ranks work on it together.
    """
    if not folder.is_dir():
        return ()
    packed = PackedRows(folder)
    numbers = np.arange(packed.num_rows)
    requested = max(1, config.validation_tokens // packed.seq_len) if config.validation_tokens else packed.num_rows
    if requested < packed.num_rows:
        numbers = PackedLoader(packed, batch_rows=1, seed=derive_seed(config.seed, "heldout")).order(0, requested)
    return [heldout_batch(packed.gather(numbers[:1]), numbers.tolist())]


PROMPT_ROWS = RowSet(name="prompts", title="prompts", pack=_pack_prompts, learned="completions", stdlib_bytes=4e6)
