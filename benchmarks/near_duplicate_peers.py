"""Run by `cleaning_peers.py` in an environment with datatrove and datasketch: texts on standard input, the numbers of
those that a tool drops as near-duplicates and the CPU seconds that it took on standard output, both JSON.

    python near_duplicate_peers.py datatrove        as its example has it: 14 buckets of 8 hashes, nothing is verified
    python near_duplicate_peers.py datatrove-0.85   9 buckets of 14 hashes: the threshold is at 0.855
    python near_duplicate_peers.py datasketch       MinHashLSH with a threshold of 0.85 and 128 permutations
    python near_duplicate_peers.py datasketch-verified   16 bands of 8 rows, and the exact similarity of candidates

A text is dropped if one before it is its near-duplicate. All compare sets of word 5-grams in lower case.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

THRESHOLD = 0.85
SHINGLE_WORDS = 5
NUM_PERMUTATIONS = 128


def datatrove(texts: Sequence[str], **config: int) -> list[int]:
    """The four steps of its pipeline one after another in this process, on one task."""
    dedup: Any = import_module("datatrove.pipeline.dedup")
    minhash: Any = import_module("datatrove.pipeline.dedup.minhash")
    document: Any = import_module("datatrove.data").Document
    settings = minhash.MinhashConfig(**config)
    with tempfile.TemporaryDirectory() as name:
        signatures, buckets, clusters = (str(Path(name) / part) for part in ("signatures", "buckets", "clusters"))

        def documents() -> Any:
            return (document(text=text, id=str(number)) for number, text in enumerate(texts))

        dedup.MinhashDedupSignature(signatures, config=settings).run(documents(), 0, 1)
        for bucket in range(settings.num_buckets):
            list(
                dedup.MinhashDedupBuckets(signatures, buckets, config=settings).run(None, bucket, settings.num_buckets)
                or ()
            )
        list(dedup.MinhashDedupCluster(buckets, clusters, config=settings).run(None, 0, 1) or ())
        kept = {int(one.id) for one in dedup.MinhashDedupFilter(clusters).run(documents(), 0, 1)}
    return [number for number in range(len(texts)) if number not in kept]


def shingles(text: str) -> set[bytes]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in range(len(words) - SHINGLE_WORDS + 1)}


def datasketch(texts: Sequence[str]) -> list[int]:
    module: Any = import_module("datasketch")
    lsh = module.MinHashLSH(threshold=THRESHOLD, num_perm=NUM_PERMUTATIONS)
    dropped: list[int] = []
    for number, text in enumerate(texts):
        signature = module.MinHash(num_perm=NUM_PERMUTATIONS)
        signature.update_batch(shingles(text))
        if lsh.query(signature):
            dropped.append(number)
        else:
            lsh.insert(number, signature)
    return dropped


def datasketch_verified(texts: Sequence[str]) -> list[int]:
    """As a careful user has it: more candidates than wanted, each compared exactly."""
    module: Any = import_module("datasketch")
    lsh = module.MinHashLSH(params=(16, 8), num_perm=NUM_PERMUTATIONS)
    sets: dict[int, set[bytes]] = {}
    dropped: list[int] = []
    for number, text in enumerate(texts):
        own = shingles(text)
        signature = module.MinHash(num_perm=NUM_PERMUTATIONS)
        signature.update_batch(own)
        others = (sets[one] for one in lsh.query(signature))
        if any(len(own & other) >= THRESHOLD * len(own | other) for other in others):
            dropped.append(number)
        else:
            lsh.insert(number, signature)
            sets[number] = own
    return dropped


TOOLS: dict[str, Callable[[Sequence[str]], list[int]]] = {
    "datatrove": datatrove,
    "datatrove-0.85": lambda texts: datatrove(texts, num_buckets=9, hashes_per_bucket=14),
    "datasketch": datasketch,
    "datasketch-verified": datasketch_verified,
}


def main() -> None:
    texts: list[str] = json.load(sys.stdin)
    tool = TOOLS[sys.argv[1]]
    tool(texts[:2])  # loads what it needs
    started = time.process_time()
    dropped = tool(texts)
    print(json.dumps({"dropped": dropped, "cpu_s": time.process_time() - started}))


if __name__ == "__main__":
    main()
