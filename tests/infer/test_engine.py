"""The engine against generation without a cache, under load, preemption and aborts."""

import copy
import random

import pytest
import torch

from modelwright.infer.engine import Engine, EngineConfig, StepOutput
from modelwright.infer.generate import generate
from modelwright.infer.products import HEAD_KINDS, fastest_head_kind, head_of, stable_row_multiple
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig
from naive_generation import generate_naive
from refusals import config_error

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
RANDOM = SamplingParams(max_tokens=24, temperature=1.3, top_p=0.95, top_k=40, seed=5)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = ModelConfig(
        vocab_size=211,
        num_layers=2,
        model_dim=48,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        ffn_dim=96,
        max_seq_len=160,
        init_std=0.2,
    )
    decoder = Decoder(config)
    decoder.init_weights(3)
    return decoder.eval()


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(211) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def alone(model: Decoder, prompt: list[int], params: SamplingParams) -> list[StepOutput]:
    engine = Engine(model, EngineConfig())
    engine.add("0", prompt, params)
    return drain(engine)["0"]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_batched_equals_generation_without_cache(model: Decoder, params: SamplingParams):
    engine = Engine(model, EngineConfig(prefill_chunk_size=32, max_num_seqs=5))
    for number, prompt in enumerate(prompts(9)):
        engine.add(str(number), prompt, params)
    outputs = drain(engine)
    for number, prompt in enumerate(prompts(9)):
        naive = generate_naive(model, prompt, params)
        assert [o.token_id for o in outputs[str(number)]] == [d.token_id for d in naive]
        for output, draw in zip(outputs[str(number)], naive, strict=True):
            assert output.logprob == pytest.approx(draw.logprob, abs=2e-4)


def test_load_arrival_and_preemption_change_no_bit(model: Decoder):
    engine = Engine(model, EngineConfig(kv_cache_tokens=320, max_num_seqs=8))
    assert engine.is_batch_invariant
    waiting = list(enumerate(prompts(12)))
    draw, outputs = random.Random(0), {}
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or draw.random() < 0.4):
            number, prompt = waiting.pop(0)
            engine.add(str(number), prompt, RANDOM if number % 2 else GREEDY)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.stats().num_preemptions > 0
    for number, prompt in enumerate(prompts(12)):
        assert outputs[str(number)] == [
            StepOutput(str(number), o.token_id, o.logprob, o.alternatives, o.finish_reason)
            for o in alone(model, prompt, RANDOM if number % 2 else GREEDY)
        ]


def test_everything_is_given_back(model: Decoder):
    engine = Engine(model, EngineConfig(kv_cache_tokens=320))
    for number, prompt in enumerate(prompts(10)):
        engine.add(str(number), prompt, RANDOM)
    for _ in range(5):
        engine.step()
    assert engine.abort("0")
    assert engine.abort("9")
    assert not engine.abort("9")
    outputs = drain(engine)
    assert "9" not in outputs
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert engine.step() == []


def test_stop_token_ends_and_is_reported(model: Decoder):
    free = alone(model, [1, 2, 3], GREEDY)
    stop = free[4].token_id
    first = [o.token_id for o in free].index(stop)
    stopped = alone(model, [1, 2, 3], SamplingParams(max_tokens=24, temperature=0.0, stop_ids=(stop,)))
    assert [o.token_id for o in stopped] == [o.token_id for o in free[: first + 1]]
    assert stopped[-1].finish_reason == "stop"
    assert free[-1].finish_reason == "length"


def test_context_limit_cuts_the_answer(model: Decoder):
    outputs = alone(model, [7] * 150, SamplingParams(max_tokens=999, temperature=0.0))
    assert len(outputs) == 10
    assert outputs[-1].finish_reason == "length"


def test_refusals_name_the_way_out(model: Decoder):
    engine = Engine(model, EngineConfig())
    with config_error("prompt", match="empty"):
        engine.add("a", [], GREEDY)
    with config_error("prompt", match="context is 160"):
        engine.add("a", [1] * 160, GREEDY)
    with config_error("prompt", match="between 0 and 210"):
        engine.add("a", [211], GREEDY)
    engine.add("a", [1], GREEDY)
    with config_error("request_id"):
        engine.add("a", [1], GREEDY)
    with config_error("kv_cache_tokens", match="at least 160"):
        Engine(model, EngineConfig(kv_cache_tokens=100))
    with config_error("temperature", match="temperature"):
        SamplingParams(temperature=-1)


def test_a_model_that_is_not_finite_ends_with_an_error():
    broken = Decoder(
        ModelConfig(
            vocab_size=9, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=8, max_seq_len=16
        )
    )
    broken.init_weights(0)
    broken.norm.weight.data.fill_(float("nan"))
    outputs = alone(broken, [1, 2], GREEDY)
    assert [o.finish_reason for o in outputs] == ["error"]


def test_every_form_of_the_head_gives_the_same_logits(model: Decoder):
    hidden = torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        kinds = HEAD_KINDS if torch.backends.mkldnn.is_available() else (fastest_head_kind(model),)
        for kind in kinds:
            torch.testing.assert_close(head_of(model, kind)(hidden), model.logits(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_completions_of_a_model_in_training_are_those_of_single_prompts(model: Decoder, dtype: torch.dtype):
    copied = Decoder(model.config)
    copied.load_state_dict(model.state_dict())
    copied = copied.to(dtype).train()
    params = [GREEDY, RANDOM, RANDOM, SamplingParams(max_tokens=3, seed=8)]
    finished: list[int] = []
    together = generate(copied, prompts(4), params, EngineConfig(max_num_seqs=3), on_step=finished.append)
    assert copied.training
    assert finished[-1] == 4
    assert len(together[3].token_ids) == 3
    for prompt, chosen, completion in zip(prompts(4), params, together, strict=True):
        naive = generate_naive(copied, prompt, chosen)
        assert completion.token_ids == [draw.token_id for draw in naive]
        assert completion.logprobs == pytest.approx([draw.logprob for draw in naive], abs=2e-4)
        assert completion == generate(copied, [prompt], [chosen])[0]


def test_the_probe_of_products_is_where_the_model_is(model: Decoder) -> None:
    """A device without values stands for an accelerator: what is compared there cannot be, and that ends the probe."""
    moved = copy.deepcopy(model).to("meta")
    devices: list[str] = []
    for projection in moved.projections().values():
        projection.register_forward_pre_hook(lambda _, inputs: devices.append(inputs[0].device.type))
    with pytest.raises(NotImplementedError, match="aten::equal"):
        stable_row_multiple(moved, moved.logits)
    assert set(devices) == {"meta"}
