"""Converts a byte-level BPE `tokenizer.json` to a `tiktoken` encoding: the same ids, several times faster.

Only for tokenizers that mean the same in both libraries: BPE without dropout or byte fallback, byte-level alphabet, one
splitting pattern, no normalizer, ids of merged tokens in the order of the merges. Others give None.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import tiktoken

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Built-in pattern of `tokenizers`' `ByteLevel` pre-tokenizer."""


def is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Returns True if tokens are spelled in the byte-level alphabet, so that each has fixed bytes."""
    decoder = definition.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return any(step.get("type") == "ByteLevel" for step in steps)


def token_bytes(definition: Mapping[str, Any]) -> dict[int, bytes]:
    """Returns the bytes of each token of a byte-level vocabulary, except added tokens."""
    # GPT-2's alphabet (Radford et al. 2019, `encoder.py`): printable characters are themselves, others follow at 256.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    added = {entry["content"] for entry in definition.get("added_tokens", ())}
    vocab = definition["model"]["vocab"]
    return {i: bytes(byte_of[c] for c in token) for token, i in vocab.items() if token not in added}


def fast_encoding(definition_json: str) -> tiktoken.Encoding | None:
    """Returns the encoding of the text of a `tokenizer.json`, without special tokens; None if equality is uncertain."""
    definition = json.loads(definition_json)
    pattern, model = _pattern(definition), definition["model"]
    if pattern is None or not is_byte_level(definition):
        return None
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
    if model.get("type") != "BPE" or any(model.get(name) for name in odd):
        return None
    ranks = {spelled: i for i, spelled in token_bytes(definition).items()}
    if not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    # tiktoken merges by id, `tokenizers` by rank: the merges must create each token once, in the order of ids.
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    made = [model["vocab"].get(left + right, -1) for left, right in pairs]
    if not all(a < b for a, b in pairwise(made)):
        return None
    return tiktoken.Encoding(name="modelwright", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _pattern(definition: Mapping[str, Any]) -> str | None:
    """Returns the pattern that splits a text before BPE; None if another step changes or splits the text."""
    if definition.get("normalizer"):
        return None
    steps = definition.get("pre_tokenizer") or {}
    match steps.get("pretokenizers", [steps]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    return None
