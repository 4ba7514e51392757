"""A model folder as the language model of span infilling: our engine writes, the evaluation's scoring compares."""

from collections.abc import Sequence
from pathlib import Path

from modelwright.core.errors import ModelError
from modelwright.core.progress import SilentProgress
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import Scored, sequence_nats
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.hf import load_model

_TEMPERATURE, _TOP_P = 0.8, 0.95
"""How text that fills gaps is sampled: nucleus sampling (Holtzman et al. 2020), cooler than the model."""
_SCORE_TOKENS = 2_048


class InfillModel:
    """The model and tokenizer in a folder. Raises `ModelError` if they cannot be read or do not match."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder).eval()
        self._tokenizer = Tokenizer.load(folder)
        if self._tokenizer.vocab_size > self._model.config.vocab_size:
            raise ModelError(f"{folder}: the tokenizer has more tokens than the model; they do not match")
        begin = self._tokenizer.bos_id
        self._start = self._tokenizer.eos_id if begin is None else begin

    def complete(self, prompts: Sequence[str], *, max_tokens: int, seeds: Sequence[int]) -> list[str]:
        """A sampled continuation of each prompt; of a long prompt only the end counts."""
        most = self._model.config.max_seq_len - max_tokens - 1
        ids = [[self._start, *self._tokenizer.encode(prompt)[-most:]] for prompt in prompts]
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=_TEMPERATURE,
                top_p=_TOP_P,
                seed=seed,
                stop_ids=self._tokenizer.stop_ids,
            )
            for seed in seeds
        ]
        # padded products: what is computed together cannot change a completion
        config = EngineConfig(
            batch_invariant=True, kv_cache_tokens=max(EngineConfig.kv_cache_tokens, self._model.config.max_seq_len)
        )
        completions = generate(self._model, ids, params, config)
        return [self._tokenizer.decode(completion.token_ids) for completion in completions]

    def log_probs(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """The log-probability of each continuation, in nats; each is scored in a row of its own."""
        sequences = []
        for context, continuation in zip(contexts, continuations, strict=True):
            known, scored = self._tokenizer.encode(context), self._tokenizer.encode(continuation)
            known = known[-max(1, self._model.config.max_seq_len - len(scored) - 1) :]
            sequences.append(Scored([self._start, *known, *scored], 1 + len(known)))
        return [self._log_prob(sequence) for sequence in sequences]

    def _log_prob(self, sequence: Scored) -> float:
        """Log-probability of one sequence, computed alone so that rounding is the same whatever else is scored."""
        nats = sequence_nats(
            self._model,
            [sequence],
            context_overlap=0.5,
            max_context=min(self._model.config.max_seq_len, len(sequence.ids)),
            batch_tokens=_SCORE_TOKENS,
            progress=SilentProgress(),
        )
        return -float(nats[0])
