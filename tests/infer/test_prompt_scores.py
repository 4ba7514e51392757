"""Scores of prompts and embeddings against one whole forward pass."""

import random

import pytest
import torch

from modelwright.infer.engine import Engine, EngineConfig, StepOutput
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = ModelConfig(
        vocab_size=97, num_layers=2, model_dim=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=96,
        max_seq_len=160, init_std=0.2,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.init_weights(3)
    return decoder.eval()


def prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(97) for _ in range(length)] for length in (1, 2, 15, 16, 17, 40, 75, 150)]


@torch.inference_mode()
def whole_pass(model: Decoder, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T, V] and hidden states [T, D]."""
    hidden_1TD = model(torch.tensor([prompt]), torch.arange(len(prompt))[None], causal_attend())
    return model.logits(hidden_1TD)[0].log_softmax(dim=-1), hidden_1TD[0]


def first_outputs(engine: Engine) -> dict[str, StepOutput]:
    outputs: dict[str, StepOutput] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, output)
    return outputs


@pytest.mark.parametrize("cache_tokens", [4096, 176], ids=["room", "preempted"])
def test_prompt_scores_equal_a_whole_pass(model: Decoder, cache_tokens: int):
    config = EngineConfig(prefill_chunk_size=16, max_num_batched_tokens=48, kv_cache_tokens=cache_tokens)
    params = SamplingParams(max_tokens=4, num_prompt_logprobs=3, temperature=0)
    engine = Engine(model, config)
    for number, prompt in enumerate(prompts()):
        engine.add(str(number), prompt, params)
    together = first_outputs(engine)
    for number, prompt in enumerate(prompts()):
        logprobs_TV, _ = whole_pass(model, prompt)
        scores = together[str(number)].prompt_scores
        assert [score.token_id for score in scores] == prompt[1:]
        for place, score in enumerate(scores):
            row = logprobs_TV[place]
            assert score.logprob == pytest.approx(float(row[score.token_id]), abs=2e-4)
            assert abs(score.rank - 1 - int((row > row[score.token_id]).sum())) <= 1
            assert len(score.alternatives) == 3
            assert score.alternatives[0][1] == pytest.approx(float(row.max()), abs=2e-4)
        alone = Engine(model, config)
        alone.add("0", prompt, params)
        assert first_outputs(alone)["0"].prompt_scores == scores, "the load changes bits"


def test_scores_come_once_and_only_if_asked_for(model: Decoder):
    engine = Engine(model, EngineConfig())
    engine.add("scored", [1, 2, 3], SamplingParams(max_tokens=3, num_prompt_logprobs=0))
    engine.add("plain", [1, 2, 3], SamplingParams(max_tokens=3))
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(o.prompt_scores) for o in outputs if o.request_id == "scored"] == [2, 0, 0]
    assert not any(o.prompt_scores for o in outputs if o.request_id == "plain")


@pytest.mark.parametrize("start", [1, 2, 16, 17, 18, 33, 74])
def test_scores_from_a_token_on_share_the_prompt_before_it(model: Decoder, start: int):
    """The same bits as without a cache, of the tokens from `start` on."""
    config = EngineConfig(prefill_chunk_size=16, max_num_batched_tokens=16)
    prompt = prompts()[6]
    scores = {}
    for place in (1, start):
        engine = Engine(model, config)
        engine.add("before", prompt[: max(start, 2)], SamplingParams(max_tokens=1))
        first_outputs(engine)
        engine.add("0", prompt, SamplingParams(max_tokens=1, num_prompt_logprobs=1, prompt_logprobs_start=place))
        scores[place] = first_outputs(engine)["0"]
        assert scores[place].num_cached_tokens == (place - 1) // 16 * 16
    assert scores[start].prompt_scores == scores[1].prompt_scores[start - 1 :]
    assert len(scores[start].prompt_scores) == len(prompt) - start


def test_equal_prompts_are_scored_each(model: Decoder):
    engine = Engine(model, EngineConfig())
    for name in ("a", "b"):
        engine.add(name, [1, 2, 3, 4], SamplingParams(max_tokens=1, num_prompt_logprobs=0, prompt_logprobs_start=3))
    outputs = first_outputs(engine)
    assert len(outputs["a"].prompt_scores) == 1
    assert outputs["a"].prompt_scores == outputs["b"].prompt_scores


def test_embeddings_are_the_last_hidden_state(model: Decoder):
    engine = Engine(model, EngineConfig(prefill_chunk_size=16))
    for number, prompt in enumerate(prompts()):
        engine.embed(str(number), prompt)
    engine.add("beside", [5, 6], SamplingParams(max_tokens=20))
    found = first_outputs(engine)
    for number, prompt in enumerate(prompts()):
        hidden_D = whole_pass(model, prompt)[1][-1]
        expected = (hidden_D / hidden_D.norm()).tolist()
        assert found[str(number)].embedding == pytest.approx(expected, abs=1e-4)
        assert found[str(number)].finish_reason == "stop"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
