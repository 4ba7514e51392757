"""The second model of the step noise: any Hugging Face sequence-classification model on disk.

Imported only where `noise.model` names one: PyTorch would cost every process that cleans hundreds of megabytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelwright.core.errors import DataError

_BATCH = 16
_MAX_TOKENS = 512


class NoiseModel:
    """Scores noise, in logits, by a model in `folder`; `noise_label` is the name or number of its class of noise.

    Raises `DataError` if the model cannot be loaded or does not have this class.
    """

    def __init__(self, folder: str, noise_label: str) -> None:
        try:
            import transformers
        except ImportError:
            raise DataError("noise.model: needs the package transformers; install modelwright[hf]") from None
        transformers.logging.set_verbosity_error()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            ).eval()
        except (OSError, ValueError) as error:
            text = f"noise.model: {folder}: cannot be loaded ({str(error).splitlines()[0]})"
            raise DataError(f"{text}; give a folder of a sequence-classification model with safetensors") from None
        config = self._model.config
        by_name = {name.lower(): int(number) for number, name in config.id2label.items()}
        self._noise = by_name.get(noise_label.lower(), int(noise_label) if noise_label.isdigit() else -1)
        if not 0 <= self._noise < config.num_labels:
            known = ", ".join(config.id2label.values())
            raise DataError(f"noise.model_noise_label: {noise_label!r} is not one of {known}")
        self._longest = min(_MAX_TOKENS, getattr(self._model.config, "max_position_embeddings", _MAX_TOKENS))

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Computes the logit of noise against all other classes of each text [N]."""
        result: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                batch = self._tokenizer(
                    list(texts[start : start + _BATCH]), truncation=True, max_length=self._longest, padding=True,
                    return_tensors="pt",
                )  # fmt: skip
                logits = self._model(**batch).logits.double()
                others = [number for number in range(logits.shape[1]) if number != self._noise]
                result += (logits[:, self._noise] - logits[:, others].logsumexp(dim=1)).tolist()
        return np.array(result)
