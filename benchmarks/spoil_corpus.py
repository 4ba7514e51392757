"""Spoils clean text in known ways, with a label for each document, to check what cleaning finds and what it costs.

    python benchmarks/spoil_corpus.py corpus/*.jsonl --out spoiled
    python benchmarks/spoil_corpus.py stdlib --out spoiled --most 5000 --share 0.5 --seed 3
    python benchmarks/judge_cleaning.py spoiled                             then measures cleaning on it

`modelwright_claims.cleaning_scores` describes the files and the forms of spoiling.
"""

import argparse
from pathlib import Path

from modelwright_claims.cleaning_scores import clean_texts, spoil, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="clean text, as in data.sources")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=5000, help="texts to read")
    parser.add_argument("--share", type=float, default=0.6, help="share of the texts that are spoiled or copied")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    texts = clean_texts(tuple(given.sources), given.most)
    print(f"{write(given.out, spoil(texts, given.share, given.seed)):,} documents from {len(texts):,} in {given.out}")


if __name__ == "__main__":
    main()
