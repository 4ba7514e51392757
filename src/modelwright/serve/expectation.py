"""What a newcomer may expect of a model's answers, by its size."""

SMALLEST_CHAT_MODEL = 135_000_000
"""Parameters of SmolLM2-135M-Instruct, among the smallest published models that answer questions."""


def expectation(num_parameters: int) -> str:
    """One sentence for a model that is too small to answer questions; "" for a larger one."""
    if num_parameters >= SMALLEST_CHAT_MODEL:
        return ""
    millions = num_parameters / 1e6
    amount = f"{millions:.0f}" if millions >= 10 else f"{millions:.1f}".removesuffix(".0")
    return (
        f"This model has {amount} million parameters: it has learned what answers look like, not facts, "
        "and most of what it says is wrong."
    )
