"""Ways in which text on the web is junk: each turns a good text into a bad one of about the same length.

They make the negative examples from which the noise classifier learns, and spoil corpora for benchmarks.
"""

import html
import random
import re
from collections.abc import Callable

_MENU = (
    "Home About us Contact Sitemap Privacy policy Terms of use Log in Register Search Newsletter Subscribe Follow us "
    "on Facebook Twitter Instagram Share this article Read more Related posts Previous Next Back to top Add to cart "
    "Checkout My account Wish list Free shipping Accept all cookies Cookie settings Copyright All rights reserved "
    "Powered by WordPress Skip to content Comments (0) Leave a reply Tags Categories Archives Print this page"
)
_MENU_ITEMS = re.findall(r"[A-Z][^A-Z]*", _MENU)
_SPAM = [
    "buy",
    "cheap",
    "best",
    "price",
    "online",
    "discount",
    "sale",
    "free",
    "bonus",
    "casino",
    "poker",
    "slots",
    "loan",
    "credit",
    "insurance",
    "viagra",
    "pills",
    "weight",
    "loss",
    "win",
    "now",
    "click",
    "here",
    "guaranteed",
    "offer",
    "limited",
    "deal",
    "replica",
    "watches",
    "download",
    "crack",
    "torrent",
    "hd",
    "movie",
    "stream",
]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKUP = (
    '<div class="{0}">', "</div>", '<span style="color:#{1:06x};margin:{2}px">', "</span>", "<br/>", "&nbsp;&nbsp;",
    "var {0} = document.getElementById('{0}');", "if (!{0}) {{ return false; }}", ".{0} {{ padding: {2}px 0; }}",
    '<a href="/{0}?id={2}" onclick="track(\'{0}\')">', "</a>", "<!-- {0} -->", "window.{0}=window.{0}||[];",
)  # fmt: skip


def shuffled_words(text: str, rng: random.Random) -> str:
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def wrong_characters(text: str, rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) if char.isalpha() and rng.random() < 0.2 else char for char in text)


def gibberish(text: str, rng: random.Random) -> str:
    return re.sub(r"\w+", lambda match: "".join(rng.choices(_LETTERS, k=len(match[0]))), text)


def keyword_spam(text: str, rng: random.Random) -> str:
    own = [word for word in re.findall(r"\w+", text) if len(word) > 5][:20]
    words = rng.sample(_SPAM, 12) + own
    return " ".join(rng.choice(words) + ("," if rng.random() < 0.1 else "") for _ in text.split())


def menus(text: str, rng: random.Random) -> str:
    result: list[str] = []
    while sum(map(len, result)) < len(text):
        result.append(rng.choice(_MENU_ITEMS).strip())
    return rng.choice((" | ", "\n", " » ", "  ")).join(result)


def markup(text: str, rng: random.Random) -> str:
    result: list[str] = []
    words = text.split()
    while sum(map(len, result)) < len(text):
        name = rng.choice(words or ["x"]).strip(".,;:()'\"").lower() or "x"
        result.append(rng.choice(_MARKUP).format(name, rng.randrange(2**24), rng.randrange(100)))
        if rng.random() < 0.3:
            result.append(html.escape(" ".join(rng.choices(words or ["x"], k=3))))
    return rng.choice((" ", "\n")).join(result)


def wrong_encoding(text: str, rng: random.Random) -> str:
    """Text of a script that was read as another one."""
    table = {char: chr(ord(char) + rng.randrange(0x90, 0x160)) for char in set(text) if char.isalpha()}
    return "".join(table.get(char, char) if rng.random() < 0.6 else char for char in text)


def log_lines(text: str, rng: random.Random) -> str:
    words = re.findall(r"\w+", text) or ["x"]
    lines: list[str] = []
    while sum(map(len, lines)) < len(text):
        stamp = (
            f"20{rng.randrange(10, 26)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02} {rng.randrange(24):02}:00"
        )
        number = rng.randrange(16**8)
        lines.append(
            f"{stamp} [{rng.choice(('INFO', 'WARN', 'DEBUG'))}] {rng.choice(words)}={number:08x} {number % 977}ms"
        )
    return "\n".join(lines)


def repetition(text: str, rng: random.Random) -> str:
    words = text.split()
    length = rng.randrange(3, 12)
    at = rng.randrange(max(1, len(words) - length))
    part = " ".join(words[at : at + length])
    return " ".join([part] * max(2, len(text) // max(1, len(part))))


def mixed_lines(text: str, rng: random.Random) -> str:
    """Fragments of sentences in no order, as of columns that were read across."""
    parts = re.findall(r"\S+(?:\s+\S+){0,4}", text)
    rng.shuffle(parts)
    return "\n".join(parts)


Corruption = Callable[[str, random.Random], str]


def _by_name(*corruptions: Corruption) -> dict[str, Corruption]:
    return {corruption.__name__: corruption for corruption in corruptions}


TRAINING_CORRUPTIONS = _by_name(
    shuffled_words, gibberish, keyword_spam, menus, markup, log_lines, wrong_encoding
)  # fmt: skip
"""What the noise classifier learns from."""
TEST_CORRUPTIONS = _by_name(wrong_characters, repetition, mixed_lines)
"""What it is tested on, and never learns from."""
