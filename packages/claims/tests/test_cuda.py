"""Parity of a GPU with the CPU; skipped where it is missing."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import full_memory
import pytest
import tiny_run
import torch

import tiny_rollouts
import training_switches
from modelwright.core.artifacts import StageDir
from modelwright.core.config import ConfigError, Stopped
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import Completion, generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_naive
from modelwright.parallel.mesh import single
from modelwright.train import parallelize
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.technique import observer
from modelwright_claims.memory_probe import RandomRows

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


def test_a_full_card_goes_on_in_smaller_microbatches(tmp_path):
    """A limit of the allocator takes the place of the card's memory; tests/train/test_out_of_memory.py for the CPU."""

    def trained(folder: Path) -> tuple[list[float], list[float]]:
        """Losses, and the numbers of microbatches that were not the one asked for."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = Decoder(full_memory.SHAPE)
        model.init_weights(0)
        rows = RandomRows(64, 512, full_memory.SHAPE.vocab_size)
        config = tiny_run.settings(
            num_steps=2, batch_tokens=64 * 512, eval_every_steps=0, checkpoint_every_steps=0, keep_best=False
        )
        tiny_run.run(
            folder, config, objective=NextToken(rows), model=model, heldout=[], world=single("cuda"),
        )  # fmt: skip
        records = read_records(folder / "metrics.jsonl")
        losses, parts = ([value for _, value in column(records, name)] for name in ("loss", "num_microbatches"))
        return losses, parts

    whole, parts = trained(tmp_path / "whole")
    assert parts == []
    share = 0.7 * torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        found, parts = trained(tmp_path / "full")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert min(parts) > 1
    assert found == pytest.approx(whole, rel=1e-4)


def test_bf16_training_stays_near_fp32(tmp_path):
    fp32 = losses_on("cuda", tmp_path / "fp32")
    bf16 = losses_on("cuda", tmp_path / "bf16", precision=PrecisionConfig(policy="bf16_mixed"))
    assert bf16 == pytest.approx(fp32, abs=0.05)


ONLY_ON_CPU = ("Hogwild", "step arena", "oneDNN")
LOSSY = ("BF16", "FP16", "FP8", "INT8", "formats", "adapters", "noise on embeddings")
"""What switches begin with whose losses on the two devices differ by rounding, or by what the device draws."""


@pytest.mark.parametrize("switch", training_switches.SWITCHES)
def test_a_switch_trains_as_on_the_cpu(switch: str, tmp_path: Path) -> None:
    eager = partial(parallelize.compile_each_block, backend="eager")
    losses = []
    with mock.patch.object(parallelize, "compile_each_block", eager), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        if switch in ONLY_ON_CPU:
            with pytest.raises(ConfigError):
                training_switches.train([switch], tmp_path, single("cuda"))
            return
        if text := training_switches.refusal([switch]):
            pytest.skip(text)
        for device in ("cuda", "cpu"):
            losses.append(training_switches.train([switch], tmp_path / device, single(device)).loss)
    assert losses[0] == pytest.approx(losses[1], abs=0.1 if switch.startswith(LOSSY) else 2e-3)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_rollouts_are_the_cpu_s(name: str, tmp_path: Path) -> None:
    """Completions are drawn by the same numbers on both, so that two updates have the same losses."""
    found = []
    for device in ("cuda", "cpu"):
        world, losses = single(device), Losses()
        tiny_run.run(
            tmp_path / device,
            tiny_run.settings(num_steps=2, batch_tokens=8 * tiny_rollouts.ROW_LEN, eval_every_steps=0),
            model=tiny_rollouts.model(),
            objective=getattr(tiny_rollouts, name)(world),
            world=world,
            heldout=[],
            techniques=[observer("losses", losses.observe)],
        )
        found.append(losses.values)
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def completions(device: str, params: Sequence[SamplingParams], config: EngineConfig) -> list[Completion]:
    model = Decoder(SHAPE)
    model.init_weights(seed=0)
    prompts = [[(7 * number + 3 * place) % 64 for place in range(4 + number % 9)] for number in range(len(params))]
    return generate(model.to(device).eval(), prompts, params, config)


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(prefill_chunk_size=4)])
def test_greedy_completions_are_the_cpu_s(config: EngineConfig) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.0)] * 12
    for there, here in zip(completions("cuda", params, config), completions("cpu", params, config), strict=True):
        assert there.token_ids == here.token_ids
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)


def test_a_seeded_completion_is_the_same_alone_and_in_a_batch() -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=number) for number in range(8)]
    together = completions("cuda", params, EngineConfig())
    alone = completions("cuda", params[:1], EngineConfig())
    assert alone[0].token_ids == together[0].token_ids


@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed"])
def test_a_resumed_run_ends_with_the_same_bits(policy: str, tmp_path: Path) -> None:
    config = tiny_run.settings(precision=PrecisionConfig(policy=policy))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    tiny_run.run(whole, config, world=single("cuda"))
    with pytest.raises(Stopped):
        tiny_run.run(resumed, config, world=single("cuda"), techniques=tiny_run.watching(stop=tiny_run.StopAfter(5)))
    tiny_run.run(resumed, config, world=single("cuda"))
    one, other = tiny_run.final_weights(whole), tiny_run.final_weights(resumed)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
