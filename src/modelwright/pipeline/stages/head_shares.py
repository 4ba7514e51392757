"""Share of tokens for which each head of a trained model is open on held-out rows: a fact of a training stage, and a
table of its section of the report. A model that does not select heads (`model/head_selection.py`) has neither.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedRows
from modelwright.model.decoder import Decoder
from modelwright.model.head_selection import decisions_seen
from modelwright.pipeline.report.blocks import Block, Table, count, percent
from modelwright.pipeline.report.run_data import StageData
from modelwright.train.objective import forward

HEAD_SHARES = "head_shares"
"""Key of the stage's facts."""
ROWS_AT_ONCE, MOST_BATCHES = 8, 16
ALWAYS, NEVER = 0.99, 0.01
"""Shares of tokens from which, and up to which, the report counts a head as always or never open."""


def head_shares(model: Decoder, heldout: Path) -> dict[str, Any]:
    """Returns the facts of a model on a folder of held-out rows; {} if it is missing or the model selects no heads."""
    if model.config.head_budget == 1.0 or not heldout.is_dir():
        return {}
    counts_LH, num_tokens = count_open(model, islice(PackedRows(heldout).batches(ROWS_AT_ONCE), MOST_BATCHES))
    shares = (counts_LH.double() / max(1, num_tokens)).tolist()
    return {HEAD_SHARES: {"shares": shares, "num_tokens": num_tokens, "budget": model.config.head_budget}}


@torch.no_grad()
def count_open(model: Decoder, batches: Iterable[TokenBatch]) -> tuple[Tensor, int]:
    """Counts the tokens for which each head of each layer is open, int64 [L, H], and all tokens without padding."""
    counts_LH = torch.zeros(model.config.num_layers, model.config.num_heads, dtype=torch.int64)
    num_tokens, device, was_training = 0, model.norm.weight.device, model.training
    model.eval()
    for batch in batches:
        batch = batch.to(device)
        is_real_BT = batch.segments_BT >= 0

        def see(layer: int, open_BTH: Tensor, is_real_BT: Tensor = is_real_BT) -> None:
            counts_LH[layer] += open_BTH[is_real_BT].sum(dim=0).cpu()

        with decisions_seen(model, see):
            forward(model, batch)
        num_tokens += int(is_real_BT.sum())
    model.train(was_training)
    return counts_LH, num_tokens


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
