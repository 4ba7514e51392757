"""Made-up traffic for the drift monitor: sessions of users that overlap in time, with topics, lengths and feedback that
belong to a session, so that its requests resemble each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SYLLABLES = {
    "usual": [
        "ka",
        "lo",
        "mi",
        "ru",
        "te",
        "so",
        "na",
        "ri",
        "sto",
        "va",
        "len",
        "pit",
        "der",
        "mon",
        "gal",
        "fir",
        "bes",
        "tu",
    ],
    "other": [
        "czy",
        "prz",
        "wsk",
        "drz",
        "kie",
        "dzi",
        "osc",
        "niej",
        "szcz",
        "rzy",
        "chw",
        "eni",
        "zna",
        "gdz",
        "trz",
    ],
}
NUM_TOPICS = 12
TOPIC_WORDS = 150
COMMON_WORDS = 200


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What differs from the usual traffic: shares of sessions, and a factor of lengths."""

    other_language: float = 0.0
    rare_topic: float = 0.0
    length: float = 1.0
    bad_feedback: float = 0.0


NONE = Shift()


class Traffic:
    """Requests of one service. The words and topics are the same for all seeds."""

    def __init__(self, *, num_users: int = 2000, mean_session: float = 4.0) -> None:
        dice = np.random.default_rng(7)
        self.num_users, self.mean_session = num_users, mean_session
        self._common = _words(dice, "usual", COMMON_WORDS)
        self._topics = [_words(dice, "usual", TOPIC_WORDS) for _ in range(NUM_TOPICS + 1)]
        self._other = _words(dice, "other", COMMON_WORDS + TOPIC_WORDS)
        self._common_p, self._topic_p, self._other_p = (
            _zipf(n) for n in (COMMON_WORDS, TOPIC_WORDS, COMMON_WORDS + TOPIC_WORDS)
        )
        self._topics_p = _zipf(NUM_TOPICS, 0.7)
        self._user_p = _zipf(num_users, 0.6)

    def requests(
        self, count: int, seed: int, *, shift: Shift = NONE, rate: float = 1.0, start: float = 0.0
    ) -> list[dict[str, Any]]:
        """`count` requests in order of time. rate: sessions that begin per second, relative to the usual 0.05."""
        dice = np.random.default_rng([11, seed])
        records: list[dict[str, Any]] = []
        at, number = start, 0
        # sessions that begin before the first request are long under way, as in a log of a running service
        while len(records) < count + 400 * rate * self.mean_session:
            at += dice.exponential(20.0 / rate)
            records += self._session(dice, at, f"{seed}-{number}", shift)
            number += 1
        records.sort(key=lambda record: record["time"])
        first = int(200 * rate)
        return records[first : first + count]

    def _session(self, dice: np.random.Generator, at: float, name: str, shift: Shift) -> list[dict[str, Any]]:
        is_other = dice.random() < shift.other_language
        is_rare = dice.random() < shift.rare_topic
        topic = NUM_TOPICS if is_rare else int(dice.choice(NUM_TOPICS, p=self._topics_p))
        user = f"user-{dice.choice(self.num_users, p=self._user_p)}"
        scale = 12 * np.exp(0.4 * dice.standard_normal()) * (1 + 0.05 * topic)
        mood = dice.beta(4, 2)
        records = []
        for turn in range(int(dice.geometric(1 / self.mean_session))):
            at += dice.exponential(40.0)
            num_words = max(1, round(shift.length * scale * np.exp(0.5 * dice.standard_normal())))
            prompt = self._text(dice, num_words, topic, is_other)
            answer = self._text(dice, max(1, round(2 * scale * np.exp(0.6 * dice.standard_normal()))), topic, is_other)
            records.append({"id": f"{name}-{turn}", "time": at, "session": name, "user": user, "version": "1",
                            "route": "/v1/chat/completions", "model": "m", "arm": None, "prompt": prompt,
                            "answer": answer, "prompt_tokens": num_words, "completion_tokens": len(answer.split()),
                            "finish_reason": "stop", "status": 200, "ttft_s": 0.1, "latency_s": 1.0,
                            "feedback_text": None, "answer_by": None, **_feedback(dice, mood, shift)})  # fmt: skip
        return records

    def _text(self, dice: np.random.Generator, num_words: int, topic: int, is_other: bool) -> str:
        if is_other:
            return " ".join(_drawn(dice, self._other, self._other_p, num_words))
        num_common = int(dice.binomial(num_words, 0.6))
        common = _drawn(dice, self._common, self._common_p, num_common)
        return " ".join([*common, *_drawn(dice, self._topics[topic], self._topic_p, num_words - num_common)])


def _drawn(dice: np.random.Generator, words: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """`dice.choice(words, count, p=weights)`, faster."""
    return words[np.searchsorted(weights.cumsum(), dice.random(count) * 0.9999999)]


def _feedback(dice: np.random.Generator, mood: float, shift: Shift) -> Mapping[str, Any]:
    if dice.random() > 0.3:
        return {"feedback_score": None, "feedback_label": None}
    is_good = dice.random() < mood * (1 - shift.bad_feedback)
    label = "good" if is_good else str(dice.choice(["wrong", "rude", "slow"], p=[0.6, 0.1, 0.3]))
    return {"feedback_score": float(dice.integers(4, 6) if is_good else dice.integers(1, 4)), "feedback_label": label}


def _words(dice: np.random.Generator, language: str, count: int) -> np.ndarray:
    return np.array(["".join(dice.choice(SYLLABLES[language], dice.integers(1, 4))) for _ in range(count)])


def _zipf(count: int, power: float = 1.0) -> np.ndarray:
    weights = 1 / np.arange(1, count + 1) ** power
    return weights / weights.sum()
