"""Shares by scores: the published softmax, scores that are measured, and the same bits after a resume."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch

from modelwright.core.config import Stopped, parse
from modelwright.data.rows.loader import PackedRows, PlannedLoader, build_loader
from modelwright.data.rows.order import BatchingConfig, Mixture, MixtureConfig, softmax_shares
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.objectives.next_token import NextToken
from modelwright.train.techniques.score_mixture import score_mixture
from refusals import config_error

NUM_STEPS, EVERY = 8, 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, one of which cannot be learned."""
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp("rows")
    sequences = []
    for number in range(240):
        ids = draw.integers(2, tiny_run.VOCABULARY, 20) if number % 2 else np.full(20, 2 + number % 4)
        sequences.append(TokenSequence(ids, None, "noise" if number % 2 else "even"))
    pack(sequences, folder, PackConfig(seq_len=tiny_run.LENGTH), vocab_size=tiny_run.VOCABULARY, eos_id=1)
    return folder


def train(folder: Path, rows: Path, scores: dict[str, float], *, stop_after: int = 0) -> tuple[Mixture, list[float]]:
    """Train, or resume; returns the mixture, and the share of noise in each batch that was read."""
    data = PackedRows(rows)
    config = parse(BatchingConfig, {"mixture": {"update": "scores", "weights": scores}})
    loader = build_loader(
        data, config, batch_rows=tiny_run.ROWS, by_tokens=False, seed=5, num_steps_of=lambda per_epoch: NUM_STEPS,
        row_losses=lambda: np.zeros(0),
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    noise, objective, seen = set(data.source_groups("noise").tolist()), NextToken(loader), []
    planned = loader._batch

    def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen, epochs = planned(index)
        seen.append(sum(row in noise for row in chosen.tolist()) / len(chosen))
        return chosen, epochs

    loader._batch = batch  # type: ignore[method-assign]
    heldout = {name: [data.gather(data.source_groups(name)[:4])] for name in data.sources}
    build = partial(
        score_mixture, config.mixture, mixture=loader.mixture, objective=objective, heldout=heldout, every=EVERY
    )
    techniques = tiny_run.watching(stop=tiny_run.StopAfter(stop_after)) if stop_after else []
    settings = tiny_run.settings(num_steps=NUM_STEPS, checkpoint_every_steps=1, keep_last=20)
    tiny_run.run(
        folder, settings, objective=objective, techniques=[*techniques, build], heldout=[data.gather(np.arange(4))]
    )
    return loader.mixture, seen


def test_shares_are_the_published_softmax() -> None:
    found = softmax_shares(np.array([0.7, 0.3]), beta=2.0)
    expected = math.exp(1.4) / (math.exp(1.4) + math.exp(0.6))
    np.testing.assert_allclose(found, [expected, 1 - expected])
    assert found[0] == pytest.approx(0.690, abs=5e-4)
    assert MixtureConfig().score_sharpness == 2.0
    np.testing.assert_allclose(softmax_shares(np.array([1e4, 0.0]), beta=2.0), [1.0, 0.0])


def test_given_scores_decide_every_batch(rows: Path, tmp_path: Path) -> None:
    mixture, seen = train(tmp_path, rows, {"noise": 0.7, "even": 0.3})
    assert np.mean(seen) == pytest.approx(0.69, abs=1 / (NUM_STEPS * tiny_run.ROWS))
    assert not mixture.history


def test_measured_scores_move_shares_to_what_is_least_learned(rows: Path, tmp_path: Path) -> None:
    mixture, seen = train(tmp_path / "whole", rows, {})
    assert seen[0] == 0.5
    assert [first for first, _ in mixture.history] == [2, 4, 6, 8]
    place = mixture.names.index("noise")
    assert mixture.history[0][1][place] == pytest.approx(0.5)  # every source has all of its first loss
    assert mixture.history[-1][1][place] > 0.55


def test_a_stopped_run_goes_on_with_the_same_bits(rows: Path, tmp_path: Path) -> None:
    mixture, seen = train(tmp_path / "whole", rows, {"even": 0.4})
    with pytest.raises(Stopped):
        train(tmp_path / "cut", rows, {"even": 0.4}, stop_after=5)
    again, rest = train(tmp_path / "cut", rows, {"even": 0.4})
    assert again.history == mixture.history
    assert rest == seen[len(seen) - len(rest) :]
    first, second = (tiny_run.final_weights(tmp_path / name, NUM_STEPS) for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_settings_without_effect_and_sources_that_cannot_be_measured_are_refused(rows: Path) -> None:
    with config_error("temperature", match="temperature: does not apply to update scores"):
        MixtureConfig(update="scores", temperature=2.0)
    config = MixtureConfig(update="scores", weights={"even": 1.0})
    mixture = Mixture(config, ["even", "noise"], [1, 1], num_steps=2)
    with config_error("batching.mixture.update", match=r"'noise' has no held-out rows.*give it a score"):
        score_mixture(config, None, mixture=mixture, objective=NextToken(None), heldout={}, every=1)  # type: ignore[arg-type]


def test_modalities_are_packed_apart_by_their_kind() -> None:
    assert MixtureConfig(update="scores", weights={"code": 0.7, "image": 0.3}).group_by == "kind"
    with config_error("batching.mixture.weights", match=r"batching\.mixture\.weights: unknown source 'audio'"):
        Mixture(MixtureConfig(update="scores", weights={"audio": 1.0}), ["code", "image"], [1, 1], num_steps=2)
