"""Log-probabilities as JSON has them."""

from typing import Any

from modelwright.serve.generation import Answer, Generation

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, as in vLLM: JSON has no such number."""


ID_PREFIX = "token_id:"
"""Before the id of a token that is called by it, as in vLLM."""


def token_name(generation: Generation, token_id: int) -> str:
    """A token as log-probabilities name it: by its text, or by its id, which no two tokens share, if the client asks
    for that.
    """
    by_id = generation.request.return_tokens_as_token_ids
    return f"{ID_PREFIX}{token_id}" if by_id else generation.codec.token_text(token_id)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(generation: Generation, answer: Answer) -> list[dict[str, Any] | None]:
    """For each token of a prompt, in vLLM's form: the token itself and the likeliest ones at its place by id; None for
    the first, which follows nothing.
    """
    entries: list[dict[str, Any] | None] = [None]
    most = generation.request.prompt_logprobs or 0
    for score in answer.prompt_scores:
        ranked = [(rank, *other) for rank, other in enumerate(score.alternatives[:most], start=1)]
        ranked += [(score.rank, score.token_id, score.logprob)]
        entries.append(
            {
                str(token): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": generation.codec.token_text(token),
                }
                for rank, token, logprob in ranked
            }
        )
    return entries
