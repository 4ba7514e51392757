"""Samples of a model in training: its continuation of a fixed prompt, after the first step and then about once a
minute, on the terminal and in a file for the report.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from modelwright.core.artifacts import write_atomic
from modelwright.core.records import json_line, read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.pipeline.report.blocks import Samples, TextSample
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder

FILE = "samples.jsonl"
EVERY_S = 60.0
NUM_PROMPT_TOKENS = 16
SAMPLING = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=1)
"""The seed is the same for all samples, so that only the weights differ between two of them."""
NUM_SHOWN = 6


def first_prompt(heldout: Sequence[TokenBatch]) -> list[int]:
    """Returns the beginning of the first held-out row: the tokens before its first target, such as a question with its
    template, or its first tokens if every token is a target. Empty if nothing is held out.
    """
    if not heldout:
        return []
    batch = heldout[0]
    targets = (batch.labels_BT[0] != IGNORED).nonzero().flatten().tolist()
    first = targets[0] + 1 if targets and targets[0] else NUM_PROMPT_TOKENS
    in_first_document = int((batch.segments_BT[0] == batch.segments_BT[0, 0]).sum())
    return batch.input_ids_BT[0, : min(first, in_first_document)].tolist()


def text_samples(folder: Path, tokenizer: Tokenizer, prompt: Sequence[int]) -> TechniqueBuilder:
    """Returns a technique that shows the model's continuation of `prompt` and appends it to `samples.jsonl` in
    `folder`.
    """
    return partial(_build, folder=folder, tokenizer=tokenizer, prompt=prompt)


def _build(
    run: Runtime,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
) -> Technique | None:
    # None without a prompt, if another rank samples, and if this rank has only a part of the model: training does not
    # depend on a sample.
    model = run.model
    is_whole = len(model.blocks) == model.config.num_layers
    is_divided = any(isinstance(one, DTensor) for one in model.parameters())
    if not (prompt and run.world.is_first and is_whole) or is_divided or len(prompt) >= model.config.max_seq_len:
        return None
    params = [replace(SAMPLING, stop_ids=tokenizer.stop_ids)]
    config = EngineConfig(max_num_seqs=1, kv_cache_tokens=model.config.max_seq_len)
    last = clock()

    def on_step_end(info: StepInfo) -> None:
        nonlocal last
        if clock() - last < EVERY_S and 1 < info.step < run.num_steps:
            return
        with run.formats.evaluating():
            (completion,) = generate(model, [prompt], params, config)
        # A long sample must not look like a hang of this rank.
        run.alive()
        # A model may have rows beyond the tokenizer's vocabulary, which are hardly trained and mean nothing.
        text = tokenizer.decode([one for one in completion.token_ids if one < tokenizer.vocab_size])
        run.note(f"step {info.step:,}: {_one_line(tokenizer.decode(prompt))} ▸ {_one_line(text)}")
        _keep(folder / FILE, {"step": info.step, "loss": info.loss, "text": text})
        last = clock()

    return Technique(name="text_samples", on_step_end=on_step_end, needs=frozenset())


def _keep(path: Path, sample: Mapping[str, Any]) -> None:
    """Writes the sample after those of earlier steps; samples of later steps, from before a crash, are dropped."""
    earlier = [record for record in read_records(path) if record["step"] < sample["step"]]
    write_atomic(path, "".join(json_line(record) for record in [*earlier, sample]))


def sample_block(folder: Path) -> list[Samples]:
    """Returns a stage's samples for the report: at most six, from the first to the last; none without samples."""
    records = read_records(folder / FILE)
    if not records:
        return []
    num_shown = min(NUM_SHOWN, len(records))
    places = [math.ceil(place * (len(records) - 1) / max(1, num_shown - 1)) for place in range(num_shown)]
    items = [
        TextSample(f"Step {records[place]['step']:,}", records[place]["text"], f"loss {records[place]['loss']:.2f}")
        for place in places
    ]
    return [Samples(items, title="One beginning, continued while the model learned")]


def _one_line(text: str) -> str:
    return " ".join(text.split())
