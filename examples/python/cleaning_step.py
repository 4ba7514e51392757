# Cleans records with a step of your own, which is a class in a file: here, it drops texts that shout.
# Run it as python cleaning_step.py TEXTS.jsonl; each line is {"text": ...}. The folder "cleaned" gets the result.
# A step returns the document, a changed one, or a Drop, whose reason is counted in the report.
import sys
from dataclasses import dataclass

import modelwright as mw
from modelwright.data.clean.steps.step import Drop
from modelwright.data.document import Document


@dataclass(frozen=True)
class NoShouting:
    most_capitals: float = 0.5
    name: str = "no_shouting"

    def __call__(self, document: Document) -> Document | Drop:
        letters = [char for char in document.text if char.isalpha()]
        share = sum(char.isupper() for char in letters) / max(1, len(letters))
        if share > self.most_capitals:
            return Drop("capitals", f"{share:.0%} of the letters, limit {self.most_capitals:.0%}")
        return document.map_text(lambda text: text.replace("!!!", "!"))


def main(texts: str) -> None:
    # Steps that are named run after the step `format`, and before duplicates are looked for.
    lines = mw.clean(texts, "cleaned", clean={"steps": [f"{__file__}:NoShouting"]})
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
