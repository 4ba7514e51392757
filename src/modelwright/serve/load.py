"""Loads a model for serving: a folder in the Hugging Face layout, also of a model that reads images or of a sequence
classifier with one label, which scores texts; or an INT8 folder with a tokenizer. Also fingerprints of weights, and a
note on what to expect of a model.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.core.errors import ModelError
from modelwright.model.decoder import Decoder
from modelwright.model.hf import SCORE, is_sequence_classifier, load_model, load_sequence_classifier
from modelwright.model.vision.llava import is_llava_folder, load_llava
from modelwright.serve.tokenizer import ServedTokenizer

SHORT_DIGEST = 12


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The origin of a model, for display: its folder, the stage that wrote it and the SHA-256 over its files. `stage`
    and `digest` are "" for a folder that no stage wrote (downloaded, exported).
    """

    name: str
    folder: Path
    stage: str = ""
    digest: str = ""

    def describe(self) -> str:
        """Returns a text such as `sft of tiny (runs/tiny/sft/artifact, sha256 0123456789ab)`."""
        if not self.digest:
            return f"{self.name} ({self.folder}, without a manifest, so its files are not verified)"
        return f"{self.stage} of {self.name} ({self.folder}, sha256 {self.digest[:SHORT_DIGEST]})"


def load_folder(folder: Path, int8: Int8WeightsConfig) -> tuple[Decoder, ServedTokenizer]:
    """Loads a model and its tokenizer. Raises `ModelError` if files are missing or do not match."""
    require_folder(folder)
    # the more special layouts first: each of them is in the Hugging Face layout as well
    if is_int8_folder(folder):
        model = load_int8(folder, int8)
    elif is_llava_folder(folder):
        model = load_llava(folder)
    elif is_sequence_classifier(folder):
        model = load_sequence_classifier(folder, head=SCORE)
    else:
        model = load_model(folder)
    tokenizer = ServedTokenizer.load(folder)
    # fewer tokens are normal, because models pad their vocabulary
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}; "
            "they do not match"
        )
    return model.eval(), tokenizer


def require_folder(folder: Path) -> None:
    """Raises `ModelError` unless `folder` is an existing folder."""
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # the name is too long, or has parts that may not be read
        raise ModelError(f"{str(folder)[:100]}: no model folder ({error.strerror})") from None
    if not is_folder:
        raise ModelError(f"{folder}: no such model folder")


FINGERPRINT_LEN = 12


def adapted_fingerprint(base: str, digest: str) -> str:
    """Returns the fingerprint of a model with an adapter. base: that of the model; digest: the adapter's."""
    return f"fp_{hashlib.sha256(f'{base} {digest}'.encode()).hexdigest()[:FINGERPRINT_LEN]}"


def weights_fingerprint(model: Decoder) -> str:
    """Returns a hash over names, dtypes, shapes and values of a model's tensors: "fp_" and 12 hex digits."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):  # quantized modules have other entries
            continue
        plain = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
        hashed.update(plain.view(-1).view(torch.uint8).numpy().data)  # as bytes, because NumPy has no BF16
    return f"fp_{hashed.hexdigest()[:FINGERPRINT_LEN]}"


SMALLEST_CHAT_MODEL = 135_000_000
"""Parameters of SmolLM2-135M-Instruct, among the smallest published models that answer questions."""


def expectation(num_parameters: int) -> str:
    """Returns a sentence for a model that is too small to answer questions, or "" for a larger one."""
    if num_parameters >= SMALLEST_CHAT_MODEL:
        return ""
    millions = num_parameters / 1e6
    amount = f"{millions:.0f}" if millions >= 10 else f"{millions:.1f}".removesuffix(".0")
    return (
        f"This model has {amount} million parameters: it has learned what answers look like, not facts, "
        "and most of what it says is wrong."
    )
