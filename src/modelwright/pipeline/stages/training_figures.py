"""Figures of a training stage besides its loss: samples of text while it learns, charts of the objective's metrics,
bits per byte, utilization of the machine, and the share of tokens for which each attention head is open.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from modelwright.core.artifacts import read_manifest, write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, json_line, read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.model.head_selection import decisions_seen
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Block, Chart, Samples, Table, TextSample, count, percent
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.resolve import product_rate
from modelwright.pipeline.stage import StageContext, StageSpec
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import TEXT_ROWS
from modelwright.pipeline.stages.stage_inputs import tokenizer_stage
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainResult
from modelwright.train.objective import forward
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder, observer

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


def text_samples(
    run: Runtime,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
) -> Technique | None:
    """Returns a technique that shows the model's continuation of `prompt` and appends it to `samples.jsonl` in
    `folder`.
    """
    # None without a prompt, if another rank samples, and if this rank has only a part of the model: training does not
    # depend on a sample.
    model = run.model
    is_whole = len(model.blocks) == model.config.num_layers
    is_divided = any(isinstance(one, DTensor) for one in model.parameters())
    if not (prompt and run.world.is_first and is_whole) or is_divided or len(prompt) >= model.config.max_seq_len:
        return None
    params = [replace(SAMPLING, stop_ids=tokenizer.stop_ids)]
    # One text has no neighbors that could change its last bits, and to rule that out takes 80 MiB of oneDNN's kernels.
    config = EngineConfig(max_num_seqs=1, kv_cache_tokens=model.config.max_seq_len, batch_invariant=False)
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
        shown = " ▸ ".join(" ".join(one.split()) for one in (tokenizer.decode(prompt), text))
        run.note(f"step {info.step:,}: {shown}")
        beginning = tokenizer.decode(prompt)
        # The sample follows those of earlier steps; samples of later steps, from before a crash, are dropped.
        earlier = [record for record in read_records(folder / FILE) if record["step"] < info.step]
        samples = [*earlier, {"step": info.step, "loss": info.loss, "prompt": beginning, "text": text}]
        write_atomic(folder / FILE, "".join(json_line(sample) for sample in samples))
        last = clock()

    return Technique(name="text_samples", on_step_end=on_step_end, needs=frozenset())


def sample_block(folder: Path) -> list[Samples]:
    """Returns a stage's samples for the report: at most six, from the first to the last; none without samples."""
    records = read_records(folder / FILE)
    if not records:
        return []
    num_shown = min(NUM_SHOWN, len(records))
    # Evenly spread, the first and the last sample included
    places = [math.ceil(place * (len(records) - 1) / max(1, num_shown - 1)) for place in range(num_shown)]
    items = [
        TextSample(f"Step {records[place]['step']:,}", records[place]["text"], f"loss {records[place]['loss']:.2f}")
        for place in places
    ]
    beginning = str(records[0].get("prompt", ""))
    first = [TextSample("The beginning", beginning)] if beginning else []
    return [Samples([*first, *items], title="One beginning, continued while the model learned")]


HEAD_SHARES = "head_shares"
"""Key of the stage's facts."""
ROWS_AT_ONCE, MOST_BATCHES = 8, 16
ALWAYS, NEVER = 0.99, 0.01
"""Shares of tokens from which, and up to which, the report counts a head as always or never open."""


@torch.no_grad()
def head_shares(model: Decoder, heldout: Path) -> dict[str, Any]:
    """Returns the facts of a model on a folder of held-out rows; {} if it is missing or the model selects no heads."""
    if model.config.head_budget == 1.0 or not heldout.is_dir():
        return {}
    # The tokens for which each head of each layer is open, and all tokens without padding
    counts_LH = torch.zeros(model.config.num_layers, model.config.num_heads, dtype=torch.int64)
    num_tokens, device, was_training = 0, model.norm.weight.device, model.training
    model.eval()
    for batch in islice(PackedRows(heldout).batches(ROWS_AT_ONCE), MOST_BATCHES):
        batch = batch.to(device)
        is_real_BT = batch.segments_BT >= 0

        # The mask is bound as a default: the closure must not see the one of a later batch.
        def see(layer: int, open_BTH: Tensor, is_real_BT: Tensor = is_real_BT) -> None:
            counts_LH[layer] += open_BTH[is_real_BT].sum(dim=0).cpu()

        with decisions_seen(model, see):
            forward(model, batch)
        num_tokens += int(is_real_BT.sum())
    model.train(was_training)
    shares = (counts_LH.double() / max(1, num_tokens)).tolist()
    return {HEAD_SHARES: {"shares": shares, "num_tokens": num_tokens, "budget": model.config.head_budget}}


def head_blocks(stage: StageData) -> Sequence[Block]:
    """Returns the table of the report; none for a model that computes all heads."""
    facts = stage.facts.get(HEAD_SHARES)
    if not facts:
        return []
    shares: Sequence[Sequence[float]] = facts["shares"]
    rows = [
        [f"layer {layer}", *(percent(share, 0) for share in of), percent(sum(of) / len(of))]
        for layer, of in enumerate(shares)
    ]
    flat = [share for of in shares for share in of]
    always, never = sum(share >= ALWAYS for share in flat), sum(share <= NEVER for share in flat)
    caption = (
        f"Share of {count(facts['num_tokens'])} held-out tokens for which a head is open: "
        f"{percent(sum(flat) / len(flat))} on average, with a budget of {percent(facts['budget'], 0)}. "
        f"Of {count(len(flat))} heads, {count(always)} are "
        f"(almost) always open and {count(never)} (almost) never; those could be pruned."
    )
    header = ["", *(f"head {head}" for head in range(len(shares[0]))), "mean"]
    return [Table(header, rows, "Open heads", caption, numeric=range(1, len(header)))]


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


def bits_per_byte(context: StageContext, config: RunConfig, spec: StageSpec) -> list[TechniqueBuilder]:
    """Also shows the loss of text as bits per byte, which can be compared across tokenizers: an estimate from the mean
    length of a token in the kinds of held-out text that are trained on.
    """
    kinds = read_manifest(context.parents[PACK.name]).facts["pretrain_kinds"]
    measured = read_manifest(context.parents[tokenizer_stage(config)]).facts.get("bytes_per_token", {})
    bytes_per_token = [measured[kind] for kind in kinds if kind in measured]
    # Only the default objective on text has a loss in nats per token of that text.
    if spec.rows is not TEXT_ROWS or not bytes_per_token or config.section(spec).objective:
        return []
    bits_per_nat = 1 / math.log(2) / statistics.mean(bytes_per_token)
    advance = context.progress.advance
    return [observer("bits_per_byte", lambda info: advance(info.step, bits_per_byte=info.loss * bits_per_nat))]


_PEAK_FILE = "peak.json"
TOO_LOW = 1.02
"""Steps faster than the peak by more than this share of measurement error show that the peak is wrong."""


def peak_flops(context: StageContext, config: RunConfig, training: TrainConfig) -> float:
    """Returns the peak FLOP/s of matrix products on this machine: measured once, kept for resumed runs."""
    if context.ranks.rank != 0:
        return 0.0
    known = _read_peak(context)
    if not known:
        rate = product_rate(config, training.precision, context.progress.note)
        known = {"compute": training.precision.compute, "flops": rate}
        write_atomic(context.folder.path / _PEAK_FILE, json.dumps(known))
    return float(known["flops"])


def peaks_after(
    context: StageContext, config: RunConfig, training: TrainConfig, result: TrainResult
) -> dict[str, float]:
    """Returns `live_peak_flops`, measured before training, and `peak_flops`, the maximum of that rate, the rate after
    training and the rate of the fastest step. A single measurement may fall into a busy moment of the machine, and no
    step is faster than the peak.
    """
    live = float(_read_peak(context).get("flops", 0.0))
    if not live:
        return {"live_peak_flops": 0.0, "peak_flops": 0.0}
    if result.peak_flops > TOO_LOW * live:
        context.progress.note(
            f"the peak was measured as {live / 1e9:.0f} GFLOP/s, which steps exceeded ({result.peak_flops / 1e9:.0f}), "
            "probably while other processes kept the machine busy; utilization refers to the higher rate"
        )
    after = product_rate(config, training.precision, SilentProgress().note)
    return {"live_peak_flops": live, "peak_flops": max(live, result.peak_flops, after)}


def _read_peak(context: StageContext) -> dict[str, Any]:
    try:
        return json.loads((context.folder.path / _PEAK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
