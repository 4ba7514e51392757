"""Verdicts of the memory claims from given figures, and the probe's own accounting."""

from collections.abc import Sequence

import pytest

from modelwright.model.decoder import ModelConfig
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright_claims import activation_checkpointing, memory_probe
from modelwright_claims.claim import Measurement, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.memory_probe import Measured
from modelwright_plan.claims import zero_memory

MODEL = ModelConfig(
    vocab_size=64, num_layers=2, model_dim=64, num_heads=2, num_kv_heads=2, head_dim=32, ffn_dim=160, max_seq_len=64
)


def measured(peak: float, *, states: float = 100.0, flops: float = 3.0, step_s: float = 1.0) -> Measured:
    return Measured(rank=0, peak_bytes=int(peak), states_bytes=int(states), step_s=step_s, flops=flops)


def judge_checkpointing(peaks: list[float], flops: float) -> Verdict:
    found = {
        "none": [measured(1100.0), measured(1101.0)],
        "unit of 1": [measured(peak, flops=flops, step_s=1.3) for peak in peaks],
    }
    samples = activation_checkpointing.samples_of(found, {"none": 1100, "unit of 1": 350})
    return judge(activation_checkpointing.CLAIM, Measurement(samples=samples))


def test_checkpointing_is_met_when_enough_is_saved_for_little_enough():
    met = judge_checkpointing([350.0, 351.0], 3.9)
    assert met.kind == "met"
    assert met.figures["memory saved, unit of 1"].value == pytest.approx(75.0, abs=0.1)
    assert round(met.figures["more FLOPs, unit of 1"].value) == 30
    assert met.figures["time of a step, unit of 1"].value == 1.3
    assert judge_checkpointing([500.0, 501.0], 3.9).kind == "short"
    assert judge_checkpointing([350.0, 351.0], 4.2).kind == "short"
    assert judge_checkpointing([350.0, 420.0], 3.9).kind == "short"  # 71.5% on average, without a bound near it


def test_counted_flops_have_to_be_in_the_record():
    samples = activation_checkpointing.samples_of(
        {name: [measured(peak)] * 2 for name, peak in (("none", 1100.0), ("unit of 1", 350.0))},
        {"none": 1100, "unit of 1": 350},
    )
    kept = {name: of for name, of in samples.items() if not name.startswith(activation_checkpointing.FLOPS)}
    lacking = judge(activation_checkpointing.CLAIM, Measurement(samples=kept))
    assert lacking.line.startswith("not judged: the record lacks samples 'FLOPs of a step, unit of 1'")


LARGE = {"states": 2.8e12, "devices": 64.0, "per device": 7e10}


def judge_zero(states: float, peak: float, num_repeats: int = 2) -> Verdict:
    theory = zero_memory.theory_bytes(MODEL.num_parameters, "full", 2)
    repeats = [measured(peak * 1000, states=share * theory) for share in (states, states + 0.001)][:num_repeats]
    cases: dict[zero_memory.Case, Sequence[Measured]] = {(3, 2, 1): repeats}
    return judge(zero_memory.CLAIM, zero_memory.measurement(cases, {(3, 2, 1): 1000}, MODEL, large=LARGE))


def test_zero_is_met_when_states_and_peaks_are_near():
    met = judge_zero(1.05, 1.05)
    assert met.kind == "met"
    assert met.figures["175B, in all, planned"].value == pytest.approx(4.48)
    assert judge_zero(1.20, 1.05).kind == "short"
    assert judge_zero(1.05, 1.20).kind == "short"


def test_the_share_of_a_rank_that_is_split_both_ways_is_shown():
    theory = zero_memory.theory_bytes(MODEL.num_parameters, "none", 1)
    cases: dict[zero_memory.Case, Sequence[Measured]] = {
        (0, 1, 1): [measured(1000, states=theory), measured(1000, states=1.01 * theory)],
        (3, 8, 2): [measured(200, states=0.13 * theory), measured(200, states=0.13 * 1.01 * theory)],
    }
    found = zero_memory.measurement(cases, {(0, 1, 1): 1000, (3, 8, 2): 200}, MODEL, large=LARGE)
    verdict = judge(zero_memory.CLAIM, found)
    assert (verdict.kind, verdict.figures[zero_memory.SPLIT_SHARE].value) == ("met", pytest.approx(0.13, rel=1e-4))


def test_one_sample_of_resident_memory_is_no_bound():
    assert judge_zero(1.05, 1.05, num_repeats=1).kind == "not judged"


@pytest.mark.slow
def test_probe_counts_what_a_step_computes():
    """Units of one layer compute all but the last product of each layer again, attention included."""
    plain, again = memory_probe.measure_all(
        [
            activation_checkpointing.probe(MODEL, 2, config, count_flops=True)
            for config in (
                ActivationCheckpointingConfig(),
                ActivationCheckpointingConfig(mode="full", layers_per_segment=1),
            )
        ]
    )
    head = 2 * MODEL.vocab_size * MODEL.model_dim
    products = 128 * (MODEL.flops_per_token(0) - head)
    attention = 128 * (MODEL.flops_per_token(65 / 2) - MODEL.flops_per_token(0))
    labeled = 126  # the last token of a row predicts nothing
    assert plain[0].flops == pytest.approx(3 * products + 3.5 * attention + 3 * labeled * head, rel=1e-6)
    last = 128 * 2 * MODEL.num_layers * MODEL.ffn_dim * MODEL.model_dim
    assert again[0].flops - plain[0].flops == pytest.approx(products - last + attention, rel=1e-6)
    assert plain[0].states_bytes > 0
