"""The cost of reference answers, against a plain forward pass of each conversation."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chat_templates import HERMES, TOOL_CHAT, WEATHER, chatml_tokenizer
from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.document import Document, join_turns
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import (
    EvaluateConfig,
    Scored,
    answer_text,
    score_answers,
    sequence_nats,
    summarize_answer_scores,
)
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from tiny_decoder import make_decoder

CONFIG = EvaluateConfig(batch_tokens=256, bootstrap_resamples=50)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="module")
def long_model(chatml: Tokenizer) -> Decoder:
    return make_decoder(vocab_size=chatml.vocab_size, max_seq_len=512, init_std=0.3)


def conversation(name: str, turns: list, **meta) -> Document:
    meta = {"messages": turns, **meta}
    return Document(id=name, text=join_turns(turns), kind="qa", split="heldout", source="s", meta=meta)


DOCUMENTS = [
    conversation("tools", TOOL_CHAT, tools=[WEATHER]),
    conversation("short", [TOOL_CHAT[1], TOOL_CHAT[4]]),
    conversation("two", TOOL_CHAT[1:], tools=[WEATHER]),
]


def naive_nats(model: Decoder, ids: np.ndarray, mask: np.ndarray) -> float:
    tokens = torch.from_numpy(ids)[None]
    segments = torch.zeros_like(tokens, dtype=torch.int32)
    with torch.no_grad():
        attend = packed_attend(segments, model.config.windows)
        hidden = model(tokens, torch.arange(len(ids))[None], attend)
        nats = F.cross_entropy(model.logits(hidden)[0, :-1], tokens[0, 1:], reduction="none")
    return float((nats * torch.from_numpy(mask[1:])).sum())


def test_answers_cost_what_a_plain_forward_pass_says(chatml: Tokenizer, long_model: Decoder) -> None:
    records = score_answers(long_model, chatml, DOCUMENTS, CONFIG, progress=SilentProgress())
    assert [record["id"] for record in records] == ["tools", "short", "two"]
    for record, document in zip(records, DOCUMENTS, strict=True):
        chats = chatml.chat.encode_training_chats(document.messages, tools=document.tools)
        assert record["num_tokens"] == sum(int(mask.sum()) for _, mask in chats)
        assert record["num_bytes"] == len(answer_text(document).encode())
        assert record["nats"] == pytest.approx(sum(naive_nats(long_model, *chat) for chat in chats), rel=1e-5)


def test_summary(chatml: Tokenizer, long_model: Decoder) -> None:
    records = score_answers(long_model, chatml, DOCUMENTS, CONFIG, progress=SilentProgress())
    summary = summarize_answer_scores(records, resamples=200, seed=0)
    nats, tokens = (sum(record[name] for record in records) for name in ("nats", "num_tokens"))
    assert summary["perplexity"] == pytest.approx(math.exp(nats / tokens))
    assert summary["perplexity_low"] <= summary["perplexity"] <= summary["perplexity_high"]
    assert summary["bits_per_byte"] == pytest.approx(nats / math.log(2) / summary["bytes"])
    assert summarize_answer_scores([], resamples=10, seed=0) == {}


def test_a_mask_works_across_windows() -> None:
    """Every predicted token counts once, or not at all, however the sequence is cut."""
    model = make_decoder(max_seq_len=16, init_std=0.3)
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 96, 41)
    options = {"context_overlap": 0.5, "max_context": 16, "batch_tokens": 64, "progress": SilentProgress()}
    singles = []
    for place in range(1, len(ids)):
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[place] = 1
        singles.append(Scored(ids.tolist(), 1, mask))
    masks = draw.integers(0, 2, len(ids)).astype(np.uint8)
    each = sequence_nats(model, singles, **options)
    whole, chosen = sequence_nats(model, [Scored(ids.tolist(), 1), Scored(ids.tolist(), 1, masks)], **options)
    assert whole == pytest.approx(each.sum(), rel=1e-5)
    assert chosen == pytest.approx(each[masks[1:] == 1].sum(), rel=1e-5)


def test_a_refusal_names_the_conversation(long_model: Decoder, tmp_path: Path) -> None:
    plain = chatml_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="tools: the chat template does not support tools"):
        score_answers(long_model, plain, DOCUMENTS[:1], CONFIG, progress=SilentProgress())
