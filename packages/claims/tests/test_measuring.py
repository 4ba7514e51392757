"""The claims' own machinery on a text of random tokens: small enough for every test run."""

from dataclasses import replace

import pytest
import torch

from modelwright.compress.int8 import Agreement
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright_claims import bf16_mixed, gradient_accumulation, int8, packing, warmup_cosine, workbench
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.int8 import ARMS, EAGER, EIGHT_BIT_RIVALS, FP32, INT4, TORCH
from modelwright_claims.judging import judge
from modelwright_claims.large_runs import NO_ONEDNN

SIZE = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=6)


@pytest.fixture
def setting(text_folder) -> Setting:
    return Setting(quick=True, folder=text_folder, progress=SilentProgress())


@pytest.mark.slow
def test_the_splits_share_no_document():
    texts = workbench.read_text(fraction=0.15, vocab_size=300, heldout_bytes=20_000)
    assert set(texts) == {"prose", "code"}
    for text in texts.values():
        splits = [set(map(tuple, documents)) for documents in (text.train, text.validation, text.test)]
        assert all(splits)
        assert not splits[1] & splits[2]
        assert text.vocab_size == texts["prose"].vocab_size


def test_padding_leaves_less_room_for_tokens(setting):
    packed, padded = (workbench.real_token_share(setting, SIZE, mode=mode) for mode in ("best_fit", "pad"))
    assert 0 < padded < packed <= 1


def test_accumulated_gradient_is_exact_and_the_mean_of_means_is_not(setting):
    rows = workbench.packed_rows(setting, seq_len=32, mode="pad", split="train")
    exact = gradient_accumulation.ExactNextToken(PackedLoader(rows, batch_rows=8, seed=0))
    model = Decoder(SIZE.model_config(64))
    model.init_weights(seed=0)
    model = model.double()
    assert max(gradient_accumulation.errors_of_loop(setting, SIZE, model, exact)) < gradient_accumulation.EXACT
    whole = gradient_accumulation.whole_batch_gradient(model, exact)
    mistaken = gradient_accumulation.mean_of_means_gradient(model, exact, 4)
    assert gradient_accumulation.relative_error(mistaken, whole) > 0.01


def test_the_definition_of_the_loss_is_the_objective_s(setting):
    rows = workbench.packed_rows(setting, seq_len=32, mode="best_fit", split="train")
    loader = PackedLoader(rows, batch_rows=4, seed=0)
    model = Decoder(SIZE.model_config(64))
    model.init_weights(seed=0)
    exact, fused = gradient_accumulation.ExactNextToken(loader), NextToken(loader)
    left, right = (gradient_accumulation.whole_batch_gradient(model, objective) for objective in (exact, fused))
    assert gradient_accumulation.relative_error(left, right) < 1e-5


def test_gradient_verdict():
    errors = {name: [1e-16, 1e-16] for name in gradient_accumulation.ERRORS}

    def kind(**changes: list[float]) -> str:
        return judge(gradient_accumulation.CLAIM, Measurement(samples=errors | changes)).kind

    assert kind() == "met"
    assert kind(**{"loop, FP64, ragged": [1e-16, 1e-3]}) == "short"
    assert kind(**{"mean of means, FP64, ragged": [1.0, 1.0]}) == "met"


def test_schedule_verdict_needs_a_significant_gain_in_every_regime():
    def measurement(*regimes: list[float]) -> Measurement:
        losses = {
            f"{name}, {regime}": of
            for regime, method in zip(warmup_cosine.REGIMES, regimes, strict=False)
            for name, of in (("warmup + cosine", method), ("constant", [3.0, 3.2, 2.9]))
        }
        steps = {f"steps, {regime}": 10 for regime in warmup_cosine.REGIMES}
        return Measurement(samples=losses, conditions=steps)

    def kind(*regimes: list[float]) -> str:
        return judge(warmup_cosine.CLAIM, measurement(*regimes)).kind

    better, uneven, worse = [2.9, 3.11, 2.8], [2.9, 3.3, 2.8], [3.1, 3.31, 3.0]
    assert kind(better, better) == "met"
    assert kind(worse, better) == "short"
    assert kind(better, uneven) == "short"
    assert kind(better) == "not judged"
    assert kind(worse) == "short"


def bf16(speeds: tuple[float, ...] = (2.1, 2.15, 2.2), gaps: tuple[float, ...] = (0.001, 0.002)) -> Verdict:
    """FP32 alone, at 1,000 tokens per second."""
    return judge(
        bf16_mixed.CLAIM,
        Measurement(
            samples={
                "tokens per second, fp32": [1000.0] * len(speeds),
                "tokens per second, bf16": [1000 * speed for speed in speeds],
                "held-out loss, fp32": [3.0] * len(gaps),
                "held-out loss, bf16": [3.0 + gap for gap in gaps],
                "peak bytes, fp32": [100.0, 101.0],
                "peak bytes, bf16": [80.0, 81.0],
            },
            conditions={NO_ONEDNN: "none here", "instruction set": "AVX2"},
        ),
    )


def test_bf16_verdict_says_what_fell_short():
    assert bf16().kind == "met"
    assert bf16(speeds=(1.6, 2.1, 2.9)).kind == "short"  # 2.2 on average
    slow = bf16(speeds=(0.1, 0.2, 0.3))
    assert slow.kind == "short"
    assert slow.reason.startswith("speed over fp32 0.2x (lower bound ")
    assert bf16(gaps=(0.2, 0.2)).reason.startswith("held-out loss above FP32 0.2 nats (upper bound 0.2 nats)")
    assert bf16(gaps=(0.0, 0.03)).kind == "short"  # 0.015 on average, without a bound near it


def test_one_repeat_is_not_called_met():
    one = bf16(speeds=(3.0,), gaps=(0.001,))
    assert one.kind == "not judged"
    assert "repeats of speed over fp32: one gives no bound" in one.reason


def test_packing_verdict():
    def kind(equal_tokens: float, equal_time: float, speed: float, uneven: float = 0.01) -> str:
        samples = {
            packing.PACKED: [3.0, 3.1], packing.EQUAL_TOKENS: [equal_tokens, equal_tokens + 0.1],
            packing.EQUAL_TIME: [equal_time, equal_time + 0.1 + uneven],
            f"{packing.PACE}{packing.PACKED}": [speed] * 2, f"{packing.PACE}{packing.PADDED}": [500.0] * 2,
        }  # fmt: skip
        return judge(packing.CLAIM, Measurement(samples=samples)).kind

    assert kind(3.0, 3.2, 950.0) == "met"
    assert kind(2.9, 3.2, 950.0) == "short"
    assert kind(3.0, 2.9, 950.0) == "short"
    assert kind(3.0, 3.2, 450.0) == "short"
    assert kind(3.0, 3.2, 950.0, uneven=0.5) == "short"


def test_both_sides_of_packing_hold_as_many_tokens_as_whole_rows_allow():
    assert packing.equal_batches(4, 1.6225) == (8, 13)  # 12.98; four rows would be 6.49
    assert packing.equal_batches(4, 2.0) == (4, 8)
    assert packing.equal_batches(4, 1.09375) == (12, 13)  # 13.125; 16 rows would be 17.5


def test_int8_verdict():
    agreement = Agreement(
        num_tokens=100, reference_loss=3.0, int8_loss=3.001, reference_accuracy=0.5, int8_accuracy=0.499,
        divergence=1e-4, same_first=0.99, max_logit_gap=0.1,
    )  # fmt: skip
    losses = {int8.TRAINED["4 bits"]: 3.01, int8.NEAREST: 3.05, int8.GPTQ: 3.03}

    def judged(
        changed: dict[str, float] | None = None, *, lost: float = 0.001, trained: float = 3.01,
        num_bytes: int = 110, seeds: int = 2, without: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        fast = dict.fromkeys(ARMS, 400.0) | {EAGER: 100.0, TORCH: 110.0, FP32: 120.0} | (changed or {})
        rounds = [
            {case: {name: pace + turn for name, pace in fast.items() if name not in without} for case in int8.CASES}
            for turn in range(2)
        ]
        given = losses | {int8.TRAINED["4 bits"]: trained}
        seed = {name: replace(agreement, int8_loss=given.get(name, 3.001)) for name in int8.VARIANTS}
        seed[int8.SERVED] = replace(seed[int8.SERVED], int8_accuracy=0.5 - lost)
        missing = {f"not at hand: {name}": "it is not installed" for name in without}
        sizes = {"fp32": 400, "int8": num_bytes, "int4": 90}
        return judge(int8.CLAIM, int8.measurement([seed] * seeds, rounds, sizes, missing)).line

    llama = ("llama.cpp, 8 bits", "llama.cpp, 4 bits")
    assert judged().startswith("met")
    assert "not at hand: llama.cpp, 8 bits, llama.cpp, 4 bits" in judged(without=llama)
    own = "short: Modelwright, INT8 over"
    assert judged({EAGER: 150.0}).startswith(f"{own} transformers, FP32 in decode, 1 stream 2.66x")
    assert judged({FP32: 300.0}).startswith(f"{own} Modelwright, FP32 in decode, 1 stream 1.33x")
    assert f"{own[7:]} Modelwright, FP32 in prefill, 256 tokens 1.33x" in judged({FP32: 300.0})
    assert f"{own[7:]} OpenVINO GenAI, 8 bits in prefill, 256 tokens 0.5x" in judged({"OpenVINO GenAI, 8 bits": 800.0})
    slower = judged({"ONNX Runtime GenAI, 8 bits": 500.0})
    assert slower.startswith(f"{own} ONNX Runtime GenAI, 8 bits in decode, 1 stream 0.8x")
    assert "Modelwright, INT4 over llama.cpp, 4 bits in decode, 32 streams 0.5x" in judged({llama[1]: 800.0})
    assert judged({INT4: 100.0}).startswith("met")  # the faster of the two forms of activations counts
    assert judged(without=tuple(EIGHT_BIT_RIVALS)).startswith("not judged: the record lacks another engine in decode")
    assert judged(lost=0.006).startswith("short: accuracy that INT8 loses 1.2%")
    assert "what training on the grid gains over 4 bits, GPTQ -0.01 nats" in judged(trained=3.04)
    assert judged(num_bytes=300).startswith("short: size 1.33x (exact), not at least 2.4x")
    assert judged(seeds=1).startswith("not judged: the record lacks repeats of accuracy that INT8 loses")


def test_rows_of_a_split_are_made_once(setting):
    first = workbench.packed_rows(setting, seq_len=32, mode="pad", split="test")
    again = workbench.packed_rows(setting, seq_len=32, mode="pad", split="test")
    assert first.folder == again.folder
    assert torch.equal(next(first.batches(4)).input_ids_BT, next(again.batches(4)).input_ids_BT)
