"""What routes that need the engine have in common: admission, and inputs as token ids."""

from starlette.requests import Request

from modelwright.serve.bodies import read_body
from modelwright.serve.errors import ApiError
from modelwright.serve.service import Lease


async def admit(request: Request, lease: Lease, *, num_prompts: int) -> bytes:
    """What all requests to the engine pass before they are parsed: capacity, body. Raises `ApiError`."""
    lease.require_open()
    lease.model.worker.require_room(1)
    return await read_body(request, lease, num_prompts=num_prompts)


def require_generator(lease: Lease, name: str) -> None:
    """Raises `ApiError` 400 for a model that scores texts and generates none."""
    if lease.model.info.scores:
        text = f"The model {name!r} scores texts and generates none; ask /v1/score or /v1/rerank."
        raise ApiError(400, text, param="model", code="unsupported_task")


def require_scorer(lease: Lease, name: str) -> None:
    """Raises `ApiError` 400 for a model that cannot score texts."""
    if not lease.model.info.scores:
        text = f"The model {name!r} generates text and has no head that scores it; serve a reward model for that."
        raise ApiError(400, text, param="model", code="unsupported_task")


def not_empty(prompts: list[str] | list[list[int]], param: str) -> list[str] | list[list[int]]:
    if not prompts:
        raise _empty(param)
    return prompts


def token_ids(prompt: str | list[int], param: str, lease: Lease) -> list[int]:
    """Raises `ApiError` 400 for an empty prompt and for ids that the model does not have."""
    ids = lease.model.codec.encode(prompt) if isinstance(prompt, str) else known_ids(prompt, param, lease)
    if not ids:
        raise _empty(param)
    return ids


def known_ids(ids: list[int], param: str, lease: Lease) -> list[int]:
    """Raises `ApiError` 400 for ids that the model does not have."""
    size = lease.model.info.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ApiError(400, f"Token ids must be between 0 and {size - 1}.", param=param, code="invalid_value")
    return ids


def require_fitting(inputs: list[list[int]], param: str, lease: Lease) -> list[list[int]]:
    """Raises `ApiError` 400 for an input that is longer than the context."""
    longest, context = max(map(len, inputs)), lease.model.limits.context
    if longest >= context:
        text = f"This model's context is {context} tokens; an input has {longest}. Shorten it."
        raise ApiError(400, text, param=param, code="context_length_exceeded")
    return inputs


def _empty(param: str) -> ApiError:
    return ApiError(400, f"The {param} is empty; give at least one token.", param=param, code="invalid_value")
