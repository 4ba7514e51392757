"""What evaluation needs from its surroundings, and nothing more: any tokenizer and any decoder that fit will do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Attend


class TextEncoder(Protocol):
    """A tokenizer as evaluation sees it."""

    @property
    def bos_id(self) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Token ids of each text, nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ChatEncoder(TextEncoder, Protocol):
    """A tokenizer that also knows the chat format of fine-tuning."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> Sequence[int]:
        """Token ids of a rendered conversation."""
        ...


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
