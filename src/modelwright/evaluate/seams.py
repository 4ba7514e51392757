"""What evaluation needs from its surroundings, and nothing more: any tokenizer and any decoder that fit will do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Attend


class TextEncoder(Protocol):
    """A tokenizer as evaluation sees it (`data.tokenizer.Tokenizer`)."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a plain text, nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ChatEncoder(TextEncoder, Protocol):
    """A tokenizer that also knows the chat format of fine-tuning."""

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Token ids of a conversation up to where the assistant is to speak."""
        ...


def start_id(tokenizer: TextEncoder) -> int:
    """What stands before a text: the begin token, or the end token of the text before it where there is none."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


class LanguageModel(Protocol):
    """A decoder in FP32 or INT8: hidden states from tokens, logits from hidden states."""

    config: ModelConfig

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Hidden states [B, T, D] after the final norm."""
        ...

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [..., V], by the head that the model is served with."""
        ...

    def eval(self) -> Any: ...

    def parameters(self) -> Iterator[Tensor]: ...


class HeldOut(Protocol):
    """A document as evaluation sees it (`data.document.Document`)."""

    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...
