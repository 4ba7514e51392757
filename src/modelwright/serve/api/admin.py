"""Routes of administration: reloads of the model, adapters with vLLM's API, A/B tests; and the feedback of users."""

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from modelwright.serve.ab.controller import Experiments
from modelwright.serve.ab.experiment import EndRequest, ExperimentRequest, ShareRequest
from modelwright.serve.api.fields import RequestModel
from modelwright.serve.api.parsing import read_request
from modelwright.serve.errors import ApiError, log
from modelwright.serve.load import adapted_fingerprint
from modelwright.serve.reload import Reloader
from modelwright.serve.served_model import ServedAdapter
from modelwright.serve.service import VERSION_HEADER, FeedbackRequest, service_of


class ReloadRequest(RequestModel):
    """POST /admin/reload. `path`: run or model folder on the server's machine; "" for the current model's origin."""

    path: Annotated[str, Field(max_length=4096)] = ""


class ReloadReply(BaseModel):
    """The version that new requests get from now on, and the one that they got before."""

    status: Literal["reloaded"]
    version: str
    previous_version: str


async def reload_model(request: Request) -> Response:
    """Replies when the new version is in service, or with the reason why it is not."""
    service = service_of(request)
    service.caller(request, "admin")
    asked = await read_request(request, ReloadRequest, default=b"{}")
    reloader: Reloader = request.app.state.reloader
    previous = service.model
    fresh = await reloader.reload(asked.path)
    reply = {"status": "reloaded", "version": fresh.fingerprint, "previous_version": previous.fingerprint}
    return JSONResponse(reply, headers={VERSION_HEADER: fresh.fingerprint})


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter, in vLLM's form. `lora_path`: a folder in PEFT's layout on the server's machine."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter, in vLLM's form."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


async def load_lora_adapter(request: Request) -> Response:
    """Replies when requests can ask for the adapter, or with the reason why they cannot."""
    service = service_of(request)
    service.caller(request, "admin")
    asked = await read_request(request, LoadAdapterRequest)
    reloader: Reloader = request.app.state.reloader
    name, folder = asked.lora_name, Path(asked.lora_path)
    async with reloader.without_test():
        model = service.model
        if name in (*service.names_of(model), *service.config.alias_names):
            text = f"The name {name!r} is in use; unload the adapter that has it, or choose another."
            raise ApiError(400, text, param="lora_name", code="invalid_value")
        # a key that was never used before: open answers may still use an unloaded adapter of the same name
        key = f"{name}#{secrets.token_hex(8)}"
        digest = await model.worker.client.load_adapter(key, folder)
        model.unloaded.discard(name)
        version = adapted_fingerprint(model.fingerprint, digest)
        model.adapters[name] = ServedAdapter(folder, key, version)
    log.info("requests can ask for the adapter %s in %s", name, folder)
    text = f"Success: LoRA adapter {name!r} added successfully."
    return PlainTextResponse(text, headers={VERSION_HEADER: version})


async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter. Open answers finish with it; new requests can no longer ask for it."""
    service = service_of(request)
    service.caller(request, "admin")
    asked = await read_request(request, UnloadAdapterRequest)
    reloader: Reloader = request.app.state.reloader
    name = asked.lora_name
    async with reloader.without_test():
        model = service.model
        adapter = model.adapters.pop(name, None)
        if adapter is None:
            known = ", ".join(map(repr, model.adapters)) or "none"
            text = f"The adapter {name!r} is not loaded; this server has {known}."
            raise ApiError(404, text, param="lora_name", code="model_not_found")
        model.unloaded.add(name)
        # only after the name is gone, so that no request can start with an adapter that engines no longer have
        await model.worker.client.unload_adapter(adapter.key)
    log.info("requests can no longer ask for the adapter %s", name)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")


R = TypeVar("R", bound=RequestModel)


async def list_tests(request: Request) -> Response:
    """Returns the data of the page `/ab`. Like `/metrics`, it asks for a key if the server has a key file."""
    service = service_of(request)
    if service.keys.has_scopes:
        service.caller(request, "metrics")
    tests = request.app.state.experiments
    return JSONResponse({"is_on": tests is not None, "tests": await tests.reports() if tests else []})


def _changing(
    operation: str, kind: type[R], change: Callable[[Experiments, R], Awaitable[dict[str, Any]]]
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of a change, which replies with the report. operation: its name in /openapi.json."""

    async def handler(request: Request) -> Response:
        service_of(request).caller(request, "admin")
        asked = await read_request(request, kind)
        tests = request.app.state.experiments
        if tests is None:
            text = "This server keeps no state of A/B tests; start it with --requests.ab_state FILE."
            raise ApiError(404, text, code="tests_off")
        return JSONResponse(await change(tests, asked))

    handler.__name__ = operation
    return handler


begin_test = _changing("begin_test", ExperimentRequest, lambda tests, asked: tests.begin(asked))
set_test_share = _changing("set_test_share", ShareRequest, lambda tests, asked: tests.set_share(asked.share))
end_test = _changing("end_test", EndRequest, lambda tests, asked: tests.end(promote=asked.promote))


class FeedbackReply(BaseModel):
    """The feedback is committed."""

    status: Literal["recorded"]
    id: str


async def give_feedback(request: Request) -> Response:
    """Replies when the feedback is committed. New feedback on the same answer replaces it."""
    service = service_of(request)
    service.caller(request, "feedback")
    feedback = await read_request(request, FeedbackRequest)
    keepers = [observer for observer in service.observers if observer.keeps_answers]
    if not keepers:
        text = "This server keeps no account of its answers; start it with --requests.log or --requests.ab_state."
        raise ApiError(404, text, code="feedback_off")
    # a list, not a generator: `any` over one would stop at the first observer that knows the answer
    known = [await observer.take_feedback(feedback) for observer in keepers]
    if not any(known):
        text = f"No logged answer has the id {feedback.id!r}; give the id of the answer's body."
        raise ApiError(404, text, param="id", code="answer_not_found")
    return JSONResponse({"status": "recorded", "id": feedback.id})
