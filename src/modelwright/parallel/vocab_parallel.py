"""Embedding, head and loss when each rank of an axis holds some rows of the vocabulary.

Rank r holds rows `own_rows`, as in a DTensor's `Shard(0)`: the last rank may have fewer. In training no rank gathers
the logits of the whole vocabulary; only three numbers per token are exchanged (Shoeybi et al. 2019, section 3). Hidden
states, labels and the loss are the same on all ranks, to the last bit.

Legend: B rows, T tokens, D model width, V vocabulary, U the rows of it on this rank, C tokens of one chunk, R ranks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import linear_cross_entropy
from modelwright.ops.token_log_probs import LinearHead
from modelwright.parallel.mesh import World
from modelwright.parallel.tp_collectives import enter, gathered, with_gradient


def own_rows(vocab_size: int, num_ranks: int, rank: int) -> range:
    """The range of tokens whose rows of embedding and head are on `rank`."""
    share = -(-vocab_size // num_ranks)
    return range(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


def embed(weight_UD: Tensor, tokens_BT: Tensor, vocab_size: int, axis: World) -> Tensor:
    """[B, T, D]: the embedding of tokens whose row is on this rank, zeros for others; the sum over the axis is
    complete.
    """
    rows = own_rows(vocab_size, axis.size, axis.rank)
    here_BT = (tokens_BT >= rows.start) & (tokens_BT < rows.stop)
    found_BTD = F.embedding((tokens_BT - rows.start) * here_BT, weight_UD)
    return found_BTD.masked_fill(~here_BT.unsqueeze(-1), 0.0)


def cross_entropy(model: Decoder, axis: World, hidden_BTD: Tensor, labels_BT: Tensor, *, chunk_tokens: int) -> Tensor:
    """`Decoder.cross_entropy` over the sharded vocabulary: the complete sum and its complete gradient on each rank."""
    weight_UD = _head_piece(model)
    softmax = partial(_loss_and_gradient, own_rows(model.config.vocab_size, axis.size, axis.rank), axis)
    hidden_ND, labels_N = enter(hidden_BTD, axis).flatten(0, 1), labels_BT.flatten()
    return linear_cross_entropy(
        hidden_ND,
        weight_UD,
        labels_N,
        chunk_tokens=chunk_tokens,
        loss_of_logits=model.capped(softmax),
        compute=model.ends.head_dtype,
        in_fp32=model.ends.loss_in_fp32,
    )


def linear_head(model: Decoder, axis: World) -> LinearHead:
    """`Decoder.linear_head` of the rows on this rank. Log-probabilities, entropies and their gradients are complete on
    each rank.
    """
    return LinearHead(
        weight_UD=_head_piece(model),
        soft_cap=model.config.logit_soft_cap,
        compute=model.ends.head_dtype,
        first_row=own_rows(model.config.vocab_size, axis.size, axis.rank).start,
        enter=partial(enter, axis=axis),
        gather=axis.all_gather,
    )


def logits(model: Decoder, axis: World, hidden: Tensor) -> Tensor:
    """`Decoder.logits`, [..., V], of the sharded vocabulary, on each rank."""
    weight_UD = _head_piece(model)
    part = model.cap(F.linear(enter(hidden, axis), weight_UD.to(hidden.dtype)))
    vocab_size = model.config.vocab_size
    rows = own_rows(vocab_size, axis.size, axis.rank)
    missing = len(own_rows(vocab_size, axis.size, 0)) - len(rows)

    def all_parts(mine: Tensor) -> Tensor:
        whole = gathered(F.pad(mine, (0, missing)), axis, -1)
        return whole if whole.shape[-1] == vocab_size else whole[..., :vocab_size].contiguous()

    return with_gradient(part, all_parts, lambda gradient: gradient[..., rows.start : rows.stop])


def _head_piece(model: Decoder) -> Tensor:
    weight = model.head_weight
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _loss_and_gradient(rows: range, axis: World, logits_CU: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss over the whole vocabulary, and its gradient in this rank's logits, which are overwritten. Each rank's
    maximum, sum of exponentials and score of the label are sent together; every rank merges them in the same order.
    """
    scores_CU = logits_CU
    places_C = labels_C - rows.start
    here_C = (labels_C >= rows.start) & (labels_C < rows.stop)
    places_C1 = (places_C * here_C)[:, None]
    chosen_C = scores_CU.gather(1, places_C1)[:, 0] * here_C
    largest_C = scores_CU.amax(dim=-1)
    exponentials_CU = scores_CU.sub_(largest_C[:, None]).exp_()
    parts_R3C = axis.all_gather(torch.stack([largest_C, exponentials_CU.sum(dim=-1), chosen_C]))
    maxima_RC, sums_RC, chosen_RC = parts_R3C.unbind(1)
    normalizer_C = (maxima_RC + sums_RC.log()).logsumexp(dim=0)
    loss = (normalizer_C - chosen_RC.sum(dim=0)).sum()
    grad_CU = exponentials_CU.mul_((largest_C - normalizer_C).exp()[:, None])
    grad_CU.scatter_add_(1, places_C1, -here_C[:, None].to(grad_CU.dtype))
    return loss, grad_CU
