"""Greedy generation through the engine's paged cache, against `transformers.generate`, for every Hugging Face type."""

import copy
from pathlib import Path

import pytest
import torch

from hf_folders import CASES, VOCAB_SIZE, write_folder
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.hf import load_model

pytest.importorskip("transformers")

NUM_NEW = 64
PROMPT_LENS = (1, 9, 23, 45)
"""One token; shorter than a window; over the first context of some scalings; longer than a chunk of prefill."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_greedy_generations_are_identical(tmp_path: Path, name: str) -> None:
    """All prompts at once in the engine, so that sequences of several lengths share steps; one by one in
    `transformers`."""
    theirs = write_folder(name, tmp_path, eos_token_id=None)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist() for length in PROMPT_LENS]
    config = EngineConfig(kv_cache_tokens=1024, prefill_chunk_size=32, max_num_batched_tokens=64)
    params = [SamplingParams(max_tokens=NUM_NEW, temperature=0.0)] * len(prompts)
    found = generate(load_model(tmp_path), prompts, params, config)
    for prompt, completion in zip(prompts, found, strict=True):
        fresh = copy.deepcopy(theirs)  # with dynamic scaling, a model goes on with the frequencies of its last call
        expected = fresh.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        assert len(expected) == NUM_NEW
        assert completion.token_ids == expected


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3-long", "mistral"])
def test_load_and_preemption_change_no_bit(tmp_path: Path, name: str) -> None:
    """A sequence whose frequencies change with its length is computed anew there, alone or among others."""
    write_folder(name, tmp_path)
    model = load_model(tmp_path)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (5 + 11 * n % 50,), generator=draw).tolist() for n in range(6)]
    params = [SamplingParams(max_tokens=40, temperature=0.7, seed=number) for number in range(len(prompts))]
    engine = Engine(model, EngineConfig(kv_cache_tokens=192, prefill_chunk_size=16), head=model.logits)
    for number, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(number), prompt, chosen)
    together: dict[str, list[tuple[int, float]]] = {}
    while engine.has_work:
        for output in engine.step():
            together.setdefault(output.request_id, []).append((output.token_id, output.logprob))
    assert engine.is_batch_invariant
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    for number, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        (alone,) = generate(model, [prompt], [chosen], EngineConfig(prefill_chunk_size=16))
        assert together[str(number)] == list(zip(alone.token_ids, alone.logprobs, strict=True))
