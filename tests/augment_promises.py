"""What each augmentation method may do to a text, checked letter by letter: a change that the method cannot make is an
`AssertionError`.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lemminflect
import yaml

from modelwright.data.augment.keyboard_typos import neighbors
from modelwright.data.augment.ocr_confusions import CONFUSIONS
from modelwright.data.augment.related_words import PartOfSpeech, WordNet

FOLDER = Path(__file__).parent / "data"
ANSWERS: Mapping[str, Any] = yaml.safe_load((FOLDER / "golden" / "augment_answers.yaml").read_text(encoding="utf-8"))
_WORDNET = WordNet(FOLDER / "wordnet")
_PARTS: tuple[PartOfSpeech, ...] = ("noun", "verb", "adj", "adv")
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_MARKS = re.compile(r"[.,;:!?'’—–\s]")
LENGTHS: Mapping[str, tuple[float, float]] = {
    "synonym_replacement": (0.85, 1.15),
    "hypernym_replacement": (0.85, 1.15),
    "random_insertion": (1.01, 1.3),
    "random_swap": (0.98, 1.02),
    "random_deletion": (0.6, 0.99),
    "sentence_shuffle": (1.0, 1.0),
    "back_translation": (0.5, 2.0),
    "keyboard_typos": (0.95, 1.05),
    "ocr_confusions": (0.95, 1.1),
    "case_noise": (0.9, 1.0),
    "span_infilling": (0.85, 1.15),
    "masked_replacement": (0.85, 1.15),
    "identifier_renaming": (0.6, 1.6),
    "comment_dropping": (0.3, 0.99),
}
"""Length of a changed text, relative to the original."""


def check_promises(method: str, before: str, after: str) -> None:
    """Raise `AssertionError` if the method cannot have made one text of the other."""
    low, high = LENGTHS[method]
    assert low <= len(after) / len(before) <= high
    _CHECKS[method](before, after)


def renamed(tree: ast.AST) -> str:
    """The dump of a tree with each name replaced by the number of its first use."""
    numbers: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = str(numbers.setdefault(node.id, len(numbers)))
    return ast.dump(tree)


def _one_for_one(before: str, after: str, may_become: Callable[[str, str], bool]) -> None:
    """Words change in their places; white space and the marks around a word stay."""
    assert re.findall(r"\s+", before) == re.findall(r"\s+", after)
    for old, new in zip(before.split(), after.split(), strict=True):
        if old != new:
            start, word, end = re.fullmatch(r"(\W*)(.*?)(\W*)", old).groups()  # pyright: ignore[reportOptionalMemberAccess]
            assert new.startswith(start)
            assert new.endswith(end)
            other = new[len(start) : len(new) - len(end)]
            assert may_become(word, other), (word, other)


def _may_become(is_known: Callable[[str, str], bool]) -> Callable[[str, str], None]:
    """A check of a method that replaces words by known ones, in their case; articles agree."""

    def may_become(old: str, new: str) -> bool:
        if {old.lower(), new.lower()} == {"a", "an"}:
            return True
        return old[:1].isupper() == new[:1].isupper() and is_known(old.lower(), new.lower())

    return lambda before, after: _one_for_one(before, after, may_become)


def _lemmas(word: str) -> set[str]:
    return {word, *(lemma for found in lemminflect.getAllLemmas(word).values() for lemma in found)}


def _is_synonym(old: str, new: str) -> bool:
    return bool(_synonyms(old) & _lemmas(new))


def _synonyms(word: str) -> set[str]:
    return {other for offset, part in _senses(word) for other in _WORDNET.synset(offset, part).words}


def _senses(word: str) -> Iterator[tuple[int, PartOfSpeech]]:
    for lemma in _lemmas(word):
        for part in _PARTS:
            yield from ((offset, part) for offset in _WORDNET.senses(lemma, part))


def _is_broader(old: str, new: str) -> bool:
    level, broader = [offset for offset, part in _senses(old) if part == "noun"], set[str]()
    while level:
        level = [offset for one in level for offset in _WORDNET.synset(one, "noun").hypernyms]
        broader |= {word for offset in level for word in _WORDNET.synset(offset, "noun").words}
    return bool(broader & _lemmas(new))


def _tokens(text: str) -> list[str]:
    """Words and marks; "an" is taken for "a", which it becomes before another word."""
    return [{"an": "a", "An": "A"}.get(token, token) for token in _TOKEN.findall(text)]


def _is_part(short: Sequence[str], long: Sequence[str]) -> bool:
    """Whether the tokens of one are in the other, in their order."""
    rest = iter(long)
    return all(token in rest for token in short)


def _insertion(before: str, after: str) -> None:
    assert before.count("\n") == after.count("\n")
    assert _is_part(_tokens(before), _tokens(after))
    known = {synonym for word in _tokens(before) for synonym in _synonyms(word.lower())}
    inserted = Counter(_tokens(after)) - Counter(_tokens(before))
    assert all(_lemmas(word) & known for word in inserted), inserted


def _deletion(before: str, after: str) -> None:
    assert before.count("\n") == after.count("\n")
    assert _is_part(_tokens(after), _tokens(before))
    lost = Counter(_tokens(before)) - Counter(_tokens(after))
    assert all(re.sub(r"['’-]", "", word).isalpha() for word in lost), lost


def _swap(before: str, after: str) -> None:
    assert re.findall(r"\s+", before) == re.findall(r"\s+", after)
    assert Counter(_tokens(before)) == Counter(_tokens(after))
    assert [token for token in _tokens(before) if not token[0].islower()] == [
        token for token in _tokens(after) if not token[0].islower()
    ]


def _shuffle(before: str, after: str) -> None:
    assert Counter(before.split()) == Counter(after.split())
    assert sorted(re.findall(r"\s+", before)) == sorted(re.findall(r"\s+", after))


def _back_translation(before: str, after: str) -> None:
    """Sentences are those of the original or paraphrases of them that were written down."""
    restored = " ".join(after.split())
    for entry in ANSWERS["back_translation"]:
        restored = restored.replace(entry["back"], entry["en"])
    assert restored == " ".join(before.split())
    assert sorted(re.findall(r"\d+", before)) == sorted(re.findall(r"\d+", after))


def _is_typo(old: str, new: str) -> bool:
    typos = set[str]()
    for place in range(1, len(old)):
        start, letter, end = old[:place], old[place], old[place + 1 :]
        typos |= {start + end, start + letter * 2 + end, start + end[:1] + letter + end[1:]}
        typos |= {start + near + end for near in neighbors("qwerty").get(letter.lower(), "")}
    return new in typos


def _is_confusion(old: str, new: str) -> bool:
    return any(
        new == old[:place] + wrong + old[place + len(right) :]
        for right, wrongs in CONFUSIONS.items()
        for place in range(len(old))
        if old.startswith(right, place)
        for wrong in wrongs
    )


def _case_noise(before: str, after: str) -> None:
    assert before.count("\n") == after.count("\n")
    assert _MARKS.sub("", before).lower() == _MARKS.sub("", after).lower()


def _span_infilling(before: str, after: str) -> None:
    """A gap has the words that were written down for it."""
    assert before.count("\n") == after.count("\n")
    restored = f"^ {' '.join(after.split())}"
    for entry in ANSWERS["span_infilling"]:
        around = (f"{entry['before']} ", f"{'' if entry['after'][0] in '.,;' else ' '}{entry['after']}")
        restored = restored.replace(entry["fits"].join(around), entry["gap"].join(around))
    assert restored == f"^ {' '.join(before.split())}"


def _is_fill(old: str, new: str) -> bool:
    return any(new in fills for place, fills in ANSWERS["masked_replacement"].items() if f"[{old}]" in place)


def _code_tokens(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        yield token.type, token.string


def _renaming(before: str, after: str) -> None:
    assert before.count("\n") == after.count("\n")
    assert renamed(ast.parse(before)) == renamed(ast.parse(after))
    for (kind, old), (other_kind, new) in zip(_code_tokens(before), _code_tokens(after), strict=True):
        assert kind == other_kind
        assert old == new or (kind == tokenize.NAME and new.isascii())


def _comment_dropping(before: str, after: str) -> None:
    """Nothing is lost but comments and the white space beside them."""
    assert ast.dump(ast.parse(before)) == ast.dump(ast.parse(after))
    old, new = ([text for kind, text in _code_tokens(source) if kind == tokenize.COMMENT] for source in (before, after))
    assert _is_part(new, old)
    assert len(new) < len(old)
    assert _num_visible([before]) - _num_visible([after]) == _num_visible(old) - _num_visible(new)


def _num_visible(texts: Sequence[str]) -> int:
    """Characters that are no white space."""
    return sum(len("".join(text.split())) for text in texts)


_CHECKS: Mapping[str, Callable[[str, str], None]] = {
    "synonym_replacement": _may_become(_is_synonym),
    "hypernym_replacement": _may_become(_is_broader),
    "random_insertion": _insertion,
    "random_swap": _swap,
    "random_deletion": _deletion,
    "sentence_shuffle": _shuffle,
    "back_translation": _back_translation,
    "keyboard_typos": lambda before, after: _one_for_one(before, after, _is_typo),
    "ocr_confusions": lambda before, after: _one_for_one(before, after, _is_confusion),
    "case_noise": _case_noise,
    "span_infilling": _span_infilling,
    "masked_replacement": _may_become(_is_fill),
    "identifier_renaming": _renaming,
    "comment_dropping": _comment_dropping,
}
