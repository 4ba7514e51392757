"""What a test says of settings that are refused: which one, and by which code, not in which words."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from modelwright.core.errors import ConfigError


@contextmanager
def config_error(key: str, code: str = "invalid") -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """The block raises a `ConfigError` about the setting, option or field `key`."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    assert (caught.value.key, caught.value.code) == (key, code), str(caught.value)
