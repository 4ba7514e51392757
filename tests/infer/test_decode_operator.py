"""Decoding by one operator against the model's own forward, and that neighbors change no bit of a request."""

import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_folders import CASES, VOCAB_SIZE, write_folder
from infer.engine_runs import GREEDY, SAMPLED, alone, answer, drain, make_engine, make_model, tokens
from modelwright.compress.int8 import ActivationGrid, Int8WeightsConfig, TrainedGrid, quantize_model, quantize_to_grid
from modelwright.core.library_environment import LOWER
from modelwright.infer.decode_operator import PROMPT_LEN, DecodeOperator
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams, ScoredToken
from modelwright.model.adapters import adapters_of, attach_adapters
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import AttentionConfig, Decoder, Linear
from modelwright.model.hf import load_model
from modelwright.model.low_rank import AdapterConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.cpu_kernels import KERNELS
from modelwright.ops.decode_step import PARTS, DecodeStep
from modelwright.ops.int_grid import Bits, WeightGrid
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig

WITH, WITHOUT = "decode_step", "0"
NUM_NEW = 48
PROMPT_LENS = (1, 9, 23, 45)
GREEDY_LONG = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"num_kv_heads": 4},
    "one group": {"num_kv_heads": 1},
    "gate of heads": {"attention_gate": "head"},
    "gate of elements": {"attention_gate": "element"},
    "selected heads": {"head_budget": 0.5},
    "selected and gated heads of one group": {"head_budget": 0.5, "attention_gate": "head", "num_kv_heads": 1},
    "own head": {"tie_embeddings": False},
    "window and cap": {"attention": AttentionConfig(window=20, window_layers=(1,), soft_cap=4.0)},
}


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not cpu_kernels.instruction_set():
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setenv(cpu_kernels.SWITCH, WITH)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", *LOWER])
def each_instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    own, names = cpu_kernels.instruction_set(), ["avx512", *LOWER]
    if request.param != "native":
        if own not in names or names.index(own) >= names.index(request.param):
            pytest.skip(f"kernels for this processor are those of {own}")
        library = cpu_kernels.compiled_for(LOWER[request.param].march)
        monkeypatch.setattr(cpu_kernels, "kernels", lambda: library)


def answers(
    model: Decoder, prompts: list[list[int]], **settings: Any
) -> tuple[list[list[int]], list[list[float]], str]:
    """Tokens and log-probabilities of greedy answers, decoded together, and why there is no operator."""
    engine = make_engine(model, kv_cache_tokens=1024, **settings)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, GREEDY_LONG)
    outputs = drain(engine)
    ordered = [outputs[str(number)] for number in range(len(prompts))]
    found = [[one.token_id for one in own] for own in ordered], [[one.logprob for one in own] for own in ordered]
    return *found, engine.why_no_operator


def assert_same_answers(
    model: Decoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, tolerance: float = 1e-4
) -> None:
    own, own_logprobs, reason = answers(model, prompts)
    assert not reason
    monkeypatch.setenv(cpu_kernels.SWITCH, WITHOUT)
    twin, twin_logprobs, reason = answers(model, prompts)
    assert reason
    assert own == twin
    for one, other in zip(own_logprobs, twin_logprobs, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_answers(make_model(**MODELS[name]), [tokens(n, n) for n in PROMPT_LENS], monkeypatch)


def test_closed_heads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in prompts nor in decoding: queries, keys and values that are no numbers stay without effect where a head
    is closed.
    """
    model = make_model(head_budget=0.5)
    for block in model.blocks.values():
        router = Linear(model.config.model_dim, model.config.num_kv_heads, bias=True)
        with torch.no_grad():
            router.weight.zero_()
            router.bias.copy_(torch.tensor([-1.0, 1.0]))
        block.attention.head_router = router
    prompts = [tokens(n, n) for n in PROMPT_LENS]
    monkeypatch.setenv(cpu_kernels.SWITCH, f"attention,{WITH}")
    expected, logprobs, reason = answers(model, prompts)
    assert not reason
    for block in model.blocks.values():
        for projection in (block.attention.q_proj, block.attention.k_proj, block.attention.v_proj):
            projection.weight.data.unflatten(0, (2, -1))[0] = float("nan")
    found, found_logprobs, _ = answers(model, prompts)
    assert found == expected
    assert found_logprobs == logprobs
    monkeypatch.setenv(cpu_kernels.SWITCH, WITHOUT)
    broken, _, _ = answers(model, prompts)
    assert broken != expected, "PyTorch's operators decode all heads"


def test_a_step_that_is_timed_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of its time are all there, and none of it is counted twice."""
    model = make_model(attention_gate="head")
    prompts = [tokens(n, n) for n in PROMPT_LENS]
    expected = answers(model, prompts)
    seconds, wall, plain = array("d", [0.0] * len(PARTS)), 0.0, DecodeStep.__call__

    def timed(step: DecodeStep, *arguments: Any) -> torch.Tensor:
        nonlocal wall
        step.seconds = seconds
        started = time.perf_counter()
        try:
            return plain(step, *arguments)
        finally:
            wall += time.perf_counter() - started

    monkeypatch.setattr(DecodeStep, "__call__", timed)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert answers(model, prompts) == expected
        assert min(seconds) > 0
        assert sum(seconds) < wall


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_model_type_is_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    write_folder(name, tmp_path)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist() for length in PROMPT_LENS]
    assert_same_answers(load_model(tmp_path), prompts, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "tie_embeddings": False}], ids=["tied", "untied"])
def test_int8_models(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are rounded alike, so that the two differ by the rounding of norms and attention, which moves few codes."""
    model = quantize_model(make_model(**changes), Int8WeightsConfig())
    assert_same_answers(model, [tokens(n, n) for n in PROMPT_LENS], monkeypatch, tolerance=0.05)


def assert_same_up_to_ties(model: Decoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """For INT8 activations: where the two round a number to different codes, they may choose different ones of two
    equally likely tokens. That is no difference, but what follows is another text.
    """
    own, own_logprobs, reason = answers(model, prompts)
    assert not reason
    monkeypatch.setenv(cpu_kernels.SWITCH, WITHOUT)
    twin, twin_logprobs, _ = answers(model, prompts)
    num_compared = 0
    for left, right, left_logprobs, right_logprobs in zip(own, twin, own_logprobs, twin_logprobs, strict=True):
        differing = [place for place in range(len(left)) if left[place] != right[place]]
        end = differing[0] + 1 if differing else len(left)
        assert left_logprobs[:end] == pytest.approx(right_logprobs[:end], abs=0.05)
        num_compared += end
    assert num_compared > 0.8 * sum(map(len, own))


def four_bit_model(
    activations: ActivationGrid = "none", *, symmetric: bool = True, bits: Bits = 4, **changes: Any
) -> Decoder:
    grid = WeightGrid(bits=bits, symmetric=symmetric, granularity="group_32")
    shape = {"model_dim": 64, "ffn_dim": 160, **changes}
    trained = TrainedGrid(weights=grid, activations=activations, int8_ends=activations == "token")
    return quantize_to_grid(make_model(**shape), trained, choose=lambda matrices: "int_mm")


@pytest.mark.slow
@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("activations", ["none", "token"])
def test_four_bit_models(activations: ActivationGrid, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = four_bit_model(activations, symmetric=symmetric)
    prompts = [tokens(n, n) for n in (1, 23)]
    if activations == "none":
        assert_same_answers(model, prompts, monkeypatch)
    else:
        assert_same_up_to_ties(model, prompts, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("activations", ["none", "token"])
def test_four_bit_models_that_select_heads(activations: ActivationGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers and gates have four bits, too. An INT8 activation of another code may open another head."""
    model = four_bit_model(activations, head_budget=0.5, attention_gate="head", num_kv_heads=1)
    prompts = [tokens(n, n) for n in (1, 23)]
    if activations == "none":
        assert_same_answers(model, prompts, monkeypatch)
    else:
        assert_same_up_to_ties(model, prompts, monkeypatch)


@pytest.mark.usefixtures("each_instruction_set")
def test_models_in_every_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_answers(make_model(), [tokens(n, n) for n in PROMPT_LENS], monkeypatch)


def test_bf16_models_are_closer_to_fp32_than_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and cache are BF16, everything between them FP32."""
    model = make_model().to(torch.bfloat16)
    prompts = [tokens(n, n) for n in PROMPT_LENS]
    found, logprobs, reason = answers(model, prompts)
    assert not reason
    exact, exact_logprobs, _ = answers(make_model().to(torch.bfloat16).float(), prompts)
    monkeypatch.setenv(cpu_kernels.SWITCH, WITHOUT)
    _, twin_logprobs, _ = answers(model, prompts)
    first = [own[1] for own in exact_logprobs]  # the first that is decoded
    gaps = [sum(abs(own[1] - one) for own, one in zip(side, first, strict=True)) for side in (logprobs, twin_logprobs)]
    assert gaps[0] < gaps[1] < 0.2 * len(prompts)
    assert [own[:2] for own in found] == [own[:2] for own in exact]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "int8", "selected heads", "none", "token"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(
    kind: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among 32, after preemptions, with a beginning from the cache, and with guesses that are verified. The last two
    have 4-bit weights.
    """
    monkeypatch.setenv(cpu_kernels.SWITCH, f"{WITH},four_bits")
    if kind == "none" or kind == "token":
        model = four_bit_model(kind)
    else:
        model = make_model(**MODELS.get(kind, {}))
        if kind == "int8":
            model = quantize_model(model, Int8WeightsConfig())
    prompts = [tokens(5 + 3 * n % 60, n) for n in range(32)]
    prompts[7] = prompts[6][:32] + prompts[7]
    expected = [alone(model, prompt, params) for prompt in prompts]
    engine = make_engine(model, kv_cache_tokens=640)
    for _ in range(2):  # the second time from the cache
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, params)
        outputs = drain(engine)
        assert [answer(outputs[str(number)]) for number in range(len(prompts))] == expected
    assert not engine.why_no_operator
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hits > 0


def read_prompts(model: Decoder, chunk_size: int) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that is asked of prompts, of requests that run together."""
    engine = make_engine(model, kv_cache_tokens=2048, prefill_chunk_size=chunk_size)
    scored = replace(GREEDY, num_prompt_logprobs=2)
    for length in (1, 15, 16, 20, 21, 100):
        engine.add(f"{length}", tokens(length, length), GREEDY)
        engine.add(f"{length}, scored", tokens(length, length), scored)
        engine.embed(f"{length}, mean", tokens(length, length), pooling="mean")
        engine.embed(f"{length}, last", tokens(length, length), pooling="last")
    return {name: answer(outputs) for name, outputs in drain(engine).items()}


@pytest.mark.parametrize("kind", ["fp32", "int8", "window and cap"])
def test_a_prompt_has_the_same_bits_however_it_is_divided(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into chunks; and nearly the same ones wherever the model takes over from the operator."""
    model = make_model(**MODELS.get(kind, {}))
    if kind == "int8":
        model = quantize_model(model, Int8WeightsConfig(backend="int_mm"))
    monkeypatch.setattr(DecodeOperator, "prompt_len", 0)
    expected = read_prompts(model, 64)
    for prompt_len in (1, 20, PROMPT_LEN):
        monkeypatch.setattr(DecodeOperator, "prompt_len", prompt_len)
        found = read_prompts(model, 64)
        assert read_prompts(model, 16) == found
        assert found.keys() == expected.keys()
        for name, outputs in found.items():
            for own, other in zip(outputs, expected[name], strict=True):
                assert own[0] == other[0]  # tokens
                torch.testing.assert_close(flat(own), flat(other), rtol=1e-3, atol=2e-3 if kind == "int8" else 2e-4)


def flat(output: Any) -> torch.Tensor:
    """All numbers of an output."""
    if isinstance(output, int | float):
        return torch.tensor([float(output)])
    if isinstance(output, ScoredToken):
        output = vars(output).values()
    parts = [] if isinstance(output, str) or output is None else [flat(one) for one in output]
    return torch.cat([torch.empty(0), *parts])


def test_verified_guesses_change_no_bit() -> None:
    model, text = make_model(), (tokens(9, 2) * 6)[:50]
    found = []
    for num_guesses in (0, 4):
        engine = make_engine(model, num_speculative_tokens=num_guesses)
        for number in range(3):
            engine.add(str(number), text[number:], GREEDY_LONG)
        found.append({name: answer(own) for name, own in drain(engine).items()})
        assert (engine.stats().num_accepted_tokens > 0) == (num_guesses > 0)
    assert found[0] == found[1]


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only decoding is compared: prompts of one token leave the products of PyTorch out of it."""
    found = []
    for threads in (1, 3):
        engine = make_engine(make_model())
        for number in range(5):
            engine.add(str(number), [number], GREEDY_LONG)
        first = engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found.append((first, drain(engine)))
    assert found[0] == found[1]


def reason(model: Decoder) -> str:
    return Engine(model, EngineConfig()).why_no_operator


def test_what_the_operator_does_not_compute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reason(make_model())
    assert "torch.float64" in reason(make_model().double())
    adapted = make_model()
    adapted.projections()["blocks.1.ffn.up_proj"].adapter = lambda x, out, row_blocks: out
    assert "an adapter is attached" in reason(adapted)
    assert not reason(four_bit_model())
    assert "8-bit weights" in reason(four_bit_model(bits=8))
    names = make_model().projections()
    ranges = dict.fromkeys(names, (-2.0, 3.0))
    grid = TrainedGrid(weights=WeightGrid(bits=4), activations="tensor", ranges=ranges)
    assert "static range" in reason(quantize_to_grid(make_model(), grid, choose=lambda matrices: "int_mm"))
    half = {name: ranges[name] for name in names if "q_proj" not in name}
    assert "static range" in reason(
        quantize_to_grid(make_model(), replace(grid, ranges=half), choose=lambda matrices: "int_mm")
    )
    mixed = make_model()
    other = quantize_to_grid(mixed, TrainedGrid(weights=WeightGrid(bits=4)), choose=lambda matrices: "int_mm")
    mixed.blocks["0"].attention.k_proj = other.blocks["0"].attention.k_proj
    assert "several forms" in reason(mixed)
    in_training = make_model()
    in_training.ends.stream_dtype = torch.float16
    assert "training format" in reason(in_training)
    for policy in ("fp16_mixed", "fp8", "int8"):
        in_training = make_model()
        ModelPrecision(in_training, PrecisionConfig(policy=policy))
        assert "training format" in reason(in_training), policy
    multiplied = make_model()
    multiplied.projections()["blocks.1.ffn.up_proj"].product = lambda x, weight: (
        2 * torch.nn.functional.linear(x, weight)
    )
    assert "training format" in reason(multiplied)
    monkeypatch.setenv(cpu_kernels.SWITCH, ",".join({*KERNELS} - {"decode_step"}))
    assert "decode_step is not used" in reason(make_model())


def rounded(model: Decoder) -> Decoder:
    """A plain model whose matrices are those that BF16 products read."""
    plain = make_model(tie_embeddings=False)
    plain.load_state_dict(model.state_dict())
    for module in (*plain.projections().values(), plain.head):
        assert isinstance(module, Linear)
        module.weight.data = module.weight.data.bfloat16().float()
    return plain


def test_a_model_in_training_is_decoded_with_the_weights_of_its_format() -> None:
    """Its prompt is computed in the format itself: the first tokens' keys and values are rounded, and nothing else."""
    model = make_model(tie_embeddings=False)
    expected = rounded(model)
    ModelPrecision(model, PrecisionConfig(policy="bf16_mixed"))
    prompt = tokens(9, 3)
    found = {}
    for name, one in {"in training": model, "rounded": expected}.items():
        engine = make_engine(one, kv_cache_tokens=1024)
        assert not engine.why_no_operator
        engine.add("0", prompt, GREEDY_LONG)
        found[name] = drain(engine)["0"]
    written = prompt + [one.token_id for one in found["in training"]]
    with torch.no_grad():
        hidden_1TD = expected(torch.tensor([written]), torch.arange(len(written))[None], causal_attend())
        log_probs_TV = expected.logits(hidden_1TD)[0].log_softmax(-1)
    for place, one in enumerate(found["in training"], start=len(prompt) - 1):
        assert one.logprob == pytest.approx(float(log_probs_TV[place, one.token_id]), abs=0.03)
    projections = model.projections().values()
    assert all(one.weight.dtype == torch.float32 for one in projections), "the model keeps its own weights"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_adapters_in_training_are_decoded_merged(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    attach_adapters(model, AdapterConfig(r=2, lora_dropout=0.5, **changes), 0)
    draw = torch.Generator().manual_seed(1)
    for adapter in adapters_of(model).values():
        torch.nn.init.normal_(adapter.lora_B, std=0.3, generator=draw)
    prompts = [tokens(length, length) for length in PROMPT_LENS]
    without = answers(make_model(), prompts)[0]
    assert_same_answers(model, prompts, monkeypatch)
    assert answers(model, prompts)[0] != without


def test_weights_that_are_not_finite_end_a_request_with_an_error() -> None:
    model = make_model()
    engine = make_engine(model)
    engine.add("0", tokens(5, 0), GREEDY)
    engine.step()
    model.projections()["blocks.1.ffn.up_proj"].weight.data.fill_(float("nan"))
    assert [one.finish_reason for one in drain(engine)["0"]] == ["error"]


RUNS_OF_THREADS = """
import os, sys, time
import modelwright, torch
from pathlib import Path
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig

torch.set_num_threads(2)
model = Decoder(ModelConfig(vocab_size=512, num_layers=2, model_dim=48, num_heads=4, num_kv_heads=2, head_dim=16,
                            ffn_dim=96, max_seq_len=160))
model.init_weights(0)
engine = Engine(model.eval(), EngineConfig())
assert not engine.why_no_operator, engine.why_no_operator
params = SamplingParams(max_tokens=60, temperature=0.0)
for number in range(int(sys.argv[1])):
    engine.add(str(number), list(range(3, 20)), params)

def runs():
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return {task.name: int((task / "schedstat").read_text().split()[2]) for task in tasks}

torch.ones(1 << 20).exp()  # makes OpenMP's second thread
for _ in range(5):
    engine.step()  # the prompts and the first tokens
time.sleep(0.2)  # all threads sleep
before = runs()
for _ in range(40):
    engine.step()
    time.sleep(0.002)  # longer than threads wait actively, so that a step wakes those that it needs
print(sum(after - before.get(name, 0) >= 20 for name, after in runs().items()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux with scheduler statistics")
@pytest.mark.parametrize("streams", ["1", "3"])
def test_a_step_wakes_its_own_thread_and_none_of_openmp(streams: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUNS_OF_THREADS, streams], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"], "threads that ran next to the main one"
