"""Guessed tokens change no bit of an answer: greedy and seeded, alone and in any batch."""

from typing import Any

import pytest
import torch

from infer.engine_runs import VOCAB_SIZE, alone, answer, drain, make_engine, make_model, tokens
from modelwright.core.config import ConfigError
from modelwright.infer.engine import EngineConfig
from modelwright.infer.products import stable_row_multiple
from modelwright.infer.sequence import LONGEST_MATCH, SHORTEST_MATCH, NgramIndex, SamplingParams
from modelwright.model.decoder import AttentionConfig
from modelwright.ops.rope_norm_swiglu import RopeScaling
from refusals import config_error

REPETITIVE = (tokens(9, 1) * 5)[:40]
LONG = {"max_tokens": 60, "num_logprobs": 2}
REQUESTS = {
    "greedy": (REPETITIVE, SamplingParams(temperature=0.0, **LONG)),
    "seeded": (REPETITIVE[3:], SamplingParams(temperature=0.35, seed=4, **LONG)),
    "nucleus": (tokens(33, 2), SamplingParams(temperature=0.5, top_p=0.8, top_k=20, seed=9, **LONG)),
    "penalized": (tokens(5, 3), SamplingParams(temperature=0.0, frequency_penalty=0.02, **LONG)),
    "scored": (REPETITIVE[:30], SamplingParams(temperature=0.0, num_prompt_logprobs=1, **LONG)),
    "short": (REPETITIVE, SamplingParams(temperature=0.0, max_tokens=3)),
    "one": (REPETITIVE, SamplingParams(temperature=0.0, max_tokens=1)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def guess_naive(token_ids: list[int], count: int) -> list[int]:
    """Scans the whole text for the last place where its end occurred before."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        end = token_ids[-length:]
        places = [p for p in range(length, len(token_ids)) if token_ids[p - length : p] == end]
        if len(end) == length and places:
            text = list(token_ids)
            for number in range(count):
                text.append(text[places[-1] + number])
            return text[len(token_ids) :]
    return []


def test_guesses_are_those_of_a_scan() -> None:
    draw = torch.Generator().manual_seed(0)
    index, text = NgramIndex(), list[int]()
    num_guesses = 0
    for _ in range(300):
        text += torch.randint(4, (int(torch.randint(1, 4, (), generator=draw)),), generator=draw).tolist()
        index.extend(text)
        for count in (1, 3, 8):
            assert index.guess(text, count) == guess_naive(text, count)
            num_guesses += len(guess_naive(text, count)) == count
    assert num_guesses > 500


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": AttentionConfig(window=24, window_layers=(1,), soft_cap=20.0)},
        {
            "rope": RopeScaling(
                kind="longrope", original_max_len=72, short_factor=(1.0,) * 8, long_factor=(1.7,) * 8, factor=2.0
            )
        },
    ],
    ids=["plain", "window", "longrope"],
)
@pytest.mark.parametrize("settings", [{}, {"kv_cache_tokens": 192, "max_num_seqs": 4}], ids=["room", "preempted"])
def test_guesses_change_no_bit(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    model = make_model(**changes)
    engine = make_engine(model, num_speculative_tokens=5, **settings)
    for name, (prompt, params) in REQUESTS.items():
        engine.add(name, prompt, params)
    together = drain(engine)
    for name, (prompt, params) in REQUESTS.items():
        assert answer(together[name]) == alone(model, prompt, params), name
    stats = engine.stats()
    assert stats.num_drafts > 10
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 0) == bool(settings)


def test_a_right_guess_saves_steps_and_ends_where_it_must() -> None:
    model = make_model()
    prompt, params = REQUESTS["greedy"]
    plain = alone(model, prompt, params)
    engine = make_engine(model, num_speculative_tokens=5)
    engine.add("0", prompt, params)
    num_steps, outputs = 0, []
    while engine.has_work:
        outputs += engine.step()
        num_steps += 1
    assert answer(outputs) == plain
    assert num_steps == 2 + len(plain) - engine.stats().num_accepted_tokens
    assert engine.stats().num_accepted_tokens > 10
    stop = plain[-8][0]
    first = [token for token, *_ in plain].index(stop)
    stopped = SamplingParams(temperature=0.0, max_tokens=60, num_logprobs=2, stop_ids=(stop,))
    engine.add("stopped", prompt, stopped)
    assert answer(drain(engine)["stopped"]) == alone(model, prompt, stopped)
    assert len(alone(model, prompt, stopped)) == first + 1


class EveryOther:
    """Forbids the tokens that it has seen last, as a grammar may do, and goes no further than some tokens."""

    def __init__(self, length: int) -> None:
        self.seen: list[int] = []
        self.length = length

    def allowed(self) -> torch.Tensor:
        if len(self.seen) == self.length:
            raise ConfigError("constraint: ends here")
        mask = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        mask[self.seen[-1:]] = False
        return mask

    def advance(self, token_id: int) -> None:
        self.seen.append(token_id)


def test_a_constraint_sees_accepted_tokens_only() -> None:
    model, found = make_model(), []
    for num_guesses in (0, 4):
        engine, constraint = make_engine(model, num_speculative_tokens=num_guesses), EveryOther(45)
        engine.add("0", REPETITIVE, REQUESTS["greedy"][1], constraint)
        found.append((answer(drain(engine)["0"]), constraint.seen))
        assert (engine.stats().num_accepted_tokens > 0) == (num_guesses > 0)
    assert found[0] == found[1]
    assert found[0][0][-1][3] == "constraint"


def test_it_is_refused_where_it_cannot_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    with config_error("num_speculative_tokens", match="num_speculative_tokens: must not be negative"):
        EngineConfig(num_speculative_tokens=-1)
    with config_error("num_speculative_tokens", match="num_speculative_tokens: needs batch_invariant"):
        EngineConfig(num_speculative_tokens=2, batch_invariant=False)
    model = make_model()
    assert stable_row_multiple(model, model.logits) > 0
    monkeypatch.setattr("modelwright.infer.engine.stable_row_multiple", lambda model, head: 0)
    make_engine(model)
    with config_error("num_speculative_tokens", match="on this machine no padding"):
        make_engine(model, num_speculative_tokens=2)
