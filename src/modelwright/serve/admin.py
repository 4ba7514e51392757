"""The routes for administrators."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.bodies import parsed, read_body
from modelwright.serve.parsing import parse_request
from modelwright.serve.protocol import ReloadRequest
from modelwright.serve.reload import Reloader
from modelwright.serve.service import service_of, version_header


async def reload_model(request: Request) -> Response:
    """Answers when the new version is in service, or why it is not."""
    service = service_of(request)
    service.caller(request, "admin")
    with service.lease() as lease:
        body = await read_body(request, lease, num_prompts=1)
        asked = await parsed(lambda: parse_request(ReloadRequest, body or b"{}", lease.model.limits), len(body), lease)
    previous, reloader = service.model, request.app.state.reloader
    assert isinstance(reloader, Reloader)
    fresh = await reloader.reload(asked.path)
    reply = {"status": "reloaded", "version": fresh.fingerprint, "previous_version": previous.fingerprint}
    return JSONResponse(reply, headers=version_header(fresh.fingerprint))
