"""Sequences with the same prompt compute it once and fork: the same bits as one by one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from infer.engine_runs import GREEDY, SAMPLED, alone, answer, drain, make_engine, make_model, tokens
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.model_runner import ModelRunner
from modelwright.model.decoder import Decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model()


@contextmanager
def counted_prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of prompt tokens that each step computes."""
    counts: list[int] = []
    run = ModelRunner.run

    def counting(self, plan):
        counts.append(sum(chunk.end - chunk.start for chunk in plan.chunks))
        return run(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", counting)
        yield counts


@pytest.mark.parametrize("length", [1, 15, 16, 40, 64])
def test_groups_compute_their_prompt_once_with_the_same_bits(model: Decoder, length: int, monkeypatch):
    prompts = [tokens(length, group) for group in (1, 2) for _ in range(4)]
    params = [replace(GREEDY if number == 3 else SAMPLED, seed=number) for number in range(8)]
    config = EngineConfig(prefill_chunk_size=16, max_num_batched_tokens=32)
    with counted_prefill(monkeypatch) as counts:
        together = generate(model, prompts, params, config)
    assert sum(counts) == 2 * length
    for prompt, chosen, completion in zip(prompts, params, together, strict=True):
        expected = alone(model, prompt, chosen)
        assert completion.token_ids == [one[0] for one in expected]
        assert completion.logprobs == [one[1] for one in expected]
    assert len({tuple(one.token_ids) for one in together[:3]}) == 3


def test_a_group_that_does_not_fit_is_started_in_parts(model: Decoder, monkeypatch):
    prompt = tokens(40, 1)
    engine = make_engine(model, max_num_seqs=3, enable_prefix_caching=False)
    with counted_prefill(monkeypatch) as counts:
        for number in range(7):
            engine.add(str(number), prompt, replace(SAMPLED, seed=number))
        outputs = drain(engine)
    assert sum(counts) == 3 * 40
    for number in range(7):
        assert answer(outputs[str(number)]) == alone(model, prompt, replace(SAMPLED, seed=number))


def require_all_free(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_preemption_and_arrival_change_no_bit(model: Decoder):
    engine = make_engine(model, kv_cache_tokens=192, max_num_seqs=9, max_num_batched_tokens=16)
    draw, outputs = random.Random(3), {}
    groups = [(tokens(draw.randrange(1, 60), group), draw.randrange(1, 6)) for group in range(8)]
    requests = [prompt for prompt, size in groups for _ in range(size)]
    waiting = list(enumerate(requests))
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or draw.random() < 0.5):
            for number, prompt in [waiting.pop(0) for _ in range(min(3, len(waiting)))]:
                engine.add(str(number), prompt, replace(SAMPLED, seed=number))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.stats().num_preemptions > 0
    require_all_free(engine)
    for number, prompt in enumerate(requests):
        assert answer(outputs[str(number)]) == alone(model, prompt, replace(SAMPLED, seed=number))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_followers_go_on_without_their_leader(model: Decoder, num_steps: int):
    """The leader is aborted while its prompt of three chunks is computed, or after the fork."""
    prompt = tokens(40, 1)
    engine = make_engine(model, max_num_batched_tokens=16)
    for number in range(4):
        engine.add(str(number), prompt, replace(SAMPLED, seed=number))
    outputs = {}
    for _ in range(num_steps):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.abort("0")
    assert engine.abort("2")
    for name, rest in drain(engine).items():
        outputs[name] = outputs.get(name, []) + rest
    require_all_free(engine)
    for number in (1, 3):
        assert answer(outputs[str(number)]) == alone(model, prompt, replace(SAMPLED, seed=number))


def test_only_what_may_be_shared_is_shared(model: Decoder, monkeypatch):
    """Other salts compute the prompt again, and so do scores of the prompt; what comes after those can follow them."""
    prompt = tokens(20, 1)
    scored = replace(GREEDY, num_prompt_logprobs=1)
    engine = make_engine(model, enable_prefix_caching=False)
    engine.add("first", prompt, GREEDY)
    engine.add("salted", prompt, GREEDY, cache_salt="other")
    engine.add("scored", prompt, scored)
    engine.embed("embedded", prompt)
    engine.add("longer", [*prompt, 1], GREEDY)
    with counted_prefill(monkeypatch) as counts:
        outputs = drain(engine)
    assert sum(counts) == 3 * 20 + 21
    assert answer(outputs["first"]) == answer(outputs["salted"]) == alone(model, prompt, GREEDY)
    assert answer(outputs["scored"]) == alone(model, prompt, scored)
    unshared = make_engine(model)
    unshared.embed("embedded", prompt)
    assert answer(outputs["embedded"]) == answer(drain(unshared)["embedded"])
