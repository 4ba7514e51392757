"""The bodies of the routes of A/B tests."""

from typing import Annotated, Any, Literal

from pydantic import Field

from modelwright.serve.fields import RequestModel
from modelwright.serve.limits import Limits

Share = Annotated[float, Field(gt=0, lt=1)]


class ExperimentRequest(RequestModel):
    """POST /admin/ab. `path`: the run or model folder of B; `share`: of units that get B; `unit`: what keeps its arm;
    `mode`: "split", or "shadow" for copies of requests to B whose answers nobody gets; `max_error_rate`: of requests to
    B, above which it goes whatever A does.
    """

    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    share: Share = 0.5
    unit: Literal["session", "user"] = "session"
    mode: Literal["split", "shadow"] = "split"
    max_error_rate: Annotated[float, Field(gt=0, le=0.5)] = 0.01

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """The fields' own limits are enough."""


class ShareRequest(RequestModel):
    """POST /admin/ab/share."""

    share: Share

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """One short field needs no further check."""


class EndRequest(RequestModel):
    """POST /admin/ab/end. `promote`: B becomes the version in service, else A stays."""

    promote: bool

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """One short field needs no further check."""
