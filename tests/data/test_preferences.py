"""Preferences as rows: groups that nothing cuts, truncated answers, counted skips, mismatched answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelwright.core.config import parse
from modelwright.data.document import Document
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.examples import ConversationFit, PreferenceFit, PromptedAnswer, with_mismatched_answers
from modelwright.data.rows.loader import PackedLoader, PackedRows, build_loader
from modelwright.data.rows.order import BatchingConfig
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

EOS, SEQ_LEN, NUM_PAIRS = 1, 24, 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["some words to learn from"], TokenizerConfig(vocab_size=300))


def pairs() -> list[TokenSequence]:
    """Pairs of sequences whose tokens are the number of the pair, twice as large for the second one."""
    dice, found = np.random.default_rng(0), []
    for number in range(2, NUM_PAIRS + 2):
        for factor in (1, 100):
            length = int(dice.integers(3, SEQ_LEN + 1))
            mask = np.ones(length, dtype=np.uint8)
            mask[: int(dice.integers(1, length - 1))] = 0
            found.append(TokenSequence(np.full(length, factor * number), mask, value=float(number)))
    return found


@pytest.fixture(scope="module", params=["best_fit", "one_per_row"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    folder = tmp_path_factory.mktemp("pairs")
    config = PackConfig(seq_len=SEQ_LEN, mode=request.param, shard_bytes=SEQ_LEN * 2 * 7)
    report = pack(pairs(), folder, config, vocab_size=10_000, eos_id=EOS, group_size=2)
    assert report.num_targets == sum(int(np.sum(one.mask[1:])) for one in pairs() if one.mask is not None)
    return PackedRows(folder)


def pairs_in(batch: TokenBatch) -> list[int]:
    """The numbers of the pairs in a batch; each must be at the same place of both rows of a group."""
    found = []
    for tokens_2T, segments_2T, values_2T in zip(
        batch.input_ids_BT.unflatten(0, (-1, 2)),
        batch.segments_BT.unflatten(0, (-1, 2)),
        batch.extras["values_BT"].unflatten(0, (-1, 2)),
        strict=True,
    ):
        for segment in range(int(segments_2T.max()) + 1):
            own = [row[places == segment].unique() for row, places in zip(tokens_2T, segments_2T, strict=True)]
            values = [row[places == segment].unique() for row, places in zip(values_2T, segments_2T, strict=True)]
            assert own[0].tolist() == values[0].tolist() == values[1].tolist()
            assert own[1].tolist() == [100 * int(own[0])]
            found.append(int(own[0]))
    assert not batch.extras["values_BT"][batch.segments_BT < 0].any()
    return found


def test_pairs_stay_together(rows: PackedRows) -> None:
    found = [number for batch in rows.batches(3) for number in pairs_in(batch)]
    assert sorted(found) == list(range(2, NUM_PAIRS + 2))
    assert rows.num_rows == 2 * rows.num_groups
    assert rows.group_lengths().max() <= SEQ_LEN


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("curriculum", ["none", "length"])
def test_loaders_share_whole_groups_among_ranks(rows: PackedRows, by_tokens: bool, curriculum: Any) -> None:
    loader = build_loader(
        rows,
        parse(BatchingConfig, {"curriculum": {"by": curriculum}}),
        batch_rows=4,
        by_tokens=by_tokens,
        seed=3,
        num_steps_of=lambda num_batches: num_batches,
        row_losses=lambda: np.zeros(0),
    )
    for index in range(loader.num_batches_per_epoch):
        whole = sorted(pairs_in(loader.batch(index)))
        shares = [pairs_in(loader.batch(index, rank=rank, world_size=2)) for rank in range(2)]
        assert sorted(shares[0] + shares[1]) == whole
        assert loader.batch(index).group_size == 2
    if isinstance(loader, PackedLoader):
        assert sorted(loader.order(0, rows.num_groups)) == list(range(rows.num_groups))


def test_a_sequence_of_a_group_that_does_not_fit_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit into a row"):
        pack([([5] * 9, None), ([5] * 3, None)], tmp_path, PackConfig(seq_len=8), vocab_size=9, eos_id=1, group_size=2)


def pair(prompt: str, chosen: str, rejected: str) -> Document:
    meta = {"question": prompt, "answer": chosen, "rejected": [{"role": "assistant", "content": rejected}]}
    return Document(id="1", text=prompt, kind="qa", split="train", source="s", meta={**meta, "prompt_turns": 1})


def fit_of(tokenizer: Tokenizer, *, seq_len: int = 32, overlong: Any = "split") -> PreferenceFit:
    return PreferenceFit(tokenizer=tokenizer, answers=ConversationFit(seq_len=seq_len, overlong=overlong))


def test_only_the_judged_answers_are_learned(tokenizer: Tokenizer) -> None:
    turns = [("user", "Q"), ("assistant", "earlier"), ("user", "R"), ("assistant", "yes")]
    messages = [{"role": role, "content": text} for role, text in turns]
    meta = {"messages": messages, "rejected": [{"role": "assistant", "content": "no"}], "prompt_turns": 3}
    document = Document(id="1", text="", kind="qa", split="train", source="s", meta=meta)
    found = fit_of(tokenizer, seq_len=64).pair(document)
    assert found is not None
    for completion, answer in zip(found, ("yes", "no"), strict=True):
        learned = completion.ids[completion.mask.astype(bool)]
        assert tokenizer.decode(learned, skip_special=False) == f"{answer}<|end|>"
        assert completion.ids[: completion.prompt_len].tolist() == tokenizer.chat.encode_prompt(messages[:3])


@pytest.mark.parametrize(("document", "overlong", "reason"), [
    (pair("long " * 20, "yes", "no"), "split", "prompt longer than a row"),
    (pair("Q", "yes " * 20, "no"), "skip", "longer than a row"),
    (pair("Q", "yes", " "), "split", "empty answer"),
    (pair("Q", "yes " * 20 + "a", "yes " * 20 + "b"), "split", "chosen and rejected are the same"),
])  # fmt: skip
def test_what_cannot_be_learned_from_is_counted(
    tokenizer: Tokenizer, document: Document, overlong: str, reason: str
) -> None:
    fit = fit_of(tokenizer, overlong=overlong)
    assert fit.pair(document) is None
    assert fit.pair(pair("Q", "yes", "no")) is not None
    assert (fit.skipped, fit.num_preferences) == ({reason: 1}, 2)


def test_a_long_answer_is_truncated(tokenizer: Tokenizer) -> None:
    found = fit_of(tokenizer).pair(pair("Q", "yes " * 20, "no"))
    assert found is not None
    assert (len(found[0].ids), int(found[0].mask[-1])) == (32, 1)


def completion(prompt: int, answer: int, length: int = 2) -> PromptedAnswer:
    ids = np.array([prompt, prompt, *[answer] * length])
    return PromptedAnswer(ids, np.array([0, 0] + [1] * length, dtype=np.uint8))


def test_mismatched_answers_belong_to_other_prompts() -> None:
    given = [completion(1, 10), completion(1, 11), completion(2, 20, 9), completion(2, 21), completion(3, 30)]
    found = list(with_mismatched_answers(given, seq_len=8))
    assert [one.ids.tolist() for one, _ in found] == [one.ids.tolist() for one in given]
    assert [int(other.ids[-1]) for _, other in found] == [20, 20, 11, 11, 21]
    for one, other in found:
        assert other.prompt == one.prompt
        assert other.prompt_len == 2
        assert len(other.ids) == len(other.mask) <= 8
    assert not list(with_mismatched_answers(given[:2], seq_len=8))


def test_labels_of_a_batch_are_those_of_the_answers(rows: PackedRows) -> None:
    targets = {int(one.ids[0]): int(np.sum(one.mask[1:])) for one in pairs() if one.mask is not None}
    for batch in rows.batches(1):
        for number in pairs_in(batch):
            for row, token in enumerate((number, 100 * number)):
                assert int((batch.labels_BT[row] == token).sum()) == targets[token]
        assert set(batch.labels_BT.unique().tolist()) <= {IGNORED, *targets}
