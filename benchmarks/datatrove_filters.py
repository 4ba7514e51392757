"""Run by `quality_sets.py` and `cleaning_peers.py` in an environment with datatrove: texts by id on standard input, the
ids of those that a filter drops and the CPU seconds of filtering on standard output, both JSON. Arguments choose
filters.
"""

import json
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    filters: Any = import_module("datatrove.pipeline.filters")
    document: Any = import_module("datatrove.data").Document
    makers = {
        "gopher repetition": filters.GopherRepetitionFilter,
        "gopher quality": filters.GopherQualityFilter,
        # FineWeb leaves C4's rule on lines without a full stop out, because it drops too much.
        "c4": lambda: filters.C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": filters.FineWebQualityFilter,
    }
    steps = [makers[name]() for name in sys.argv[1:] or makers]
    texts: dict[str, str] = json.load(sys.stdin)
    # C4's filter changes the text that the next filter sees, as in a pipeline.
    documents = {name: document(text=text, id=name) for name, text in texts.items()}
    for step in steps:
        step.filter(document(text="The first text loads what a filter needs. " * 5, id=""))
    started = time.process_time()
    dropped = [name for name, one in documents.items() if not all(step.filter(one) is True for step in steps)]
    print(json.dumps({"dropped": dropped, "cpu_s": time.process_time() - started}))


if __name__ == "__main__":
    main()
