"""Reads a WordNet database: the files `index.*`, `data.*` and `cntlist.rev` (wndb(5WN), cntlist(5WN)).

Files are mapped into memory and searched where they lie; nothing is loaded whole but the counts.
"""

import mmap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from modelwright.core.errors import DataError

DEFAULT_FOLDER = Path("/usr/share/wordnet")
"""Where Debian's package `wordnet-base` installs the database."""
HYPERNYM = "@"

PartOfSpeech = Literal["noun", "verb", "adj", "adv"]
_PARTS: tuple[PartOfSpeech, ...] = ("noun", "verb", "adj", "adv")
_PART_OF_NUMBER: Mapping[str, PartOfSpeech] = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}


@dataclass(frozen=True)
class Synset:
    """A set of words with one meaning. words: in lower case, `_` for spaces; hypernyms: offsets of broader meanings."""

    offset: int
    words: tuple[str, ...]
    hypernyms: tuple[int, ...]


class WordNet:
    """The database in a folder. Raises `DataError` that says what to install if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = [f"{kind}.{part}" for kind in ("index", "data") for part in _PARTS]
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(
                f"{folder}: holds no WordNet database ({missing[0]} is missing); install one (Debian and Ubuntu: "
                "apt install wordnet-base) or give the folder of another with the setting `wordnet`"
            )
        self._files = {name: _map(folder / name) for name in names}
        self.synset = lru_cache(maxsize=100_000)(self._read_synset)
        self.senses = lru_cache(maxsize=100_000)(self._read_senses)

    def _read_senses(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        """Offsets of the meanings of a lemma (lower case, `_` for spaces), most frequent first; empty if unknown."""
        line = _find(self._files[f"index.{part}"], lemma.encode())
        if not line:
            return ()
        fields = line.decode().split()
        return tuple(map(int, fields[6 + int(fields[3]) :]))

    def _read_synset(self, offset: int, part: PartOfSpeech) -> Synset:
        data = self._files[f"data.{part}"]
        fields = data[offset : data.find(b"|", offset)].decode().split()
        if not fields or fields[0] != f"{offset:08d}":
            raise DataError(f"{self.folder / f'data.{part}'}: has no entry at {offset}; install the database again")
        num_words = int(fields[3], 16)
        words = tuple(word.partition("(")[0].lower() for word in fields[4 : 4 + 2 * num_words : 2])
        pointers = fields[5 + 2 * num_words :]
        hypernyms = tuple(
            int(pointers[place + 1]) for place in range(0, len(pointers) - 3, 4) if pointers[place] == HYPERNYM
        )
        return Synset(offset, words, hypernyms)

    def counts(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        """How often each meaning, in the order of `senses`, occurs in the tagged texts that come with WordNet."""
        counts = self._counts.get((lemma, part), {})
        return tuple(counts.get(number, 0) for number in range(1, len(self.senses(lemma, part)) + 1))

    def has_phrase(self, *words: str) -> bool:
        """Whether several words together are an entry, as "hot dog" and "take place"."""
        return any(self.senses("_".join(words), part) for part in _PARTS)

    @cached_property
    def _counts(self) -> Mapping[tuple[str, PartOfSpeech], dict[int, int]]:
        counts: dict[tuple[str, PartOfSpeech], dict[int, int]] = defaultdict(dict)
        path = self.folder / "cntlist.rev"
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                key, number, count = line.split()
                lemma, _, rest = key.partition("%")
                counts[lemma, _PART_OF_NUMBER[rest[0]]][int(number)] = int(count)
        return counts


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _find(index: mmap.mmap, lemma: bytes) -> bytes:
    """The line of a sorted index that begins with a lemma, by bisection; empty if there is none."""
    low, high = 0, len(index)
    while low < high:
        middle = (low + high) // 2
        start = index.rfind(b"\n", 0, middle) + 1
        end = index.find(b"\n", start)
        end = len(index) if end < 0 else end
        line = index[start:end]
        found = line.partition(b" ")[0]
        if found == lemma:
            return line
        if found < lemma:  # the lines of the license begin with a space: an empty word, which sorts first
            low = end + 1
        else:
            high = start
    return b""
