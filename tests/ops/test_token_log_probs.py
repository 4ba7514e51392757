"""Log-probabilities and entropies of tokens against the definition with all logits: values, gradients, memory."""

import pytest
import torch

from largest_output import largest_tensor
from modelwright.ops.cross_entropy import (
    LinearHead,
    token_log_probs,
    token_log_probs_and_entropies,
    token_log_probs_naive,
)
from tolerances import TOLERANCES

SHAPES = [(1, 3, 2, 4), (7, 5, 11, 3), (64, 16, 97, 64), (65, 16, 97, 64), (130, 33, 257, 32)]


def make_inputs(num_tokens: int, dim: int, vocab: int, ignored: float, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, dim, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=draw).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), generator=draw)
    labels[torch.rand(num_tokens, generator=draw) < ignored] = -100
    return hidden, weight, labels


def factors(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What flows back into each token's log-probability and entropy."""
    return torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(1)).unbind()


@pytest.mark.parametrize(("num_tokens", "dim", "vocab", "chunk"), SHAPES)
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_equals_naive_twin(num_tokens, dim, vocab, chunk, ignored, soft_cap):
    hidden, weight, labels = make_inputs(num_tokens, dim, vocab, ignored)
    head = LinearHead(weight_UD=weight, soft_cap=soft_cap)
    naive = token_log_probs_naive(hidden, weight, labels, soft_cap=soft_cap)
    both = token_log_probs_and_entropies(hidden, head, labels, chunk_tokens=chunk)
    alone = token_log_probs(hidden, head, labels, chunk_tokens=chunk)
    torch.testing.assert_close(both, naive, **TOLERANCES["fp32_op"])
    torch.testing.assert_close(alone, naive[0], **TOLERANCES["fp32_op"])
    grads = factors(num_tokens)
    for fast, slow, upstream in ((both, naive, grads), ((alone,), naive[:1], grads[:1])):
        ours = torch.autograd.grad(fast, (hidden, weight), upstream)
        reference = torch.autograd.grad(slow, (hidden, weight), upstream, retain_graph=True)
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_float64_stays_float64():
    hidden, weight, labels = make_inputs(13, 6, 29, 0.2, torch.float64)
    both = token_log_probs_and_entropies(hidden, LinearHead(weight_UD=weight, soft_cap=2.0), labels, chunk_tokens=5)
    naive = token_log_probs_naive(hidden, weight, labels, soft_cap=2.0)
    upstream = [factor.double() for factor in factors(13)]
    torch.testing.assert_close(both, naive, rtol=1e-12, atol=1e-12)
    ours, reference = (torch.autograd.grad(result, (hidden, weight), upstream) for result in (both, naive))
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_bf16_products_keep_fp32_results_and_gradients():
    hidden, weight, labels = make_inputs(70, 32, 50, ignored=0.2)
    head = LinearHead(weight_UD=weight, compute=torch.bfloat16)
    found = token_log_probs(hidden, head, labels, chunk_tokens=32)
    exact = token_log_probs_naive(hidden, weight, labels)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, **TOLERANCES["bf16_gradient"])
    ours, reference = (torch.autograd.grad(one.sum(), (hidden, weight)) for one in (found, exact))
    assert all(gradient.dtype == torch.float32 for gradient in ours)
    torch.testing.assert_close(ours, reference, **TOLERANCES["bf16_gradient"])


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    found, entropies = token_log_probs_and_entropies(hidden, LinearHead(weight_UD=weight), torch.tensor([1, 1]))
    assert found.tolist() == [-600.0, 0.0]
    assert entropies.tolist() == [0.0, 0.0]
    (found + entropies).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_gradient_only_where_asked():
    hidden, weight, labels = make_inputs(12, 4, 6, ignored=0.0)
    token_log_probs(hidden.detach(), LinearHead(weight_UD=weight), labels).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not token_log_probs(hidden, LinearHead(weight_UD=weight), labels).requires_grad


def test_logits_never_exist_whole():
    hidden, weight, labels = make_inputs(400, 4, 500, ignored=0.1)
    head = LinearHead(weight_UD=weight, soft_cap=5.0)

    def forward_backward() -> None:
        log_probs, entropies = token_log_probs_and_entropies(hidden, head, labels, chunk_tokens=20)
        (log_probs + entropies).sum().backward()

    assert largest_tensor(forward_backward) == 20 * 500
