"""Reward models: losses and gradients equal those written out pair by pair; `transformers` gives the same scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
import transformers
from torch import Tensor

import preference_rows
from modelwright.core.config import ModelError, parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import TokenSequence
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model, save_sequence_classifier
from modelwright.objectives.preference import HEAD, RewardModelConfig, RewardModeling, load_reward_model, reward_model
from modelwright.train.build import attach_modules
from modelwright.train.objective import TermSums, forward

NUM_PAIRS, PAD = 10, 0
CASES: list[dict[str, Any]] = [
    {},
    {"use_margins": True},
    {"center_rewards_coefficient": 0.3},
    {"use_margins": True, "center_rewards_coefficient": 0.3},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    return preference_rows.packed(tmp_path_factory.mktemp("pairs"), preference_rows.pairs(NUM_PAIRS))


def scorer(seed: int, dtype: torch.dtype = torch.float64) -> Decoder:
    """A model with a head, large enough for rewards of about one."""
    model = preference_rows.other_model(seed, dtype)
    attach_modules(model, RewardModeling(tiny_run.Rows(), RewardModelConfig()), seed)
    with torch.no_grad():
        model.heads[HEAD].get_parameter("weight").mul_(30.0)
    return model


def reward_of(model: Decoder, sequence: TokenSequence) -> Tensor:
    """The reward of one sequence in a forward pass of its own."""
    ids_1T = torch.from_numpy(np.asarray(sequence.ids))[None]
    segments_1T = torch.zeros_like(ids_1T, dtype=torch.int32)
    hidden_1TD = model(ids_1T, torch.arange(ids_1T.shape[1])[None], packed_attend(segments_1T, model.config.windows))
    return hidden_1TD[0, -1] @ model.heads[HEAD].get_parameter("weight")[0]


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: " ".join(changes) or "plain")
def test_losses_and_gradients_equal_those_written_out(changes: dict[str, Any], rows: PackedRows) -> None:
    config = parse(RewardModelConfig, changes)
    objective = RewardModeling(PackedLoader(rows, batch_rows=rows.num_groups, seed=1), config)
    model = scorer(8)
    parameters = [one for name, one in model.named_parameters() if not name.startswith("head.")]
    batch = next(rows.batches(rows.num_groups)).padded(rows.num_groups + 2)
    factors = {key: 1 / float(weight) for key, weight in objective.weights(batch).items()}
    sums = TermSums(factors, objective.metric_names, torch.device("cpu"))
    parts = batch.split(batch.num_groups)
    total = torch.stack([sums.add(objective.losses(forward(model, one), one, model)).sum() for one in parts]).sum()
    gradients = torch.autograd.grad(total, parameters)

    losses, rewards = [], []
    for chosen, rejected in preference_rows.pairs(NUM_PAIRS):
        good, bad = reward_of(model, chosen), reward_of(model, rejected)
        margin = np.float32(chosen.value or 0.0) if config.use_margins else 0.0  # values are stored in FP32
        probability = 1 / (1 + torch.exp(-(good - bad - float(margin))))
        losses.append(-probability.log() + config.center_rewards_coefficient * (good + bad) ** 2)
        rewards.append(torch.stack([good, bad]).detach())
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert other.any()
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-10)
    _, metrics = sums.read(sums.vector.tolist())
    rewards_P2 = torch.stack(rewards)
    assert 0.0 < metrics["accuracy"] < 1.0
    assert metrics == pytest.approx(
        {
            "accuracy": float((rewards_P2[:, 0] > rewards_P2[:, 1]).double().mean()),
            "margin": float((rewards_P2[:, 0] - rewards_P2[:, 1]).mean()),
            "mean_reward": float(rewards_P2.mean()),
        }
    )


def padded_rows() -> tuple[list[TokenSequence], TokenBatch]:
    """One sequence in each row, padded at the end."""
    sequences = [one for pair in preference_rows.pairs(3) for one in pair]
    return sequences, TokenBatch.of_sequences([one.ids for one in sequences]).padded(len(sequences))


def their_scores(folder: Path, batch: TokenBatch) -> Tensor:
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return theirs(batch.input_ids_BT, attention_mask=(batch.segments_BT >= 0).long()).logits[:, 0]


def test_a_saved_model_scores_the_same_here_and_in_transformers(tmp_path: Path) -> None:
    model, (sequences, batch) = scorer(8, torch.float32), padded_rows()
    save_sequence_classifier(model, tmp_path, head=HEAD, label="reward", eos_id=1, pad_id=PAD)
    with torch.no_grad():
        expected = torch.stack([reward_of(model, one) for one in sequences])
    for scores in (load_reward_model(tmp_path).score(batch, num_parts=2), reward_model(model).score(batch)):
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(their_scores(tmp_path, batch), expected, rtol=0, atol=1e-4)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.architectures, config.num_labels) == (["Qwen3ForSequenceClassification"], 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_transformers_wrote_is_read(tied: bool, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=PAD, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    config.num_labels = 1
    torch.manual_seed(0)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    _, batch = padded_rows()
    torch.testing.assert_close(
        load_reward_model(tmp_path).score(batch), their_scores(tmp_path, batch), rtol=0, atol=1e-4
    )


def test_packed_rows_have_a_score_for_every_piece(rows: PackedRows) -> None:
    model = scorer(8, torch.float32)
    batch = next(rows.batches(rows.num_groups)).padded(rows.num_groups + 1)
    scores_BS = reward_model(model).piece_scores(batch)
    counts = (batch.segments_BT.amax(dim=1) + 1).tolist()
    assert [int((row != 0).sum()) for row in scores_BS] == counts
    last = [float(row[number - 1]) if number else 0.0 for row, number in zip(scores_BS, counts, strict=True)]
    assert reward_model(model).score(batch).tolist() == pytest.approx(last)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    save_model(tiny_run.tiny_model(), tmp_path / "model")
    with pytest.raises(ModelError, match="holds a Qwen3ForCausalLM, not a sequence classification"):
        load_reward_model(tmp_path / "model")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    config.num_labels = 3
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match=r"score.weight \[3, 32\] instead of \[1, 32\]"):
        load_reward_model(tmp_path / "three")
