"""/v1/feedback: ratings of answers. The model of its body is `FeedbackRequest`, next to the observers that store it."""

from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.account.exchange import FeedbackRequest
from modelwright.serve.api.parsing import read_request
from modelwright.serve.errors import ApiError
from modelwright.serve.service import service_of


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
