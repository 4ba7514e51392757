"""What a text as a whole gives instead of new tokens: an embedding, or the score of a model with a scalar head.

Legend: D model width.
"""

import torch
from torch import Tensor, nn

from modelwright.infer.sequence import Pooling


@torch.inference_mode()
def pooled(kind: Pooling, last_D: Tensor, sum_D: Tensor | None, num_tokens: int, head: nn.Module | None) -> list[float]:
    """Embeddings have unit length; a score is one number. Empty if a value is not finite.

    last_D: the last token's hidden state; sum_D: over all tokens, for "mean"; head: a product with `weight` [1, D], for
    "score". In FP64 and for one text at a time, so that nothing depends on what else is computed.
    """
    if kind == "score":
        assert head is not None
        values = (last_D.double() * head.get_parameter("weight")[0].double()).sum()[None]
    else:
        assert kind == "last" or sum_D is not None
        hidden_D = last_D.double() if sum_D is None or kind == "last" else sum_D / num_tokens
        values = hidden_D / hidden_D.norm().clamp_min(1e-12)
    return values.float().tolist() if bool(torch.isfinite(values).all()) else []
