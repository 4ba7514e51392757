"""Comment dropping: Python source without some of its comments; the syntax tree stays the same."""

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from random import Random

from modelwright.data.augment.augmentation import Augmentation, check_fraction, draw, text_augmentation

_DIRECTIVE = re.compile(r"#\s*(?:!|-\*-|type:|noqa|pragma|pylint|pyright|mypy|ruff|fmt:|isort|coding|nosec|%%)", re.I)
"""Comments that programs read."""

Place = tuple[int, int]
"""Line from 0 and column in characters, where a comment starts."""


@dataclass(frozen=True, kw_only=True)
class CommentDroppingConfig:
    """Comments left out of Python source."""

    fraction: float = 0.5
    """Fraction of the comments that are dropped; comments on consecutive lines count as one."""

    __post_init__ = check_fraction


def comment_dropping(config: CommentDroppingConfig) -> Augmentation:
    return text_augmentation(
        "comment_dropping",
        lambda text, rng: drop_comments(text, config.fraction, rng),
        keeps=("syntax_tree",),
        kinds=("code",),
    )


def drop_comments(source: str, fraction: float, rng: Random) -> str | None:
    """Drops comments, except those that programs read. Returns None for source without any or other than Python."""
    try:
        tree = ast.dump(ast.parse(source))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return None
    lines = source.splitlines(keepends=True)
    if len(lines) != source.count("\n") + (not source.endswith("\n")):  # form feeds and other line ends
        return None
    blocks: list[list[Place]] = []
    for token in tokens:
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            line, column = token.start[0] - 1, token.start[1]
            follows = bool(blocks) and blocks[-1][-1] == (line - 1, column)
            # Comment lines in a row are one comment; a comment after code is always one of its own.
            if follows and _is_alone(lines[line], column) and _is_alone(lines[line - 1], column):
                blocks[-1].append((line, column))
            else:
                blocks.append([(line, column)])
    chosen = dict(place for block in draw(blocks, fraction, rng) for place in block)
    kept: list[str] = []
    for number, line in enumerate(lines):
        after_block = number - 1 in chosen and _is_alone(lines[number - 1], chosen[number - 1])
        if after_block and not line.strip() and not "".join(kept[-1:]).strip():
            continue  # the blank lines around a block of comments would add up
        if number not in chosen:
            kept.append(line)
        elif not _is_alone(line, chosen[number]):
            kept.append(line[: chosen[number]].rstrip() + line[len(line.rstrip("\r\n")) :])
    result = "".join(kept)
    assert ast.dump(ast.parse(result)) == tree
    return result


def _is_alone(line: str, column: int) -> bool:
    return not line[:column].strip()
