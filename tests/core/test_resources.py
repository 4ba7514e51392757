"""What a machine says of itself."""

from pathlib import Path

import pytest

from modelwright.core.resources import has_bf16_instructions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("processor\t: 0\n", True),
    ],
)
def test_bf16_instructions_are_read_from_the_processor_s_flags(monkeypatch, text, expected):
    monkeypatch.setattr(Path, "read_text", lambda self, **options: text)
    assert has_bf16_instructions() == expected
