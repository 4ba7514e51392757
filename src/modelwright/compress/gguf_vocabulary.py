"""Converts a Hugging Face tokenizer to the vocabulary of a GGUF file.

llama.cpp has two kinds of BPE: of bytes (`gpt2`), for which it must know by name how text is split into words, and of
characters with single bytes as a fallback (`llama`, the BPE of SentencePiece). Any other tokenizer, and any other way
to split text, is refused by name: the model would answer, but to other tokens than it was trained on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from modelwright.core.config import ModelError
from modelwright.data.tokenizer.decode import is_byte_level
from modelwright.data.tokenizer.tokenizer import PATTERN, Tokenizer

_QWEN2_PATTERN = PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
WORD = "\u2581"
"""Replacement for a blank in SentencePiece."""


class TokenKind(IntEnum):
    """Kinds of tokens that llama.cpp distinguishes, by its numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Facts that llama.cpp needs to encode and decode text."""

    model: str
    """`gpt2` or `llama`."""
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    pre: str = "default"
    """llama.cpp's name of the way in which text is split before merges."""
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    special: Mapping[str, int] = field(default_factory=dict[str, int])
    """Token ids by name: bos, eos, eot, eom, unknown, padding."""
    adds_bos: bool = False
    strips_like_phi3: bool = False
    """True if special tokens take the white space after them, as those of Phi-3 do."""
    adds_space: bool = False
    """True if a blank is put before a text."""
    chat_template: str = ""


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """Reads the vocabulary of a tokenizer folder, filled up with unused tokens to the model's `vocab_size`. Raises
    `ModelError` with the part of the tokenizer that llama.cpp cannot reproduce.
    """
    tokenizer = Tokenizer.load(folder)
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = definition["model"]
    if model.get("type") != "BPE":
        raise _refusal(folder, f"model {model.get('type')!r}")
    pieces = {token_id: piece for piece, token_id in model["vocab"].items()}
    added = {entry["id"]: entry for entry in definition["added_tokens"]}
    if is_byte_level(definition):
        # NFC alone passes: llama.cpp does not normalize, and expects text in that form, as Qwen's does.
        kind = (definition.get("normalizer") or {}).get("type", "")
        if kind not in ("", "NFC"):
            raise _refusal(folder, f"normalizer {kind!r}")
        merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
        parts: dict[str, Any] = {"model": "gpt2", "pre": pre_tokenizer_name(definition, str(folder)), "merges": merges}
    else:
        parts = _sentencepiece(folder, definition, pieces)
        # Tokens that the model has and the tokenizer lacks must never be the result of a merge.
        parts["scores"] = [*parts["scores"], *[-1000.0] * (vocab_size - len(parts["scores"]))]
    tokens: list[str] = []
    kinds: list[TokenKind] = []
    for token_id in range(vocab_size):
        token, kind = f"[PAD{token_id}]", TokenKind.UNUSED
        if token_id in pieces:
            token, kind = pieces[token_id], TokenKind.NORMAL
            if token == model.get("unk_token"):
                kind = TokenKind.UNKNOWN
            elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                kind = TokenKind.BYTE
        if token_id in added:
            token = added[token_id]["content"]
            kind = TokenKind.CONTROL if added[token_id]["special"] else TokenKind.USER_DEFINED
        tokens.append(token)
        kinds.append(kind)
    named = {"padding": tokenizer.special_tokens.get("pad_token"), "unknown": model.get("unk_token")}
    ids = {name: tokenizer.id_of(token) for name, token in named.items() if token}
    # llama.cpp stops at each of eos, eot and eom; further ones are only in the Modelfile.
    further = (stop for stop in tokenizer.stop_ids if stop not in (tokenizer.eos_id, tokenizer.end_id))
    special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "eot": tokenizer.end_id, "eom": next(further, None)}
    special |= ids
    # llama.cpp knows one choice of added tokens that take the white space after them, Phi-3's
    # (`llama_vocab::impl::load`), and none that take the space before them.
    by_text = {entry["content"]: entry for entry in definition["added_tokens"]}
    for side in ("lstrip", "single_word"):
        if names := [name for name, entry in by_text.items() if entry.get(side)]:
            raise _refusal(folder, f"added token with {side} ({names[0]})")
    stripping = {name for name, entry in by_text.items() if entry.get("rstrip")}
    of_phi3 = {*by_text, "</s>"} - {"<unk>", "<s>", "<|endoftext|>"}
    if stripping and stripping != of_phi3:
        name = min(stripping ^ of_phi3)
        raise _refusal(folder, f"such choice of added tokens with rstrip (it differs from Phi-3's in {name})")
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        special={name: token_id for name, token_id in special.items() if token_id is not None},
        adds_bos=tokenizer.bos_id is not None and tokenizer.begin_ids[:1] == [tokenizer.bos_id],
        chat_template=tokenizer.chat_template.source,
        strips_like_phi3=bool(stripping),
        **parts,
    )


def pre_tokenizer_name(definition: Mapping[str, Any], source: str) -> str:
    """Returns llama.cpp's name of the way in which a byte-level tokenizer splits text. Raises `ModelError` for an
    unknown way.
    """
    pre_tokenizer = definition.get("pre_tokenizer")
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    patterns: list[str] = []  # of each step: its pattern, `digits` or `gpt2`; nothing for a step that splits nothing
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated" | "Removed", **rest}:
                # Qwen and Llama remove what does not match, which is nothing.
                is_known = rest.get("invert", False) == (step["behavior"] == "Removed")
                patterns.append(pattern if is_known else str(step))
            case {"type": "Digits", "individual_digits": True}:
                patterns.append("digits")
            case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
                patterns += ["gpt2"] if rest.get("use_regex", True) else []
            case _:
                patterns.append(str(step.get("type")))
    takes_whole_words = bool(definition["model"].get("ignore_merges"))
    known = {
        (PATTERN, True): "llama-bpe",
        (PATTERN, False): "dbrx",
        (_QWEN2_PATTERN, False): "qwen2",
        ("gpt2", False): "gpt-2",
        ("digits gpt2", False): "smollm",
    }
    name = known.get((" ".join(patterns), takes_whole_words))
    if name is None:
        words = f"pre_tokenizer that splits by {' and then by '.join(patterns) or 'nothing'}"
        raise _refusal(Path(source), words + (" and ignores merges" if takes_whole_words else ""))
    return name


def _sentencepiece(folder: Path, definition: Mapping[str, Any], pieces: Mapping[int, str]) -> dict[str, Any]:
    """Model, scores and the blank before a text of a SentencePiece vocabulary. Scores are ranks of merges:
    SentencePiece joins the pair whose result has the highest score first. Raises `ModelError` for other changes of the
    text.
    """
    model = definition["model"]
    if not model.get("byte_fallback"):
        raise _refusal(folder, "BPE that is neither of bytes nor has bytes as a fallback")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        # Several merges can give one piece; the first one decides its rank.
        ranks.setdefault(first + second, rank)
    scores = [-float(ranks.get(pieces.get(token_id, ""), len(ranks))) for token_id in range(max(pieces) + 1)]
    normalizer, pre_tokenizer = definition.get("normalizer") or {}, definition.get("pre_tokenizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer] if normalizer else []), pre_tokenizer]
    adds_space = False
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                adds_space = True
            case {"type": "Metaspace", "replacement": "\u2581", **rest}:
                adds_space = adds_space or rest.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # of Gemma: no blanks are left at this step
            case {} if not step:
                pass
            case _:
                raise _refusal(folder, f"step {step.get('type')!r}")
    return {"model": "llama", "scores": scores, "adds_space": adds_space}


def _refusal(folder: Path, what: str) -> ModelError:
    return ModelError(f"{folder}: tokenizer.json: llama.cpp knows no {what}; export to hf instead")
