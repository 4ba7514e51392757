"""The claims' own machinery on a text of random tokens: small enough for every test run."""

import pytest
import torch

from modelwright.compress.compare import Agreement, SpeedPair
from modelwright.core.progress import SilentProgress
from modelwright.data.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright_claims import bf16_mixed, gradient_accumulation, int8, packing, warmup_cosine, workbench
from modelwright_claims.claim import Setting
from modelwright_claims.experiment import Samples
from modelwright_claims.training_run import Outcome

SIZE = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=6)


@pytest.fixture
def setting(text_folder) -> Setting:
    return Setting(quick=True, folder=text_folder, progress=SilentProgress())


def run(loss: float, tokens_per_s: float = 1000.0) -> Outcome:
    steps = {"num_tokens": [tokens_per_s] * 4, "step_time_s": [1.0] * 4}
    return Outcome(heldout_loss=loss, seconds=4.0, steps=steps)


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
    exact, fused = gradient_accumulation.ExactNextToken(loader), Pretrain(loader)
    left, right = (gradient_accumulation.whole_batch_gradient(model, objective) for objective in (exact, fused))
    assert gradient_accumulation.relative_error(left, right) < 1e-5


def test_gradient_verdict():
    errors = {f"{who}, FP64, {rows}": [1e-16] for who in ("loop", "mean of means") for rows in ("full", "ragged")}
    shares = {"full": 1.0, "ragged": 0.5}
    assert gradient_accumulation.judge(errors, shares, SIZE).kind == "met"
    assert gradient_accumulation.judge(errors | {"loop, FP64, ragged": [1e-3]}, shares, SIZE).kind == "short"


def test_schedule_verdict_needs_a_significant_gain_in_every_regime():
    def samples(method: list[float]) -> Samples:
        losses = {"warmup + cosine": method, "constant": [3.0, 3.2, 2.9]}
        return Samples(
            runs={name: [run(loss) for loss in of] for name, of in losses.items()},
            tuning={name: {1e-3: 1.0, 2e-3: 0.5, 4e-3: 0.7} for name in losses},
            tuned={},
        )

    def judge(**regimes: list[float]) -> str:
        sizes = dict.fromkeys(regimes, SIZE)
        return warmup_cosine.judge(sizes, {name: samples(losses) for name, losses in regimes.items()}).kind

    better, uneven, worse = [2.9, 3.11, 2.8], [2.9, 3.3, 2.8], [3.1, 3.31, 3.0]
    assert judge(short=better, long=better) == "met"
    assert judge(short=worse, long=better) == "short"
    assert judge(short=better, long=uneven) == "short"


def test_bf16_verdict_says_what_fell_short_and_why():
    rates = {"fp32": 1e11, "bf16": 3e11}
    peaks = {"fp32": 100, "bf16": 80}

    def judge(speeds=(1.6, 2.1, 2.3), losses=(3.001, 3.102), rates=rates):
        paces = {"fp32": [1000.0] * 3, "bf16": [1000 * speed for speed in speeds]}
        return bf16_mixed.judge(paces, {"fp32": [3.0, 3.1], "bf16": losses}, peaks, rates, SIZE, SIZE)

    assert judge().kind == "met"
    result = judge(speeds=(0.1, 0.2, 0.3), rates=rates | {"bf16": 1e10})
    assert result.kind == "short"
    assert result.reason.startswith("speed short by 1.80x")
    assert "0.10x FP32" in result.reason
    assert "the rest of the step" in judge(speeds=(1.1, 1.2, 1.3)).reason
    assert "loss worse by 0.200 nats" in judge(losses=(3.2, 3.3)).reason
    paces = {"fp32": [100.0] * 2, "bf16": [300.0, 310.0], bf16_mixed.BY_ONEDNN: [200.0] * 2}
    fairer = bf16_mixed.judge(paces, {"fp32": [3.0, 3.1], "bf16": [3.001, 3.102]}, peaks, rates, SIZE, SIZE)
    assert fairer.figures["speed-up over FP32 by oneDNN"].value == pytest.approx(1.525)
    assert "1.52x FP32 whose products are oneDNN's" in fairer.reason


def test_packing_verdict():
    def judge(equal_tokens: float, equal_time: float, speed: float) -> str:
        padded = [run(equal_tokens, 500.0), run(equal_tokens + 0.1, 500.0)]
        in_time = [run(equal_time, 500.0), run(equal_time + 0.11, 500.0)]
        packed = [run(3.0, speed), run(3.1, speed)]
        return packing.judge(packed, padded, in_time, shares=(1.0, 0.5), size=SIZE, padded=SIZE).kind

    assert judge(3.0, 3.2, 950.0) == "met"
    assert judge(2.9, 3.2, 950.0) == "short"
    assert judge(3.0, 2.9, 950.0) == "short"
    assert judge(3.0, 3.2, 450.0) == "short"


def test_both_sides_of_packing_hold_as_many_tokens_as_whole_rows_allow():
    assert packing.equal_batches(4, 1.6225) == (8, 13)  # 12.98; four rows would be 6.49
    assert packing.equal_batches(4, 2.0) == (4, 8)
    assert packing.equal_batches(4, 1.09375) == (12, 13)  # 13.125; 16 rows would be 17.5


def test_int8_verdict():
    agreement = Agreement(
        num_tokens=100, reference_loss=3.0, int8_loss=3.001, divergence=1e-4, same_first=0.99, max_logit_gap=0.1
    )

    def judge(speed: float, num_bytes: tuple[int, int]) -> str:
        pairs = {
            "decode": SpeedPair(num_streams=1, num_tokens=1, reference_tokens_per_s=100.0, int8_tokens_per_s=speed)
        }
        return int8.judge(agreement, pairs, num_bytes, SIZE.model_config(64), SIZE).verdict

    assert judge(200.0, (400, 110)).startswith("met")
    assert judge(120.0, (400, 110)).startswith("short: decode short by 0.30x")
    assert judge(200.0, (400, 300)).startswith("short: size short by")


def test_rows_of_a_split_are_made_once(setting):
    first = workbench.packed_rows(setting, seq_len=32, mode="pad", split="test")
    again = workbench.packed_rows(setting, seq_len=32, mode="pad", split="test")
    assert first.folder == again.folder
    assert torch.equal(next(first.batches(4)).input_ids_BT, next(again.batches(4)).input_ids_BT)
