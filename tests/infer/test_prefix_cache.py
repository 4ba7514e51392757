"""The prefix cache: same bits with and without hits, under preemption and eviction; nothing is shared by mistake."""

import random
from dataclasses import replace

import pytest

from infer.engine_runs import GREEDY, SAMPLED, alone, answer, drain, make_engine, make_model, tokens
from modelwright.infer.kv_cache import BlockManager
from modelwright.infer.sequence import SamplingParams, Sequence
from modelwright.model.decoder import Decoder
from modelwright.ops.rope_norm_swiglu import RopeScaling

PREFIX = tokens(40, 1)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model()


@pytest.mark.parametrize("chunk", [16, 24], ids=["a block", "one and a half blocks"])
def test_hits_change_no_bit(model: Decoder, chunk: int):
    """Prompts of every length around the ends of chunks, whose beginnings are known from the prompt before them."""
    engine = make_engine(model, prefill_chunk_size=chunk)
    assert engine.is_batch_invariant
    unit = 16 if chunk == 16 else 48
    for number, length in enumerate((8, 16, 17, 32, 33, 48, 49, 50, 96, 97)):
        prompt, params = tokens(100, 2)[:length], SAMPLED if number % 2 else GREEDY
        engine.add("0", prompt, params)
        outputs = drain(engine)["0"]
        without = make_engine(model, prefill_chunk_size=chunk, enable_prefix_caching=False)
        without.add("0", prompt, params)
        assert answer(outputs) == answer(drain(without)["0"])
        longest_before = (8, 8, 16, 17, 32, 33, 48, 49, 50, 96)[number]
        expected = min(longest_before // unit, (length - 1) // unit) * unit if number else 0
        assert [o.num_cached_tokens for o in outputs] == [expected] + [0] * (len(outputs) - 1)


def test_load_preemption_and_eviction_change_no_bit(model: Decoder):
    """Three prefixes of which the cache holds not even two at a time, in random order and with random arrivals."""
    engine = make_engine(model, kv_cache_tokens=192, max_num_seqs=6, max_num_batched_tokens=32)
    draw, outputs = random.Random(0), {}
    requests = [
        (tokens(48, draw.randrange(3)) + tokens(draw.randrange(1, 20), number), replace(SAMPLED, seed=number))
        for number in range(24)
    ]
    waiting = list(enumerate(requests))
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or draw.random() < 0.3):
            number, (prompt, params) = waiting.pop(0)
            engine.add(str(number), prompt, params)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert 0 < stats.num_prefix_hits < stats.num_prefix_queries
    assert sum(one[0].num_cached_tokens for one in outputs.values()) > 0
    assert stats.num_free_blocks == stats.num_blocks
    for number, (prompt, params) in enumerate(requests):
        assert answer(outputs[str(number)]) == alone(model, prompt, params)


def test_aborts_leave_every_block_free(model: Decoder):
    engine = make_engine(model, kv_cache_tokens=512)
    for number in range(12):
        engine.add(str(number), PREFIX + tokens(number, 3), replace(SAMPLED, max_tokens=40))
        engine.step()
        if number >= 4:
            assert engine.abort(str(number - 4))
    assert engine.stats().num_free_blocks < engine.stats().num_blocks
    for number in range(8, 12):
        assert engine.abort(str(number))
    stats = engine.stats()
    assert stats.num_prefix_hits > 0
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_salts_do_not_share(model: Decoder):
    engine = make_engine(model)
    cached = []
    for salt in ("alice", "bob", "alice"):
        engine.add("0", PREFIX, GREEDY, cache_salt=salt)
        cached.append(drain(engine)["0"][0].num_cached_tokens)
    assert cached == [0, 0, 32]


def test_scores_of_a_prompt_are_computed_whatever_is_cached(model: Decoder):
    scored = SamplingParams(max_tokens=2, temperature=0, num_prompt_logprobs=1)
    engine = make_engine(model)
    for params in (GREEDY, scored, GREEDY):
        engine.add("0", PREFIX, params)
        outputs = drain(engine)["0"]
        assert answer(outputs) == alone(model, PREFIX, params)
        assert len(outputs[0].prompt_scores) == (39 if params is scored else 0)
    assert (engine.stats().num_prefix_queries, engine.stats().num_prefix_hits) == (80, 32)


def test_embeddings_share_prompts(model: Decoder):
    engine, without = make_engine(model), make_engine(model, enable_prefix_caching=False)
    engine.add("0", PREFIX, GREEDY)
    drain(engine)
    for one in (engine, without):
        one.embed("0", PREFIX)
    assert answer(drain(engine)["0"]) == answer(drain(without)["0"])
    assert engine.stats().num_prefix_hits == 32


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_prompts_with_other_frequencies_do_not_share(kind: str):
    factors = (1.0,) * 8 if kind == "longrope" else ()
    longer = tuple(1.0 + number for number in range(8)) if kind == "longrope" else ()
    rope = RopeScaling(kind=kind, factor=4.0, original_max_len=40, short_factor=factors, long_factor=longer)  # type: ignore[arg-type]
    model = make_model(rope=rope)
    engine = make_engine(model)
    prompt = tokens(90, 4)
    cached = []
    for length in (34, 36, 60, 90, 90, 36):
        engine.add("0", prompt[:length], SAMPLED)
        outputs = drain(engine)["0"]
        assert answer(outputs) == alone(model, prompt[:length], SAMPLED)
        cached.append(outputs[0].num_cached_tokens)
    assert cached == [0, 32, 0, 0, 80, 32]


def sequence(blocks: BlockManager, num_tokens: int, shared: tuple[int, ...] = ()) -> Sequence:
    one = Sequence("", [0] * num_tokens, num_tokens, GREEDY)
    assert blocks.share(one, list(shared), num_tokens)
    return one


def test_the_least_recently_used_block_is_overwritten_first():
    blocks = BlockManager(6, 4)
    first, second = sequence(blocks, 8), sequence(blocks, 8)
    named = dict(zip("abcd", [*first.block_table, *second.block_table], strict=True))
    for name, block in named.items():
        blocks.store(block, name.encode())
    blocks.release(second)
    blocks.release(first)
    assert blocks.num_free == 6
    again = sequence(blocks, 4, (named["c"],))
    assert again.block_table == [named["c"]]
    assert blocks.num_free == 5
    taken = sequence(blocks, 16)
    assert [name for name in "abcd" if blocks.find(name.encode()) is not None] == ["a", "c"], "d, then b, went"
    assert named["c"] not in taken.block_table
    assert not blocks.share(Sequence("", [], 0, GREEDY), [], 8)
    assert blocks.num_free == 1


def test_a_shared_block_is_free_when_its_last_user_is_gone():
    blocks = BlockManager(4, 4)
    first = sequence(blocks, 8)
    shared = first.block_table[0]
    second = sequence(blocks, 8, (shared,))
    assert blocks.num_free == 1
    blocks.release(first)
    assert blocks.num_free == 2
    blocks.release(second)
    assert blocks.num_free == 4
