"""The one table of tolerances. Loosening a row needs a reason, and the reason stands beside it.

Use as `torch.testing.assert_close(fast, naive, **TOLERANCES["fp32_op"])`.
"""

from typing import Any

TOLERANCES: dict[str, dict[str, Any]] = {
    # One operator, values of order 1: sums of up to a few thousand products in another order; eps is 1.2e-7.
    "fp32_op": {"rtol": 1e-5, "atol": 1e-5},
    # Gradients of a sum over many tokens: more and larger terms than in a forward pass.
    "fp32_gradient": {"rtol": 1e-4, "atol": 5e-5},
    # One operator in BF16 (8 bits of mantissa, eps 7.8e-3) against FP32: inputs and outputs are each rounded once.
    "bf16_op": {"rtol": 2e-2, "atol": 2e-2},
    # BF16 gradients: every chunk's or tile's product is rounded, and canceling terms make the error absolute.
    "bf16_gradient": {"rtol": 5e-2, "atol": 5e-2},
    # Logits of a whole model against another FP32 implementation: the project's promise is 1e-4.
    "fp32_logits": {"rtol": 0.0, "atol": 1e-4},
    # Losses (nats) of the same global batch split over microbatches or ranks: sums in another order, and the
    # differences of one step are carried into the next.
    "fp32_loss": {"rtol": 1e-5, "atol": 1e-5},
    # Weights after a few optimizer steps of such runs: Adam divides by small second moments, which amplifies.
    "fp32_trained": {"rtol": 1e-3, "atol": 1e-4},
}
