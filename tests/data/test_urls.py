"""Documents of blocked domains."""

from pathlib import Path

import pytest

from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.steps.step import Drop
from modelwright.data.clean.steps.urls import Urls, UrlsConfig
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig
from modelwright.pipeline.cleaning import fingerprint
from refusals import config_error

LIST = "# casinos\nspam.example\nhttps://www.Blog.example/ads/  # a part of a site\n\n[::1\n"


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("https://spam.example/a/b?c", "spam.example"),
        ("http://user@WWW.spam.example:8080", "spam.example"),
        ("spam.example./x", "spam.example"),
        ("https://www.blog.example/ads/1", "www.blog.example/ads"),
        ("https://www.blog.example/adsense", ""),
        ("https://blog.example/ads", ""),
        ("https://nospam.example", ""),
        ("https://spam.example.org", ""),
        ("http://[broken", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_domains_and_beginnings_of_paths(url: str | None, entry: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(LIST)
    step = Urls(UrlsConfig(blocked=(str(tmp_path / "list.txt"),)))
    meta = {} if url is None else {"url": url}
    document = Document(id="d", text="text", kind="prose", split="train", source="s", meta=meta)
    assert step(document) == (Drop("blocked URL", entry) if entry else document)


def test_the_list_is_read_before_anything_else_and_is_an_input(tmp_path: Path) -> None:
    with config_error("urls.blocked"):
        build_steps(CleanConfig(urls=UrlsConfig(blocked=("nowhere.txt",))))
    assert [step.name for step in build_steps(CleanConfig())] == [
        "format", "quality", "duplicates", "images", "privacy",
    ]  # fmt: skip
    source, blocked = tmp_path / "a.txt", tmp_path / "list.txt"
    for path in (source, blocked):
        path.write_text("some.example")
    settings = SourceConfig(sources=(str(source),)), CleanConfig(urls=UrlsConfig(blocked=(str(blocked),)))
    before = fingerprint(*settings)
    blocked.write_text("another.example")
    assert fingerprint(*settings) != before
