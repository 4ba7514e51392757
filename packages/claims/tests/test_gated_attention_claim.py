"""The claim on selected heads: its verdict from given samples, its counts, and its arms as tiny runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import AttentionConfig, Decoder, ModelConfig
from modelwright_claims import gated_attention as arms
from modelwright_claims import gated_attention as claim
from modelwright_claims.claim import Setting, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.training_run import Outcome, Processes
from modelwright_claims.workbench import Size

TINY = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=2, num_steps=4)
SHAPE = ModelConfig(
    vocab_size=32, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=4, ffn_dim=32, head_dim=8, max_seq_len=16
)


def comparison(
    *, loss: float = 2.02, rival: float = 2.1, share: float = 0.62, training: float = 0.65, decoding: float = 0.6
) -> arms.Comparison:
    losses = {arms.PLAIN: 2.0, arms.METHOD: loss} | dict.fromkeys(arms.RIVALS, rival)
    factors = {arms.METHOD: (share, training)}
    noise = (0.0, 0.001, 0.002)
    return arms.Comparison(
        rates=dict.fromkeys(losses, 2e-3),
        window=64,
        final={
            name: [
                Outcome(heldout_loss=mean + one * (1.5 if name in arms.RIVALS else 1.0), seconds=1.0) for one in noise
            ]
            for name, mean in losses.items()
        },
        costs={
            name: [arms.Cost(flops=1e6 * flops, seconds=0.1 * seconds, open_share=flops) for _ in noise]
            for name in losses
            for flops, seconds in [factors.get(name, (1.0, 1.0))]
        },
        decoding=[{arms.OWN: 0.2 + 0.1 * decoding, arms.OPEN: 0.3, arms.CLOSED: 0.2} for _ in noise],
    )


def judged(**changes: Any) -> Verdict:
    return judge(claim.CLAIM, claim.measurement(comparison(**changes), TINY))


def test_met_needs_loss_flops_both_times_and_every_rival() -> None:
    met = judged()
    assert met.kind == "met", met.reason
    assert set(claim.CLAIM.headline) <= set(met.figures)
    assert met.figures["time of attention in decoding, dynamic to all heads"].value == pytest.approx(0.6)
    assert met.figures["held-out loss above all heads"].value == pytest.approx(1.0, abs=0.01)
    for changes in ({"loss": 2.05}, {"share": 0.66}, {"training": 0.71}, {"decoding": 0.71}, {"rival": 2.01}):
        assert judged(**changes).kind == "short", changes


def test_without_the_kernel_the_time_of_decoding_is_lacking() -> None:
    found = replace(comparison(), decoding=[{}, {}, {}])
    verdict = judge(claim.CLAIM, claim.measurement(found, TINY))
    assert verdict.kind == "not judged"
    assert "decode step" in verdict.reason


def rows(*lengths: int) -> TokenBatch:
    return TokenBatch.of_sequences([[(3 * place) % 32 for place in range(length + 1)] for length in lengths])


def test_flops_are_those_of_what_tokens_see() -> None:
    batch = rows(6, 3)
    model = Decoder(SHAPE).eval()
    model.init_weights(0)
    seen = [sum(range(1, length + 1)) for length in (batch.segments_BT >= 0).sum(dim=1).tolist()]
    whole = 2 * 4 * 4 * 8 * sum(seen)
    num_tokens = int((batch.segments_BT >= 0).sum())
    projected = (
        2
        * num_tokens
        * sum(
            weights.numel() for name, weights in model.named_parameters() if "attention." in name and weights.dim() == 2
        )
    )
    assert arms.attention_flops(model, [batch]) == whole + projected
    window = replace(SHAPE, attention=AttentionConfig(window=1, window_layers=(0,)))
    assert arms.attention_flops(Decoder(window), [batch]) == projected + whole / 2 + 4 * 4 * 8 * num_tokens
    selecting = Decoder(replace(SHAPE, head_budget=0.5))
    selecting.init_weights(0)
    for kind, heads in ((arms.OPEN, 1.0), (arms.CLOSED, 0.0)):
        routed = arms.with_routers(selecting, kind)
        assert arms.attention_flops(routed, [batch]) == projected + heads * whole + 2 * 2 * 16 * 4 * num_tokens
        assert arms.open_share(routed, [batch]) == heads


@pytest.mark.slow
def test_the_arms_are_made_and_measured(tmp_path: Path) -> None:
    setting = Setting(folder=tmp_path, quick=True, progress=SilentProgress())
    bench = arms.Bench(setting, size=TINY, rates=(2e-3,), seeds=(401,), processes=Processes(), at_once=1, num_rounds=1)
    before = torch.get_num_threads()
    found = bench.compare()
    assert torch.get_num_threads() == before
    assert {*found.final} == {arms.PLAIN, arms.METHOD, *arms.RIVALS}
    assert all(math.isfinite(one.heldout_loss) for of in found.final.values() for one in of)
    (plain,), (method,), (fewer,), (window,) = (
        found.costs[name] for name in (arms.PLAIN, arms.METHOD, arms.FEWER, arms.WINDOW)
    )
    assert fewer.flops == plain.flops * arms.NUM_STATIC / arms.NUM_HEADS
    assert 0 < method.open_share < 1
    assert method.flops < plain.flops
    # A window keeps the projections, which are at least four fifths of the FLOPs of rows as short as these.
    assert 0.8 < window.flops / plain.flops < 0.95
    assert arms.WINDOW_STEP <= found.window < TINY.seq_len
    verdict = judge(claim.CLAIM, claim.measurement(found, TINY))
    assert verdict.kind in ("met", "short", "not judged")
