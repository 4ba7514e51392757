"""Pretraining and SFT: sums and weights that add up over parts; answers only; a lost mask is refused."""

import pytest
import torch
import torch.nn.functional as F

from modelwright.core.config import DataError
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.train.objective import forward

CONFIG = ModelConfig(
    vocab_size=40, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=8, max_seq_len=12
)


class Conversations:
    """Two pieces of six tokens in every row: four of a question, two of an answer."""

    num_batches_per_epoch = 3

    def __init__(self, *, answers_only=True):
        self.answers_only = answers_only

    def batch(self, index, *, rank=0, world_size=1):
        tokens = torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(index))
        place = torch.arange(12) % 6
        labels = tokens.roll(-1, dims=1)
        labels[:, place == 5] = IGNORED
        if self.answers_only:
            labels[:, place < 3] = IGNORED
        share = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
        return TokenBatch(
            input_ids_BT=tokens[share],
            labels_BT=labels[share],
            positions_BT=place.repeat(4, 1)[share],
            segments_BT=(torch.arange(12) // 6).int().repeat(4, 1)[share],
        )


@pytest.fixture
def model():
    decoder = Decoder(CONFIG)
    decoder.init_weights(0)
    return decoder


@pytest.mark.parametrize("answers_only", [False, True])
def test_losses_and_gradients_equal_plain_cross_entropy(model, answers_only):
    objective = NextToken(Conversations(), chunk_tokens=5, answers_only=answers_only)
    batch = next(objective.batches(model, first=2, rank=0, world_size=1))
    ours = objective.losses(forward(model, batch), batch, model).losses["loss"]
    ours.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = model.logits(forward(model, batch)).flatten(0, 1)
    plain = F.cross_entropy(logits, batch.labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    plain.backward()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("answers_only", [False, True])
def test_weights_and_losses_add_up_over_parts_and_ranks(model, answers_only):
    objective = NextToken(Conversations(), answers_only=answers_only)
    whole = next(objective.batches(model, first=1, rank=0, world_size=1))
    ranks = [next(objective.batches(model, first=1, rank=rank, world_size=2)) for rank in range(2)]
    for parts in (whole.split(4), ranks):
        weight = sum(objective.weights(part)["loss"] for part in parts)
        assert weight == objective.weights(whole)["loss"] == whole.num_targets
        total = sum(objective.losses(forward(model, part), part, model).losses["loss"] for part in parts)
        torch.testing.assert_close(total, objective.losses(forward(model, whole), whole, model).losses["loss"])


def test_sft_learns_nothing_from_questions(model):
    """Changing what a question's tokens should predict changes nothing: they are no targets."""
    batch = Conversations().batch(0)
    assert batch.num_targets == 4 * 2 * 2
    assert set((batch.labels_BT != IGNORED).nonzero()[:, 1].tolist()) == {3, 4, 9, 10}


def test_sft_refuses_shards_that_lost_their_mask(model):
    objective = NextToken(Conversations(answers_only=False), answers_only=True)
    with pytest.raises(DataError, match="loss mask"):
        next(objective.batches(model, first=0, rank=0, world_size=1))


def test_batches_go_on_from_any_number(model):
    batches = NextToken(Conversations()).batches(model, first=5, rank=0, world_size=1)
    for index in (5, 6, 7):
        assert torch.equal(next(batches).input_ids_BT, Conversations().batch(index).input_ids_BT)
