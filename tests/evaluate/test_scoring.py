import numpy as np
import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.evaluate.scoring import Scored, sequence_nats
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder


def nats(model: Decoder, sequences: list[Scored], **changes) -> np.ndarray:
    settings = {"context_overlap": 0.5, "max_context": 2048, "batch_tokens": 64, "progress": SilentProgress()} | changes
    return sequence_nats(model, sequences, **settings)


def naive_nats(model: Decoder, scored: Scored, context: int, stride: int) -> float:
    """Token by token: the definition, from the window that a prediction falls into."""
    total, done, last = 0.0, scored.first - 1, len(scored.ids) - 1
    while done < last:
        end = min(last, max(context, done + stride))
        ids = torch.tensor(scored.ids[max(0, end - context) : end + 1])[None]
        hidden = model(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], causal_attend())
        log_probs = model.logits(hidden)[0].log_softmax(-1)
        for i in range(done, end):
            at = i - max(0, end - context)
            total -= float(log_probs[at, ids[0, at + 1]].detach())
        done = end
    return total


def random_sequences(lengths: list[int], first: int = 1) -> list[Scored]:
    rng = np.random.default_rng(3)
    return [Scored(rng.integers(0, 259, length).tolist(), min(first, length)) for length in lengths]


@pytest.mark.parametrize("first", [1, 6, 40])
def test_packed_windows_equal_one_sequence_at_a_time(model: Decoder, first: int) -> None:
    sequences = random_sequences([2, 5, 9, 33, 34, 70, 100, 3, 17], first)
    expected = [naive_nats(model, scored, 32, 16) for scored in sequences]
    np.testing.assert_allclose(nats(model, sequences), expected, rtol=1e-5, atol=1e-5)


def test_neighbors_and_batch_size_change_nothing(model: Decoder) -> None:
    sequences = random_sequences([4, 10, 31, 60, 12])
    together = nats(model, sequences)
    alone = np.concatenate([nats(model, [scored]) for scored in sequences])
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    np.testing.assert_allclose(together, nats(model, sequences, batch_tokens=1), rtol=1e-5)


def test_more_overlap_gives_later_tokens_more_context(model: Decoder) -> None:
    scored = random_sequences([90])
    assert nats(model, scored, context_overlap=0.0)[0] == pytest.approx(naive_nats(model, scored[0], 32, 32), rel=1e-5)
    assert nats(model, scored, context_overlap=0.97)[0] == pytest.approx(naive_nats(model, scored[0], 32, 1), rel=1e-5)


def test_context_can_be_capped(model: Decoder) -> None:
    scored = random_sequences([50])
    expected = naive_nats(model, scored[0], 16, 8)
    assert nats(model, scored, max_context=16)[0] == pytest.approx(expected, rel=1e-5)


def test_nothing_to_predict_costs_nothing(model: Decoder) -> None:
    assert nats(model, []).tolist() == []
    assert nats(model, [Scored([256], 1), Scored([256, 5, 6], 3)]).tolist() == [0.0, 0.0]
