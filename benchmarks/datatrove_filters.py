"""Run by `quality_sets.py` in an environment with datatrove: texts by id on standard input, ids of those that a filter
drops on standard output, both JSON.
"""

import json
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    filters: Any = import_module("datatrove.pipeline.filters")
    document: Any = import_module("datatrove.data").Document
    # FineWeb leaves C4's rule on lines without a full stop out, because it drops too much.
    steps = [
        filters.GopherRepetitionFilter(),
        filters.GopherQualityFilter(),
        filters.C4QualityFilter(filter_no_terminal_punct=False),
        filters.FineWebQualityFilter(),
    ]
    texts: dict[str, str] = json.load(sys.stdin)
    # C4's filter changes the text that the next filter sees, as in a pipeline.
    documents = {name: document(text=text, id=name) for name, text in texts.items()}
    dropped = [name for name, one in documents.items() if not all(step.filter(one) is True for step in steps)]
    print(json.dumps(dropped))


if __name__ == "__main__":
    main()
