"""Small functions on texts: hints for words that are not known, removal of secrets from all that is written down, and a
score for the number of different words.
"""

import re
from collections.abc import Sequence
from typing import Any, cast

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


def distinct_word_score(text: str, max_words: int) -> float:
    """Returns the number of different words (case ignored, at most `max_words`) minus the number of words beyond
    `max_words`, divided by `max_words`: 1 at best, below 0 for a text of more than twice as many words.
    """
    words = WORD.findall(text.lower())
    return (min(len(set(words)), max_words) - max(0, len(words) - max_words)) / max_words


HIDDEN = "***"
_SECRET_NAME = re.compile(r"(token|secret|passw(or)?d|api[-_]?key|credential|signature|\bsig\b|\bkey\b)", re.I)
# "tokens" in the sense of this project, removed from a name before the search for secret-sounding parts.
_NOT_SECRET = re.compile(r"(max_|min_|num_|batch_|bigram_|per_)?tokens|tokenizer|num_token|special_token", re.I)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"([?&;])([^=&\s]+)=([^&\s]+)")


def redact_text(text: str) -> str:
    """`text` without user names and passwords in URLs and without secret query parameters."""
    text = _USER_IN_URL.sub(f"{HIDDEN}@", text)
    return _QUERY.sub(lambda m: f"{m[1]}{m[2]}={HIDDEN}" if _is_secret(m[2]) else m[0], text)


def redact_words(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret-sounding options hidden, `--x.token=v` and `--x.token v` alike."""
    result, hide = list[str](), False
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            # The name alone decides: a secret has no form by which it could be known.
            hide = _is_secret(name)
            result.append(f"{name}={HIDDEN if hide else redact_text(value)}" if equals else word)
        else:
            result.append(HIDDEN if hide else redact_text(word))  # `hide` stays until the next option: all its values
    return result


def redact_plain(value: Any) -> Any:
    """Plain data (a dumped configuration) with secrets hidden in every text."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(inner, str) and inner and _is_secret(key) else redact_plain(inner)
            for key, inner in cast(dict[str, Any], value).items()
        }
    if isinstance(value, list):
        return [redact_plain(item) for item in cast(list[Any], value)]
    return redact_text(value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(_NOT_SECRET.sub("", name)))
