"""Generation by a model whose layers compute in a training policy's formats."""

from typing import get_args

import pytest
import torch

from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import Policy, PrecisionConfig

EIGHT_BITS = ("fp8", "int8")
"""Their scales depend on the batch, so that what a step computes beside a token changes its last bits of few."""
PROMPTS = [[1, 2, 3], list(range(5, 40)), [7]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("policy", [one for one in get_args(Policy) if one != "auto"])
def test_a_model_in_training_generates_what_its_own_forward_pass_says(policy: Policy, tied: bool) -> None:
    config = ModelConfig(
        vocab_size=97,
        num_layers=2,
        model_dim=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_dim=64,
        max_seq_len=64,
        tie_embeddings=tied,
        init_std=0.1,
    )
    model = Decoder(config)
    model.init_weights(seed=3)
    ModelPrecision(model, PrecisionConfig(policy=policy))
    params = [SamplingParams(max_tokens=8, temperature=0.0)] * len(PROMPTS)
    # A chunk shorter than one prompt, so that keys and values are also read from the cache while a prompt is computed.
    completions = generate(model, PROMPTS, params, EngineConfig(max_num_seqs=3, prefill_chunk_size=16))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens_1T = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            hidden_1TD = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attend())
            log_probs_1TV = model.logits(hidden_1TD).float().log_softmax(dim=-1)
        expected = log_probs_1TV[0, len(prompt) - 1 : -1].gather(1, tokens_1T[0, len(prompt) :, None]).flatten()
        assert len(completion.token_ids) == 8
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, rtol=0, atol=0.3 if policy in EIGHT_BITS else 0.03
        )
