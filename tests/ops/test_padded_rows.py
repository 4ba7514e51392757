"""Losses of a head whose narrow products get whole numbers of rows: few shapes, and padding that reaches no result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from modelwright.ops import matmul
from modelwright.ops.cross_entropy import LinearHead, linear_cross_entropy, token_log_probs_and_entropies
from modelwright.ops.distillation_loss import TeacherHead, distillation_loss
from modelwright.ops.matmul import ROW_STEP, padded_rows
from tolerances import TOLERANCES

NUM_TOKENS, WIDTH, VOCABULARY, CHUNK = 300, 16, 37, 2 * ROW_STEP
NARROW = torch.bfloat16


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    head = LinearHead(weight_UD=weight, compute=compute, soft_cap=6.0)
    values, entropies = token_log_probs_and_entropies(hidden, head, labels, chunk_tokens=CHUNK)
    return (values + 0.3 * entropies).sum()


def distilled(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    head = LinearHead(weight_UD=weight, compute=compute)
    teacher = TeacherHead(hidden_NE=hidden.detach().flip(1).to(compute), weight_VE=weight.detach().to(compute))
    return distillation_loss(hidden, head, teacher, labels, temperature=2.0, label_share=0.4, chunk_tokens=CHUNK).loss


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "cross-entropy": lambda hidden, weight, labels, compute: linear_cross_entropy(
        hidden, weight, labels, chunk_tokens=CHUNK, compute=compute
    ),
    "log-probabilities": log_probs,
    "distillation": distilled,
}


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies narrow formats, as those do that compile a kernel for each shape."""
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", matmul.NARROW)


def inputs(num_counted: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, those of tokens that do not count are not finite; the weight; labels."""
    draw = torch.Generator().manual_seed(num_counted)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=draw)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).requires_grad_()
    labels = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=draw)
    ignored = torch.randperm(NUM_TOKENS, generator=draw)[num_counted:]
    labels[ignored] = -100
    return hidden.index_fill(0, ignored, torch.nan).requires_grad_(), weight, labels


@pytest.mark.parametrize("name", LOSSES)
@given(num_counted=st.integers(0, NUM_TOKENS))
@settings(deadline=None, max_examples=25)
def test_results_are_those_of_exact_products(name: str, num_counted: int) -> None:
    hidden, weight, labels = inputs(num_counted)
    narrow, exact = (LOSSES[name](hidden, weight, labels, compute) for compute in (NARROW, torch.float32))
    results = [narrow, *torch.autograd.grad(narrow, (hidden, weight))]
    references = [exact, *torch.autograd.grad(exact, (hidden, weight))]
    for ours, reference in zip(results, references, strict=True):
        # In units of the largest value: sums of many terms are not of order 1.
        largest = reference.detach().abs().max().clamp(min=1.0)
        torch.testing.assert_close(ours / largest, reference / largest, **TOLERANCES["bf16_gradient"])


class Shapes(TorchDispatchMode):
    """The shapes of the factors of all products in a narrow format."""

    def __init__(self) -> None:
        super().__init__()
        self.of_products = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factors = [one for one in args if isinstance(one, torch.Tensor)]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and factors[0].dtype == NARROW:
            self.of_products.add(tuple((tuple(one.shape), one.stride()) for one in factors))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOSSES)
def test_the_number_of_shapes_does_not_follow_the_number_of_tokens(name: str) -> None:
    with Shapes() as shapes:
        for num_counted in range(1, NUM_TOKENS, 7):
            hidden, weight, labels = inputs(num_counted)
            torch.autograd.grad(LOSSES[name](hidden, weight, labels, NARROW), (hidden, weight))
    # Logits, gradient of the hidden states, gradient of the weight; for each number of rows that a chunk may have
    assert 3 <= len(shapes.of_products) <= 3 * CHUNK // ROW_STEP


def test_other_formats_and_devices_are_not_padded() -> None:
    rows = torch.randn(ROW_STEP + 1, 3)
    assert padded_rows(rows, torch.float32) is rows
    assert padded_rows(rows.to("meta"), NARROW).shape == rows.shape
    padded = padded_rows(rows, NARROW)
    assert padded.shape == (2 * ROW_STEP, 3)
    torch.testing.assert_close(padded[: len(rows)].float(), rows, **TOLERANCES["bf16_op"])
    assert not padded[len(rows) :].any()


def test_processors_without_instructions_pad_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES", frozenset())
    assert padded_rows(torch.ones(3, 2), NARROW).shape == (3, 2)
