"""Routes of administration: reloading the model, and loading and unloading adapters with vLLM's API."""

import logging
import secrets
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from modelwright.serve.api.fields import RequestModel
from modelwright.serve.api.parsing import read_request
from modelwright.serve.errors import ApiError
from modelwright.serve.load import adapted_fingerprint
from modelwright.serve.reload import Reloader
from modelwright.serve.served_model import ServedAdapter
from modelwright.serve.service import service_of, version_header

log = logging.getLogger("modelwright.serve")


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
    previous = service.model
    fresh = await _reloader(request).reload(asked.path)
    reply = {"status": "reloaded", "version": fresh.fingerprint, "previous_version": previous.fingerprint}
    return JSONResponse(reply, headers=version_header(fresh.fingerprint))


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
    name, folder = asked.lora_name, Path(asked.lora_path)
    async with _reloader(request).without_test():
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
    return PlainTextResponse(text, headers=version_header(version))


async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter. Open answers finish with it; new requests can no longer ask for it."""
    service = service_of(request)
    service.caller(request, "admin")
    asked = await read_request(request, UnloadAdapterRequest)
    name = asked.lora_name
    async with _reloader(request).without_test():
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


def _reloader(request: Request) -> Reloader:
    reloader = request.app.state.reloader
    assert isinstance(reloader, Reloader)
    return reloader
