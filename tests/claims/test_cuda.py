"""Parity of a GPU with the CPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_naive
from modelwright.parallel.mesh import single
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.runtime import observer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPE = ModelConfig(
    vocab_size=64, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=128, head_dim=16, max_seq_len=32
)


class Source:
    """Batches of four rows of 32 tokens, three documents to a row."""

    num_batches_per_epoch = 8

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        generator = torch.Generator().manual_seed(index)
        tokens_BT = torch.randint(64, (4, 32), generator=generator)
        segments_BT = (torch.arange(32) // 11).int().expand(4, -1).contiguous()
        labels_BT = tokens_BT.roll(-1, dims=1)
        labels_BT[:, [10, 21, 31]] = IGNORED
        return TokenBatch(
            input_ids_BT=tokens_BT,
            labels_BT=labels_BT,
            positions_BT=(torch.arange(32) % 11).expand(4, -1).contiguous(),
            segments_BT=segments_BT,
        )


class Losses:
    def __init__(self) -> None:
        self.values: list[float] = []

    def observe(self, info) -> None:
        self.values.append(info.loss)


def losses_on(device: str, folder: Path, **changes) -> list[float]:
    pytest.importorskip("tensorboardX")
    model, losses = Decoder(SHAPE), Losses()
    model.init_weights(seed=0)
    config = TrainConfig(num_steps=8, batch_tokens=128, **{"precision": PrecisionConfig(policy="fp32"), **changes})
    train(
        TrainJob(
            model=model,
            objective=NextToken(Source()),
            config=config,
            num_steps=8,
            stage=StageDir(folder),
            seed=0,
            name="parity",
            input_digest="parity",
            techniques=[observer("losses", losses.observe)],
        ),
        single(device),
        SilentProgress(),
    )
    return losses.values


def test_the_forward_pass_is_the_cpu_s():
    model, batch = Decoder(SHAPE), Source().batch(0)
    model.init_weights(seed=0)
    with torch.no_grad():
        here = model(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT))
        there_batch = batch.to("cuda")
        there = model.cuda()(there_batch.input_ids_BT, there_batch.positions_BT, packed_attend(there_batch.segments_BT))
    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)


def test_the_chunked_loss_is_the_naive_one():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(33, 16, device="cuda", generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, device="cuda", generator=generator, requires_grad=True)
    labels = torch.randint(50, (33,), device="cuda", generator=generator)
    labels[::5] = IGNORED
    fast = linear_cross_entropy(hidden, weight, labels, chunk_tokens=7)
    naive = linear_cross_entropy_naive(hidden, weight, labels)
    torch.testing.assert_close(fast, naive, atol=1e-3, rtol=1e-4)
    pairs = zip(torch.autograd.grad(fast, (hidden, weight)), torch.autograd.grad(naive, (hidden, weight)), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)


def test_training_losses_are_the_cpu_s(tmp_path):
    assert losses_on("cuda", tmp_path / "cuda") == pytest.approx(losses_on("cpu", tmp_path / "cpu"), abs=1e-3)


def test_microbatches_change_nothing(tmp_path):
    whole = losses_on("cuda", tmp_path / "whole")
    assert losses_on("cuda", tmp_path / "parts", gradient_accumulation_steps=4) == pytest.approx(whole, abs=1e-3)


def test_bf16_training_stays_near_fp32(tmp_path):
    fp32 = losses_on("cuda", tmp_path / "fp32")
    bf16 = losses_on("cuda", tmp_path / "bf16", precision=PrecisionConfig(policy="bf16_mixed"))
    assert bf16 == pytest.approx(fp32, abs=0.05)
