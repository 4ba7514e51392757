"""Objects that other installed packages add through entry points."""

from pathlib import Path

import pytest

from modelwright.core.config import ConfigError
from modelwright.core.extensions import installed

GROUP = "modelwright.tests_of_extensions"


def install(folder: Path, module: str, source: str, *entries: str) -> None:
    """Put a distribution with one module and these entry points into a folder of the import path."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "\n".join(entries) + "\n")


def test_objects_come_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed(GROUP, str) == {}
    install(tmp_path, "two_words", "A = 'a'\nB = 'b'\n", "second = two_words:B", "first = two_words:A")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(installed(GROUP, str).items()) == [("first", "a"), ("second", "b")]


def test_a_distribution_that_is_on_the_path_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("installed", "checkout"):
        install(tmp_path / name, "one_word", "A = 'a'\n", "first = one_word:A")
        monkeypatch.syspath_prepend(tmp_path / name)
    assert installed(GROUP, str) == {"first": "a"}


@pytest.mark.parametrize(
    ("source", "entries", "problem"),
    [
        ("A = 3", ["first = odd_words:A"], r"first of .* \(odd_words:A, from odd_words\): must be a str, got 3"),
        ("A = 'a'", ["own = odd_words:A"], "the name 'own' is taken"),
        ("A = 'a'\nB = 'b'", ["first = odd_words:A", "first = odd_words:B"], "the name 'first' is taken"),
        ("1 / 0", ["first = odd_words:A"], r"ZeroDivisionError: division by zero\); reinstall or remove odd_words"),
        ("", ["first = odd_words:A"], "cannot be imported"),
    ],
)
def test_what_is_wrong_is_said(
    source: str, entries: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "odd_words", source, *entries)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "odd_words", raising=False)
    with pytest.raises(ConfigError, match=problem):
        installed(GROUP, str, taken=("own",))
