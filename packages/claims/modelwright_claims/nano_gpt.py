"""nanoGPT's model and training (Karpathy, https://github.com/karpathy/nanoGPT, its `model.py` and `train.py`), for
comparison: learned positions, LayerNorm, GELU, tied embedding and head, AdamW with warmup and a cosine to a tenth of
the rate, random places of one long stream of tokens, `torch.compile`, BF16 autocast where the processor has
instructions.

Run as a program it trains one model for a stated time and prints its held-out loss:

    python -m modelwright_claims.nano_gpt JOB.json
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedRows

BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.95), 0.1, 1.0
WARMUP_FRACTION, FINAL_FRACTION = 0.05, 0.1
NUM_TIMED = 12
"""Steps that are timed, after as many that are not, to say how many fit into the time."""
HELDOUT_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class NanoJob:
    """A single training. rows: a folder with packed `train` and `heldout` rows; bf16: compute in BF16."""

    rows: str
    vocab_size: int
    num_layers: int
    num_heads: int
    model_dim: int
    batch_rows: int
    learning_rate: float
    seconds: float
    seed: int
    threads: int
    bf16: bool
    compiles: bool = True


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, dim]."""
        rows, length, dim = x.shape
        heads = (
            part.view(rows, length, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(rows, length, dim)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class NanoGpt(nn.Module):
    """Logits [B, T, vocab_size] of ids [B, T]."""

    def __init__(self, job: NanoJob, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(job.vocab_size, job.model_dim), nn.Embedding(seq_len, job.model_dim)
        self.blocks = nn.ModuleList(Block(job.model_dim, job.num_heads) for _ in range(job.num_layers))
        self.norm = nn.LayerNorm(job.model_dim, bias=False)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                is_last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weights, std=0.02 / math.sqrt(2 * job.num_layers) if is_last else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def stream(rows: PackedRows) -> np.ndarray:
    """All tokens of packed rows, documents one after another without padding, [N] int64."""
    return np.concatenate([batch.input_ids_BT[batch.segments_BT >= 0].numpy() for batch in rows.batches(64)])


def run(job: NanoJob) -> dict[str, float]:
    """Train for `seconds`, compilation and the steps that are timed to plan it not counted; the held-out loss in nats a
    token over the targets of the packed held-out rows, which the model reads as whole rows.
    """
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    train = PackedRows(Path(job.rows) / "train")
    model, tokens = NanoGpt(job, train.seq_len), stream(train)
    start = {name: values.clone() for name, values in model.state_dict().items()}
    step = torch.compile(_loss, disable=not job.compiles)
    batches = _batches(tokens, job, train.seq_len)
    planned = _optimizer(model, job)
    for number in range(2 * NUM_TIMED):
        if number == NUM_TIMED:
            began = time.monotonic()
        _update(model, planned, next(batches), step, job)
    num_steps = max(1, round(job.seconds / ((time.monotonic() - began) / NUM_TIMED)))
    model.load_state_dict(start)
    optimizer, began = _optimizer(model, job), time.monotonic()
    for number in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * _share(number, num_steps)
        _update(model, optimizer, next(batches), step, job)
    trained_s = time.monotonic() - began
    loss = heldout_loss(model, PackedRows(Path(job.rows) / "heldout"), job)
    return {
        "loss": loss,
        "seconds": trained_s,
        "steps": num_steps,
        "tokens": num_steps * job.batch_rows * train.seq_len,
        "parameters": sum(weights.numel() for weights in model.parameters()),
    }


def heldout_loss(model: NanoGpt, rows: PackedRows, job: NanoJob) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in rows.batches(HELDOUT_ROWS):
            total += float(_loss(model, batch.input_ids_BT, batch.labels_BT, job.bf16, reduction="sum"))
            count += int((batch.labels_BT != IGNORED).sum())
    return total / count


def _loss(model: NanoGpt, ids: Tensor, labels: Tensor, bf16: bool, reduction: str = "mean") -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(ids)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def _update(model: NanoGpt, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], step, job: NanoJob) -> None:
    step(model, *batch, job.bf16).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad()


def _batches(tokens: np.ndarray, job: NanoJob, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = np.random.default_rng(job.seed)
    while True:
        starts = draw.integers(0, len(tokens) - seq_len - 1, job.batch_rows)
        pieces = torch.from_numpy(np.stack([tokens[at : at + seq_len + 1] for at in starts]))
        yield pieces[:, :-1], pieces[:, 1:]


def _optimizer(model: NanoGpt, job: NanoJob) -> torch.optim.Optimizer:
    matrices = [weights for weights in model.parameters() if weights.dim() >= 2]
    others = [weights for weights in model.parameters() if weights.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.learning_rate, betas=BETAS, fused=True)


def _share(step: int, num_steps: int) -> float:
    """The learning rate of a step as a share of the peak."""
    warmup = max(1, round(WARMUP_FRACTION * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


if __name__ == "__main__":
    print(json.dumps(run(NanoJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))))
