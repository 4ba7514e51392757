"""The distillation loss of a linear head against the definition with all logits: values, gradients, memory."""

from dataclasses import replace

import pytest
import torch

from largest_output import largest_tensor
from modelwright.ops.cross_entropy import LinearHead
from modelwright.ops.distillation_loss import (
    DivergenceKind,
    TeacherHead,
    TopTokens,
    distillation_loss,
    distillation_loss_naive,
)
from tolerances import TOLERANCES

NUM_TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 41, 6, 9, 29


def inputs(dtype: torch.dtype = torch.float64):
    draw = torch.Generator().manual_seed(3)
    shapes = [(NUM_TOKENS, WIDTH), (VOCABULARY, WIDTH), (NUM_TOKENS, TEACHER_WIDTH), (VOCABULARY, TEACHER_WIDTH)]
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    hidden, weight = (one.requires_grad_() for one in drawn[:2])
    teacher = TeacherHead(hidden_NE=drawn[2], weight_VE=drawn[3], soft_cap=4.0)
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=draw)
    labels[torch.rand(NUM_TOKENS, generator=draw) < 0.3] = -100
    return hidden, weight, teacher, labels


def teacher_logits(teacher: TeacherHead) -> torch.Tensor:
    return 4.0 * (teacher.hidden_NE @ teacher.weight_VE.T / 4.0).tanh()


def stored(teacher: TeacherHead, temperature: float, top_k: int) -> TopTokens:
    log_probs, tokens = (teacher_logits(teacher) / temperature).log_softmax(-1).topk(top_k)
    return TopTokens(log_probs_NK=log_probs, tokens_NK=tokens)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCABULARY])
@pytest.mark.parametrize(("temperature", "share"), [(2.5, 0.5), (1.0, 0.0), (3.0, 1.0)])
def test_equals_naive_twin(chunk, soft_cap, top_k, temperature, share):
    hidden, weight, teacher, labels = inputs()
    targets = stored(teacher, temperature, top_k) if top_k else teacher
    settings = {"temperature": temperature, "label_share": share}
    head = LinearHead(weight_UD=weight, soft_cap=soft_cap)
    fast = distillation_loss(hidden, head, targets, labels, chunk_tokens=chunk, **settings)
    naive = distillation_loss_naive(
        hidden, weight, teacher_logits(teacher), labels, soft_cap=soft_cap, top_k=top_k, **settings
    )
    torch.testing.assert_close(fast.loss, naive, rtol=1e-10, atol=1e-10)
    mixed = (1 - share) * temperature**2 * fast.divergence + share * fast.label_loss
    torch.testing.assert_close(mixed, fast.loss.detach())
    ours = torch.autograd.grad(1.7 * fast.loss, (hidden, weight))
    reference = torch.autograd.grad(1.7 * naive, (hidden, weight))
    torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


KINDS = [DivergenceKind(name="reverse_kl")] + [DivergenceKind(name="jsd", beta=share) for share in (0.1, 0.5, 0.9)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize(("temperature", "share"), [(2.5, 0.5), (1.0, 0.0)])
def test_other_divergences_equal_their_naive_twins(kind, soft_cap, temperature, share):
    hidden, weight, teacher, labels = inputs()
    settings = {"temperature": temperature, "label_share": share}
    head = LinearHead(weight_UD=weight, soft_cap=soft_cap)
    fast = distillation_loss(hidden, head, replace(teacher, kind=kind), labels, chunk_tokens=7, **settings)
    naive = distillation_loss_naive(
        hidden, weight, teacher_logits(teacher), labels, soft_cap=soft_cap, kind=kind, **settings
    )
    torch.testing.assert_close(fast.loss, naive, rtol=1e-10, atol=1e-10)
    ours, reference = (torch.autograd.grad(1.7 * loss, (hidden, weight)) for loss in (fast.loss, naive))
    torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def divergence(kind: DivergenceKind, *, swapped: bool = False) -> float:
    """Of one random distribution from another."""
    log_probs = torch.randn(2, 50, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    one, other = log_probs.flip(0) if swapped else log_probs
    return float(kind.of(one, other.clone(), lambda values: values[None]).values_C.sum())


def test_limits_of_the_mixture_are_the_two_directions():
    """Agarwal et al. 2024, section 2; and it is symmetric at a half and bounded by log 2."""
    tiny, forward, reverse = 1e-6, DivergenceKind(), DivergenceKind(name="reverse_kl")
    low, high, half = (DivergenceKind(name="jsd", beta=share) for share in (tiny, 1 - tiny, 0.5))
    assert divergence(low) / tiny == pytest.approx(divergence(forward), rel=1e-3)
    assert divergence(high) / tiny == pytest.approx(divergence(reverse), rel=1e-3)
    assert divergence(reverse) == pytest.approx(divergence(forward, swapped=True))
    assert divergence(reverse) != pytest.approx(divergence(forward), rel=0.01)
    assert divergence(half) == pytest.approx(divergence(half, swapped=True))
    assert divergence(half) < 50 * 0.6931


def test_probabilities_that_vanish_are_finite():
    scores = torch.tensor([[0.0, 300.0, -300.0]], dtype=torch.float32)
    for kind in (DivergenceKind(), *KINDS):
        found = kind.of(scores.log_softmax(-1), (-scores).log_softmax(-1), lambda values: values[None])
        assert found.values_C.isfinite().all()
        assert found.grad_CU.isfinite().all()


def test_stored_probabilities_bound_the_divergence_from_below():
    hidden, weight, teacher, labels = inputs()
    head = LinearHead(weight_UD=weight)
    settings = {"temperature": 2.0, "label_share": 0.0}
    values = [
        float(distillation_loss(hidden, head, stored(teacher, 2.0, k), labels, **settings).divergence)
        for k in (1, 4, 16, VOCABULARY)
    ]
    assert values == sorted(values)
    assert values[0] > 0
    assert float(distillation_loss(hidden, head, teacher, labels, **settings).divergence) == pytest.approx(values[-1])


def test_bf16_and_fp32_stay_close_to_float64():
    exact = distillation_loss_naive(
        *(inputs()[:2]), teacher_logits(inputs()[2]), inputs()[3], temperature=2.5, label_share=0.5
    )
    hidden, weight, teacher, labels = inputs(torch.float32)
    for compute, row in ((None, "fp32_op"), (torch.bfloat16, "bf16_op")):
        found = distillation_loss(
            hidden, LinearHead(weight_UD=weight, compute=compute), teacher, labels, temperature=2.5, label_share=0.5
        )
        assert found.loss.dtype == torch.float32
        torch.testing.assert_close(found.loss, exact.float(), **TOLERANCES[row])


def test_logits_never_exist_whole():
    hidden, weight, teacher, labels = inputs(torch.float32)
    head = LinearHead(weight_UD=weight)

    def forward_backward() -> None:
        found = distillation_loss(hidden, head, teacher, labels, temperature=2.0, label_share=0.5, chunk_tokens=10)
        found.loss.backward()

    assert largest_tensor(forward_backward) <= max(10 * VOCABULARY, NUM_TOKENS * WIDTH)
