"""Loaded by schemathesis (`SCHEMATHESIS_HOOKS`) when `api_fuzz` runs it: most requests name the model that there is,
because nothing behind the name is reached otherwise.
"""

import os
import zlib
from typing import Any

import schemathesis

MODEL_VARIABLE = "API_FUZZ_MODEL"
WRONG_MODEL_EVERY = 8
"""One request of so many names a model that there is not."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    there = os.environ.get(MODEL_VARIABLE)
    name = case.body.get("model") if isinstance(case.body, dict) else None
    if there and isinstance(name, str) and zlib.crc32(repr(case.body).encode()) % WRONG_MODEL_EVERY:
        case.body["model"] = there
