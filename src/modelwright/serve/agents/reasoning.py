"""Thoughts in the text of an answer, between `<think>` and `</think>`: apart from the answer itself."""

from dataclasses import dataclass
from typing import Literal

from modelwright.serve.agents.calls import TEXT_SHOWN, CallParser, Part, TextPart, held_back

THINK, END_THINK = "<think>", "</think>"
THOUGHT_SHOWN = "reasoning_content"


@dataclass
class AnswerReader:
    """Splits an answer into thought, text and calls, piece by piece. state: "before" where a thought may come first,
    "thought" if the prompt has opened one, "text" without thoughts; calls: None where no function may be called."""

    state: Literal["before", "thought", "text"]
    calls: CallParser | None
    num_calls: int = 0
    _held: str = ""
    _begins: bool = False
    """The next text follows a mark, whose line ends belong to the mark."""

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """Returns the parts that `text` makes certain, all that remain with `is_last`."""
        self._held += text
        parts: list[Part] = []
        if self.state == "before":
            rest = self._held.lstrip()
            if rest.startswith(THINK):
                self.state, self._held, self._begins = "thought", rest.removeprefix(THINK), True
            elif is_last or not THINK.startswith(rest):
                self.state = "text"
        if self.state == "thought":
            self._trim()
            thought, found, after = self._held.partition(END_THINK)
            # white space before the closing mark belongs to the mark
            keep = 0 if is_last and not found else held_back(self._held, END_THINK)
            shown = thought if found else thought[: len(thought) - keep]
            shown = shown.rstrip() if found or not is_last else shown
            if shown:
                parts.append(TextPart(THOUGHT_SHOWN, shown))
            self._held = after if found else self._held[len(shown) :]
            if found:
                self.state, self._begins = "text", True
        if self.state == "text":
            self._trim()
            text, self._held = self._held, ""
            if self.calls is not None:
                parts += self.calls.push(text, is_last=is_last)
            elif text:
                parts.append(TextPart(TEXT_SHOWN, text))
        for part in parts:
            self.num_calls += not isinstance(part, TextPart) and bool(part.name)
        return parts

    def _trim(self) -> None:
        if self._begins:
            self._held = self._held.lstrip()
            self._begins = not self._held
