"""A small model and runs of the engine on it, for the engine's tests."""

import random
from collections.abc import Iterable
from typing import Any

from modelwright.infer.engine import Engine, EngineConfig, StepOutput
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder, ModelConfig

VOCAB_SIZE = 97
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, num_logprobs=2)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.2, top_p=0.95, seed=5, num_logprobs=2)


def make_model(**changes: Any) -> Decoder:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "num_layers": 2, "model_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "ffn_dim": 96, "max_seq_len": 160, "init_std": 0.2,
    }  # fmt: skip
    decoder = Decoder(ModelConfig(**{**shape, **changes}))
    decoder.init_weights(3)
    return decoder.eval()


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(count)]


def make_engine(model: Decoder, **settings: Any) -> Engine:
    """Chunks of one block, so that short prompts have several of them."""
    return Engine(model, EngineConfig(**{"prefill_chunk_size": 16, **settings}), head=model.logits)


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    """All outputs by request until the engine has no work left."""
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def answer(outputs: Iterable[StepOutput]) -> list[tuple[Any, ...]]:
    """What a client sees of a request's outputs."""
    return [(o.token_id, o.logprob, o.alternatives, o.finish_reason, o.prompt_scores, o.embedding) for o in outputs]


def alone(model: Decoder, prompt: list[int], params: SamplingParams) -> list[tuple[Any, ...]]:
    """The answer of an engine that computes this request only and shares nothing."""
    engine = make_engine(model, enable_prefix_caching=False)
    engine.add("0", prompt, params)
    return answer(drain(engine)["0"])
