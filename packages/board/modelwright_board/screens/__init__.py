"""The screens: each is a file with its data, buttons and routes, and a template of the same name."""

from collections.abc import Sequence

from modelwright_board.screen import Screen
from modelwright_board.screens import cleaning, data, judge, loop, plan, run, runs, serve, smaller, talk, tokens

SCREENS: Sequence[Screen] = (
    runs.SCREEN, data.SCREEN, cleaning.SCREEN, tokens.SCREEN, plan.SCREEN, run.SCREEN, judge.SCREEN, talk.SCREEN,
    smaller.SCREEN, serve.SCREEN, loop.SCREEN,
)  # fmt: skip
"""The only list, in the order of the rail; the first one is the page at /."""
