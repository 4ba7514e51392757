"""A Hugging Face tokenizer as the vocabulary of a GGUF file.

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

from modelwright.core.errors import ModelError
from modelwright.data.tokenizer.fast_bpe import is_byte_level
from modelwright.data.tokenizer.tokenizer import PATTERN, Tokenizer

_QWEN2_PATTERN = PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
WORD = "\u2581"
"""Stands for a blank in SentencePiece."""


class TokenKind(IntEnum):
    """What llama.cpp tells apart, by its numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What llama.cpp needs to encode and decode text."""

    model: str
    """`gpt2` or `llama`."""
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    pre: str = "default"
    """How text is split before merges, by llama.cpp's name."""
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    special: Mapping[str, int] = field(default_factory=dict[str, int])
    """Token ids by name: bos, eos, eot, unknown, padding."""
    adds_bos: bool = False
    strips_like_phi3: bool = False
    """Whether special tokens take the white space after them, as those of Phi-3 do."""
    adds_space: bool = False
    """Whether a blank is put before a text."""
    chat_template: str = ""


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary of a tokenizer folder, filled up with unused tokens to the model's `vocab_size`. Raises
    `ModelError` that names what llama.cpp cannot do.
    """
    tokenizer = Tokenizer.load(folder)
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = definition["model"]
    if model.get("type") != "BPE":
        raise _refusal(folder, f"model {model.get('type')!r}")
    pieces = {token_id: piece for piece, token_id in model["vocab"].items()}
    added = {entry["id"]: entry for entry in definition["added_tokens"]}
    of_kind = _byte_level if is_byte_level(definition) else _sentencepiece
    parts = of_kind(folder, definition, pieces)
    tokens: list[str] = []
    kinds: list[TokenKind] = []
    for token_id in range(vocab_size):
        token, kind = f"[PAD{token_id}]", TokenKind.UNUSED
        if token_id in pieces:
            token, kind = pieces[token_id], _piece_kind(pieces[token_id], model)
        if token_id in added:
            token = added[token_id]["content"]
            kind = TokenKind.CONTROL if added[token_id]["special"] else TokenKind.USER_DEFINED
        tokens.append(token)
        kinds.append(kind)
    if parts.get("scores"):
        parts["scores"] = [*parts["scores"], *[-1000.0] * (vocab_size - len(parts["scores"]))]
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        special=_special(tokenizer, model),
        adds_bos=tokenizer.bos_id is not None and tokenizer.begin_ids[:1] == [tokenizer.bos_id],
        chat_template=tokenizer.chat_template.source,
        strips_like_phi3=_strips_like_phi3(folder, definition),
        **parts,
    )


def _strips_like_phi3(folder: Path, definition: Mapping[str, Any]) -> bool:
    """Whether added tokens take the white space after them. llama.cpp knows one choice of such tokens, Phi-3's
    (`llama_vocab::impl::load`). Raises `ModelError` for others, and for tokens that take the space before them.
    """
    added = {entry["content"]: entry for entry in definition["added_tokens"]}
    for side in ("lstrip", "single_word"):
        if names := [name for name, entry in added.items() if entry.get(side)]:
            raise _refusal(folder, f"added token with {side} ({names[0]})")
    stripping = {name for name, entry in added.items() if entry.get("rstrip")}
    of_phi3 = {*added, "</s>"} - {"<unk>", "<s>", "<|endoftext|>"}
    if stripping and stripping != of_phi3:
        name = min(stripping ^ of_phi3)
        raise _refusal(folder, f"such choice of added tokens with rstrip (it differs from Phi-3's in {name})")
    return bool(stripping)


def _byte_level(folder: Path, definition: Mapping[str, Any], pieces: Mapping[int, str]) -> dict[str, Any]:
    model = definition["model"]
    if normalizer := _without_nfc(definition.get("normalizer")):
        raise _refusal(folder, f"normalizer {normalizer!r}")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return {"model": "gpt2", "pre": pre_tokenizer_name(definition, str(folder)), "merges": merges}


def _without_nfc(normalizer: Any) -> str:
    """The type of a normalizer that is not NFC, which llama.cpp leaves to the text as Qwen's does; "" for none."""
    kind = (normalizer or {}).get("type", "")
    return "" if kind == "NFC" else kind


def pre_tokenizer_name(definition: Mapping[str, Any], source: str) -> str:
    """llama.cpp's name of how a byte-level tokenizer splits text. Raises `ModelError` for an unknown way."""
    patterns = _split_steps(definition.get("pre_tokenizer"))
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


def _split_steps(pre_tokenizer: Any) -> list[str]:
    """Each step of a pre-tokenizer: its pattern, `digits` or `gpt2`; a step that splits nothing is left out."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    names: list[str] = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated" | "Removed", **rest}:
                # Qwen and Llama remove what does not match, which is nothing
                names.append(pattern if rest.get("invert", False) == (step["behavior"] == "Removed") else str(step))
            case {"type": "Digits", "individual_digits": True}:
                names.append("digits")
            case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
                names += ["gpt2"] if rest.get("use_regex", True) else []
            case _:
                names.append(str(step.get("type")))
    return names


def _sentencepiece(folder: Path, definition: Mapping[str, Any], pieces: Mapping[int, str]) -> dict[str, Any]:
    """Scores are ranks of merges: SentencePiece joins the pair whose result has the highest score first."""
    model = definition["model"]
    if not model.get("byte_fallback"):
        raise _refusal(folder, "BPE that is neither of bytes nor has bytes as a fallback")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(first + second, rank)
    scores = [-float(ranks.get(pieces.get(token_id, ""), len(ranks))) for token_id in range(max(pieces) + 1)]
    return {"model": "llama", "scores": scores, "adds_space": _adds_space(folder, definition)}


def _adds_space(folder: Path, definition: Mapping[str, Any]) -> bool:
    """Whether a blank is put before a text. Raises `ModelError` for other changes of the text."""
    normalizer, pre_tokenizer = definition.get("normalizer") or {}, definition.get("pre_tokenizer") or {}
    steps = [*normalizer.get("normalizers", [normalizer] if normalizer else []), pre_tokenizer]
    adds = False
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                adds = True
            case {"type": "Metaspace", "replacement": "\u2581", **rest}:
                adds = adds or rest.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # of Gemma: there are no blanks any more
            case {} if not step:
                pass
            case _:
                raise _refusal(folder, f"step {step.get('type')!r}")
    return adds


def _piece_kind(piece: str, model: Mapping[str, Any]) -> TokenKind:
    if piece == model.get("unk_token"):
        return TokenKind.UNKNOWN
    is_byte = model.get("byte_fallback") and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return TokenKind.BYTE if is_byte else TokenKind.NORMAL


def _special(tokenizer: Tokenizer, model: Mapping[str, Any]) -> dict[str, int]:
    named = {"padding": tokenizer.special_tokens.get("pad_token"), "unknown": model.get("unk_token")}
    ids = {name: tokenizer.id_of(token) for name, token in named.items() if token}
    special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "eot": tokenizer.end_id, **ids}
    return {name: token_id for name, token_id in special.items() if token_id is not None}


def _refusal(folder: Path, what: str) -> ModelError:
    return ModelError(f"{folder}: tokenizer.json: llama.cpp knows no {what}; export to hf instead")
