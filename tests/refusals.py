"""What a test says of settings that are refused: which one, and by which code; in which words only where several errors
share both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from modelwright.core.config import ConfigError


@contextmanager
def config_error(
    key: str, code: str = "invalid", match: str | None = None
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Checks that the block raises a `ConfigError` about the setting, option or field `key`. match: a pattern in its
    text, for errors that key and code do not tell apart.
    """
    with pytest.raises(ConfigError, match=match) as caught:
        yield caught
    assert (caught.value.key, caught.value.code) == (key, code), str(caught.value)
