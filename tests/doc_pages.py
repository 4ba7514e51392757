"""Code blocks and commands of the pages in docs/."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its title, and its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    fence = r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    for language, title, text in re.findall(fence, page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        yield Block(language, title, text)


def commands_of(page: Path) -> list[str]:
    """The lines of the page's shell blocks; with those that are indented, as older pages have them."""
    shell = "".join(block.text for block in blocks(page) if block.language == "sh")
    indented = re.findall(r"^    (modelwright (?:.*\\\n)*.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [*shell.replace("\\\n", " ").splitlines(), *(line.replace("\\\n", " ") for line in indented)]
    return [" ".join(line.split()) for line in lines if line]
