"""Guess the next tokens of a sequence from its own earlier text (prompt lookup, Saxena 2023): what followed the last
time that the sequence had its last few tokens. The engine computes the guesses together with the token before them and
keeps those that it would have chosen anyway, so a wrong guess costs time and changes nothing.
"""

from dataclasses import dataclass

from modelwright.infer.sequence import Sequence


@dataclass
class PromptLookup:
    """Guesses for the sequences of an engine. switch_len: length at which a sequence is computed anew, 0 for none (see
    `Engine.step`); no guess goes past it.
    """

    num_guesses: int
    switch_len: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """How many drafts were verified since the start, their tokens, and those that were accepted."""

    def guess(self, sequence: Sequence) -> list[int]:
        """Tokens that may come after those of a decoding sequence; as many as it may still have, but one, because a
        step that accepts all of them gives one more.
        """
        length = len(sequence.token_ids)
        count = min(self.num_guesses, sequence.params.max_tokens - sequence.num_new - 1)
        if length < self.switch_len:
            count = min(count, self.switch_len - length - 1)
        if count < 1 or sequence.is_replaying:
            return []
        sequence.ngrams.extend(sequence.token_ids)
        return sequence.ngrams.guess(sequence.token_ids, count)

    def draft(self, sequence: Sequence, guesses: list[int]) -> None:
        """Let the present step verify these tokens, which there is room for in the cache."""
        sequence.draft = guesses
        self.num_drafts += bool(guesses)
        self.num_draft_tokens += len(guesses)

    def accepts(self, sequence: Sequence, place: int) -> bool:
        """Whether a running sequence has just got the token at `place` of its draft, so that the row of that token is
        the one from which the next token is chosen.
        """
        if place >= len(sequence.draft) or sequence.token_ids[-1] != sequence.draft[place]:
            return False
        sequence.num_cached += 1
        self.num_accepted_tokens += 1
        return True
