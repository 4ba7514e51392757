"""Writes the part of WordNet that some work reads as a small database in WordNet's own format.

The tests run on `tests/data/wordnet`, which `MODELWRIGHT_WRITE_GOLDEN=1` writes anew from the database of the machine.
"""

from collections import defaultdict
from pathlib import Path

from modelwright.data.augment.related_words import PartOfSpeech, Synset, WordNet

_LICENSE_LINES = 29
_LETTER = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}


class RecordingWordNet(WordNet):
    """Remembers which lemmas and meanings were looked up."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lemmas: set[tuple[str, PartOfSpeech]] = set()
        self.offsets: set[tuple[int, PartOfSpeech]] = set()

    def _read_senses(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        senses = super()._read_senses(lemma, part)
        if senses:
            self.lemmas.add((lemma, part))
        return senses

    def _read_synset(self, offset: int, part: PartOfSpeech) -> Synset:
        self.offsets.add((offset, part))
        return super()._read_synset(offset, part)


def write_subset(source: RecordingWordNet, folder: Path) -> None:
    """The lemmas and meanings that were looked up, with their broader meanings, at new offsets."""
    folder.mkdir(parents=True, exist_ok=True)
    license_lines = (source.folder / "data.noun").read_text().splitlines()[:_LICENSE_LINES]
    header = "".join(f"{line}\n" for line in license_lines)
    for part in ("noun", "verb", "adj", "adv"):
        _write_part(source, folder, part, header)
    keys = {(lemma, part) for lemma, part in source.lemmas}
    parts = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
    kept = []
    for line in (source.folder / "cntlist.rev").read_text().splitlines():
        lemma, _, rest = line.partition("%")
        if (lemma, parts[rest[0]]) in keys:
            kept.append(f"{line}\n")
    (folder / "cntlist.rev").write_text("".join(kept))


def _write_part(source: RecordingWordNet, folder: Path, part: PartOfSpeech, header: str) -> None:
    lemmas = sorted(lemma for lemma, its_part in source.lemmas if its_part == part)
    needed = {offset for offset, its_part in source.offsets if its_part == part}
    needed |= {offset for lemma in lemmas for offset in source.senses(lemma, part)}
    pending = list(needed)
    while pending:
        for broader in source.synset(pending.pop(), part).hypernyms:
            if broader not in needed:
                needed.add(broader)
                pending.append(broader)
    new_offsets, position, lines = dict[int, int](), len(header), list[str]()
    for offset in sorted(needed):
        synset = source.synset(offset, part)
        words = " ".join(f"{word} 0" for word in synset.words)
        length = len(_line(0, part, len(synset.words), words, [0] * len(synset.hypernyms)))
        new_offsets[offset], position = position, position + length
    for offset in sorted(needed):
        synset = source.synset(offset, part)
        words = " ".join(f"{word} 0" for word in synset.words)
        broader = [new_offsets[one] for one in synset.hypernyms]
        lines.append(_line(new_offsets[offset], part, len(synset.words), words, broader))
    (folder / f"data.{part}").write_text(header + "".join(lines))
    index = defaultdict(str)
    for lemma in lemmas:
        senses = source.senses(lemma, part)
        offsets = " ".join(f"{new_offsets[offset]:08d}" for offset in senses)
        index[lemma] = f"{lemma} {_LETTER[part]} {len(senses)} 0 {len(senses)} 0 {offsets}\n"
    (folder / f"index.{part}").write_text(header + "".join(index[lemma] for lemma in lemmas))


def _line(offset: int, part: PartOfSpeech, num_words: int, words: str, broader: list[int]) -> str:
    pointers = "".join(f" @ {one:08d} {_LETTER[part]} 0000" for one in broader)
    return f"{offset:08d} 00 {_LETTER[part]} {num_words:02x} {words} {len(broader):03d}{pointers} | \n"
