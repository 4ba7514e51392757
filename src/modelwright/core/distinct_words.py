"""Score for the number of different words in a text, shared by generated preferences and the reward
`distinct_words`."""

import re

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


def distinct_word_score(text: str, max_words: int) -> float:
    """Returns the number of different words (case ignored, at most `max_words`) minus the number of words beyond
    `max_words`, divided by `max_words`: 1 at best, below 0 for a text of more than twice as many words.
    """
    words = WORD.findall(text.lower())
    return (min(len(set(words)), max_words) - max(0, len(words) - max_words)) / max_words
