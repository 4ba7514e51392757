"""The job after nanoGPT (Karpathy 2022): one compiled model, SDPA, fused AdamW, random crops of one stream of tokens.

The loop is that of nanoGPT's `train.py`; the model has the shape and the initial weights of the job's folder, whose
parameter names it keeps, so that all trainers do the same work; nanoGPT's own model, with learned positions, LayerNorm
and GELU, is the rival of the claim `demo_recipe`. A crop ignores where documents begin: its tokens see all that are
before them, so attention is causal without a mask, which is the cheaper work. Needs torch alone.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainers.task import BETAS, CLIP_NORM, LEARNING_RATE, StepClock, Task, Trained, decay_groups

IGNORED = -100
"""Label that does not count, as in the job's batches."""


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        width, self.head_dim = shape["hidden_size"], shape["head_dim"]
        heads, pairs = (self.head_dim * shape[f"num_{name}_heads"] for name in ("attention", "key_value"))
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, pairs, bias=False)
        self.v_proj = nn.Linear(width, pairs, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)
        has_norms = shape["model_type"] == "qwen3"
        self.q_norm, self.k_norm = (
            Norm(self.head_dim, shape["rms_norm_eps"]) if has_norms else nn.Identity() for _ in range(2)
        )

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask_B1TT: Tensor | None) -> Tensor:
        q, k, v = (layer(x_BTD).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(self.q_norm(q), *rotary).to(v.dtype), rotated(self.k_norm(k), *rotary).to(v.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask_B1TT, is_causal=mask_B1TT is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        width, eps = shape["hidden_size"], shape["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attn, self.mlp = Attention(shape), FeedForward(width, shape["intermediate_size"])

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask_B1TT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary, mask_B1TT)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Body(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = Norm(shape["hidden_size"], shape["rms_norm_eps"])

    def forward(self, ids_BT: Tensor, rotary: tuple[Tensor, Tensor], mask_B1TT: Tensor | None) -> Tensor:
        x_BTD = self.embed_tokens(ids_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, rotary, mask_B1TT)
        return self.norm(x_BTD)


class GPT(nn.Module):
    """shape: the `config.json` of the job's model, of type llama or qwen3."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim, self.theta = shape["head_dim"], shape["rope_theta"]
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)
        if shape["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, ids_BT: Tensor, labels_BT: Tensor, places_BT: Tensor | None = None, mask_B1TT: Tensor | None = None
    ) -> Tensor:
        """Mean loss. places_BT: positions, by default from the start of the row; mask_B1TT: by default causal."""
        places_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] if places_BT is None else places_BT
        powers = torch.arange(0, self.head_dim, 2, device=ids_BT.device) / self.head_dim
        angles_BT1d = (places_BT[..., None] / self.theta**powers).repeat(1, 1, 2)[:, :, None]
        logits = self.lm_head(self.model(ids_BT, (angles_BT1d.cos(), angles_BT1d.sin()), mask_B1TT))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED)


def rotated(x_BTHd: Tensor, cos_BT1d: Tensor, sin_BT1d: Tensor) -> Tensor:
    first, second = x_BTHd.chunk(2, dim=-1)
    return x_BTHd * cos_BT1d + torch.cat([-second, first], dim=-1) * sin_BT1d


def crops(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs and labels [rows, tokens] of each step on the device: as many tokens as the job's rows have."""
    stream, draw = task.batches()["input_ids"].flatten(), torch.Generator().manual_seed(0)
    for _ in range(task.num_steps):
        starts = torch.randint(len(stream) - task.seq_len, (task.batch_rows, 1), generator=draw)
        tokens = stream[starts + torch.arange(task.seq_len + 1)]
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if task.device == "cuda":
            inputs, labels = (half.pin_memory().to(task.device, non_blocking=True) for half in (inputs, labels))
        yield inputs, labels


def first_loss(model: GPT, task: Task) -> float:
    """Mean loss of the job's first batch, in FP32, before any update; here documents do not see one another."""
    batch = {name: tensor[0].to(task.device) for name, tensor in task.batches().items()}
    places_BT = batch["position_ids"]
    documents_BT = (places_BT == 0).cumsum(1)
    mask_B1TT = (documents_BT[:, :, None] == documents_BT[:, None]).tril()[:, None]
    with torch.no_grad():
        return model(batch["input_ids"], batch["shift_labels"], places_BT, mask_B1TT).item()


def run(task: Task, out: Path) -> Trained:
    source = task.folder / "model"
    model = GPT(json.loads((source / "config.json").read_text(encoding="utf-8")))
    initial = load_file(source / "model.safetensors")
    missing, unexpected = model.load_state_dict(initial, strict=False)
    tied = ["lm_head.weight"] if model.lm_head.weight is model.model.embed_tokens.weight else []
    assert (missing, unexpected) == (tied, []), "the model is not of the job's shape"
    model.to(task.device)
    loss_before, clock = first_loss(model, task), StepClock(task)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, fused=True)
    narrow = torch.autocast(task.device, torch.bfloat16) if task.compute == "bf16" else nullcontext()
    compiled, batches = torch.compile(model), crops(task)
    batch = next(batches, None)
    while batch is not None:
        with narrow:
            loss = compiled(*batch)
        batch = next(batches, None)  # while the device computes
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick()
    weights, state = shutil.copytree(source, out / "model"), model.state_dict()
    save_file({name: state[name].cpu() for name in initial}, weights / "model.safetensors")
    return Trained(clock=clock, first_loss=loss_before, weights=weights)
