"""Samples to score in tests."""

from typing import Any

from modelwright.reward.reward import Sample


def sample(answer: str, /, *, num_tokens: int = 1, **fields: Any) -> Sample:
    prompt = [{"role": "user", "content": "?"}]
    return Sample(prompt=prompt, answer=answer, num_tokens=num_tokens, fields=fields)
