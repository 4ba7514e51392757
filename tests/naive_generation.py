"""Generation by whole forward passes: no cache, one sequence, one token at a time. The engine's reference."""

from collections import Counter
from collections.abc import Sequence

import torch

from modelwright.infer.sampler import SampledToken, SampleRequest, sample
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder


@torch.inference_mode()
def generate_naive(model: Decoder, prompt_ids: Sequence[int], params: SamplingParams) -> list[SampledToken]:
    """The new tokens, the stop token included. Costs a whole forward pass over everything so far per token."""
    tokens, draws, counts = list(prompt_ids), [], Counter()
    room = min(params.max_tokens, model.config.max_seq_len - len(tokens))
    while len(draws) < room:
        tokens_1T = torch.tensor([tokens])
        hidden_1TD = model(tokens_1T, torch.arange(len(tokens))[None], causal_attend())
        (draw,) = sample(model.logits(hidden_1TD[:, -1]), [SampleRequest(params, len(draws), counts)])
        tokens.append(draw.token_id)
        counts[draw.token_id] += 1
        draws.append(draw)
        if draw.token_id in params.stop_ids:
            break
    return draws
