"""NEFTune: the noise itself, the same training under every layout and after a stop, and no noise in evaluation."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from tiny_run import Rows

from distributed import run_distributed
from modelwright.core.config import ConfigError, Stopped
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.job import TrainResult
from modelwright.train.techniques.neftune import EmbeddingNoise, row_keys

ALPHA = 5.0
NUM_STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "zero 3": {"zero_stage": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
EXACT = {"rtol": 1e-11, "atol": 1e-13}


def noisy(**changes: Any):
    once = {"eval_every_steps": 0, "checkpoint_every_steps": 0, "keep_best": False}
    return tiny_run.settings(**{"neftune_noise_alpha": ALPHA, "num_steps": NUM_STEPS, **once, **changes})


def noise(step: int = 0, seed: int = 1) -> EmbeddingNoise:
    return EmbeddingNoise(alpha=ALPHA, seed=seed, tensor=single(), step=step)


def test_noise_is_bounded_by_the_length_of_each_document() -> None:
    batch, width = Rows().batch(3), 16
    zeros = torch.zeros(*batch.input_ids_BT.shape, width)
    added = noise()(zeros, batch.input_ids_BT, batch.positions_BT)
    for row in range(batch.num_rows):
        starts = torch.where(batch.positions_BT[row] == 0)[0].tolist()
        for start, end in zip(starts, [*starts[1:], batch.input_ids_BT.shape[1]], strict=True):
            bound = ALPHA / ((end - start) * width) ** 0.5
            part = added[row, start:end] / bound
            assert float(part.abs().max()) <= 1.0
            if part.numel() > 200:
                assert float(part.std()) == pytest.approx(3**-0.5, rel=0.15)
                assert abs(float(part.mean())) < 0.15


def test_noise_follows_seed_step_and_row_alone() -> None:
    batch = Rows().batch(3)
    zeros = torch.zeros(*batch.input_ids_BT.shape, 8)
    inputs = (zeros, batch.input_ids_BT, batch.positions_BT)
    whole = noise()(*inputs)
    assert torch.equal(whole[2:3], noise()(*(part[2:3] for part in inputs)))
    assert len({float(values.sum()) for values in whole}) == batch.num_rows
    assert not torch.equal(whole, noise(step=1)(*inputs))
    assert not torch.equal(whole, noise(seed=2)(*inputs))


def test_keys_tell_rows_apart() -> None:
    tokens = torch.randint(50, (200, 64), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 17] += 1
    assert len(set(row_keys(torch.cat([tokens, changed, tokens.flip(1)])).tolist())) == 600


def test_only_training_sees_noise(tmp_path: Path) -> None:
    model, batch = tiny_run.tiny_model(), Rows().batch(1)
    model.embedding_hooks.append(noise())
    plain = tiny_run.tiny_model()
    inputs = (batch.input_ids_BT, batch.positions_BT)
    assert not torch.equal(model.embed(*inputs), plain.embed(*inputs))
    with torch.no_grad():
        assert torch.equal(model.embed(*inputs), plain.embed(*inputs))
    trained = tiny_run.tiny_model()
    tiny_run.run(tmp_path, noisy(num_steps=1), model=trained)
    assert trained.embedding_hooks == []


def test_held_out_losses_have_none_and_training_losses_do(tmp_path: Path) -> None:
    """With a rate that changes nothing: the same held-out loss, another training loss."""
    losses = {}
    for alpha in (0.0, ALPHA):
        config = noisy(neftune_noise_alpha=alpha, learning_rate=1e-12, weight_decay=0.0, num_steps=1)
        losses[alpha] = tiny_run.run(tmp_path / str(alpha), config)
    assert losses[0.0].heldout_loss == pytest.approx(losses[ALPHA].heldout_loss, abs=1e-7)
    assert abs(losses[0.0].loss - losses[ALPHA].loss) > 1e-4


def train_all(world: World, folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """The weights of every layout, in float64, with two microbatches; and why context parallelism is refused."""
    weights = {}
    with pytest.raises(ConfigError) as refusal:
        tiny_run.run(folder / "context", noisy(), world=world, parallel=ParallelConfig(context=2))
    for name, layout in LAYOUTS.items():
        model: Decoder = tiny_run.run_in_float64(
            folder / name,
            noisy(gradient_accumulation_steps=2),
            world=world,
            parallel=ParallelConfig(**layout),
            heldout=[],
        )
        weights[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return weights, str(refusal.value)


def test_every_layout_trains_to_the_same_weights(tmp_path: Path) -> None:
    one = tiny_run.run_in_float64(tmp_path / "one", noisy(), heldout=[]).state_dict()
    plain = tiny_run.run_in_float64(tmp_path / "plain", noisy(neftune_noise_alpha=0.0), heldout=[]).state_dict()
    assert not torch.allclose(one["embedding.weight"], plain["embedding.weight"], rtol=1e-3)
    (first, refusal), (second, _) = run_distributed(train_all, 2, tmp_path / "two")
    assert "neftune_noise_alpha: 5.0 needs whole rows on every rank, which parallel.context 2 takes away" in refusal
    for name in LAYOUTS:
        for key, weight in one.items():
            torch.testing.assert_close(first[name][key], weight, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(second[name][key], weight, **EXACT)


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = noisy(checkpoint_every_steps=1, num_steps=6)
    whole: TrainResult = tiny_run.run(tmp_path / "whole", config)
    stopper = tiny_run.watching(stop=tiny_run.StopAfter(3))
    with pytest.raises(Stopped, match="stopped"):
        tiny_run.run(tmp_path / "cut", config, techniques=stopper)
    again = tiny_run.run(tmp_path / "cut", config)
    assert again.loss == whole.loss
    losses = [column(read_records(tmp_path / name / "metrics.jsonl"), "loss") for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    ends = [tiny_run.final_weights(tmp_path / name, 6) for name in ("whole", "cut")]
    assert all(torch.equal(weight, ends[1][key]) for key, weight in ends[0].items())
