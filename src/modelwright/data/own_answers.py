"""The mark of answers that Modelwright itself gave: a model that learns from its own answers by accident gets worse
with each generation (Shumailov et al. 2024, AI models collapse when trained on recursively generated data).
"""

from collections.abc import Mapping
from typing import Any

AUTHOR_FIELD, ANSWER_FIELD = "answer_by", "answer"
OWN_AUTHOR = "modelwright"

REMEDY = (
    "learn from its prompts with --data.record_type text --data.text_field prompt, or from the answers, too, with "
    "--data.own_answers train"
)
REMEDY_TEXT = "leave it out, or learn from it with --data.own_answers train"


def is_own(record: Mapping[str, Any]) -> bool:
    """Whether Modelwright gave the answer of a record."""
    return record.get(AUTHOR_FIELD) == OWN_AUTHOR
