"""A decoder as a model of EleutherAI's lm-evaluation-harness (Gao et al. 2021), computed by the engine: log-likelihoods
of continuations and of whole texts, and generated answers.

Importing this module needs the package `lm_eval` (extra `eval`); `pipeline/harness.py` chooses the tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from modelwright.core.config import ConfigError, derive_seed
from modelwright.core.progress import Progress
from modelwright.data.tokenizer.decode import TextStream
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import Engine
from modelwright.infer.sequence import SamplingParams

MAX_NEW_TOKENS = 256
"""Longest answer to a task that sets none, as for lm-eval's own models."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Generation settings of a task that have the same names in the engine."""
Scored = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""


@dataclass
class _Answer:
    """A generated answer in progress."""

    stream: TextStream
    stops: list[str]
    text: str = ""


class EngineLM(TemplateLM):
    """A model and its tokenizer for `lm_eval.simple_evaluate`. uses_chat: prompts are renderings of the chat template,
    in which control tokens are read as such; otherwise a text is plain, and characters that look like a control token
    stay characters. info: facts about the model for lm-eval's results.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, uses_chat: bool, info: Mapping[str, Any], progress: Progress
    ) -> None:
        super().__init__()
        self._engine = engine
        self._tokenizer = tokenizer
        self._uses_chat = uses_chat
        self._info = dict(info)
        self._progress = progress
        self.max_ids = engine.max_seq_len - 1
        """Longest context with its continuation, in tokens: the engine keeps the last place for a new one."""

    @property
    def max_length(self) -> int:
        """Most tokens of a context whose continuation is one token, as lm-eval counts."""
        return self.max_ids - 1

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token from which the first token of a text without context is predicted."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return str(self._info.get("model", ""))

    def get_model_info(self) -> dict[str, Any]:
        """Model facts for lm-eval's result file."""
        return dict(self._info)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a chat so that the text of a message cannot become a control token."""
        return self._tokenizer.chat.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text, with the begin token where the tokenizer puts one, unless the text has it already."""
        ids = self._tokenizer.chat.encode_rendered(string) if self._uses_chat else self._tokenizer.encode(string)
        begin = self._tokenizer.begin_ids
        if add_special_tokens is False or (add_special_tokens is None and ids[: len(begin)] == begin):
            return ids
        return [*begin, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and true if greedy decoding gives it. lm-eval's own code fails where
        context and continuation are both empty.
        """
        scores = iter(super().loglikelihood([one for one in requests if any(one.args)], disable_tqdm=True))
        return [next(scores) if any(one.args) else (0.0, True) for one in requests]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for (_, text), _, ids in requests:
            if text and not ids:
                raise ConfigError(
                    f"--tasks: the tokenizer merges the continuation {text!r} with its context, which leaves nothing "
                    "to score; let it begin with a space (target_delimiter)"
                )
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of each text. Each token is predicted once, from all tokens before it in its window."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            own = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for window in map(make_disjoint_window, own):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._scores(windows), strict=True):
            totals[owner] += score
        return totals

    def _scores(self, pairs: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation in nats, and true if greedy decoding gives it."""
        results: dict[int, tuple[float, bool]] = {}
        self._progress.begin("log-likelihoods", len(pairs), "continuations")
        # Prompts with a common beginning are queued close to each other, so that it is computed once.
        for number in sharing_order([context for context, _ in pairs]):
            context, continuation = pairs[number]
            if not continuation:
                results[number] = (0.0, True)
                continue
            if len(continuation) >= self.max_ids:
                raise ConfigError(
                    f"--tasks: a continuation has {len(continuation)} tokens, and the model's context is "
                    f"{self._engine.max_seq_len}; score it as a whole text (output_type loglikelihood_rolling)"
                )
            # The context is cut at its beginning: the continuation is scored whole.
            ids = [*context, *continuation][-self.max_ids :]
            params = SamplingParams(
                max_tokens=1, temperature=0.0, num_prompt_logprobs=0, prompt_logprobs_start=len(ids) - len(continuation)
            )
            self._engine.add(str(number), ids, params)
        while self._engine.has_work:
            for output in self._engine.step():
                scores = output.prompt_scores
                self._require_finite(output.finish_reason)
                likeliest = all(score.rank == 1 for score in scores)
                results[int(output.request_id)] = (sum(score.logprob for score in scores), likeliest)
            self._progress.advance(len(results))
        self._progress.end()
        return [results[number] for number in range(len(pairs))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        answers: dict[str, _Answer] = {}
        for number, request in enumerate(requests):
            arguments: tuple[str, Mapping[str, Any]] = request.args  # pyright: ignore[reportAssignmentType]
            context, settings = arguments
            # A seed for each request, so that a sampled answer does not depend on the other tasks of the evaluation.
            params, stops = self._params(settings, derive_seed(0, "lm-eval", number))
            # The prompt is cut at its beginning, so that the longest answer fits into the context.
            ids = self.tok_encode(context)[-(self._engine.max_seq_len - params.max_tokens) :]
            answers[str(number)] = _Answer(self._tokenizer.stream(), stops)
            self._engine.add(str(number), ids, params)
        open_answers = dict(answers)
        self._progress.begin("answers", len(answers), "answers")
        while self._engine.has_work:
            for output in self._engine.step():
                answer = open_answers.get(output.request_id)
                if answer is None:
                    continue  # a token that was verified together with the one that completed the answer
                self._require_finite(output.finish_reason)
                answer.text += answer.stream.step(output.token_id)
                if output.finished or any(stop in answer.text for stop in answer.stops):
                    answer.text += answer.stream.finish()
                    self._engine.abort(output.request_id)
                    del open_answers[output.request_id]
            self._progress.advance(len(answers) - len(open_answers))
        self._progress.end()
        return [postprocess_generated_text(one.text, one.stops, None) for one in answers.values()]

    def _require_finite(self, finish_reason: str) -> None:
        if finish_reason == "error":
            raise ConfigError(f"{self._info.get('model')}: the model's output is not finite; its weights are unusable")

    def _params(self, settings: Mapping[str, Any], seed: int) -> tuple[SamplingParams, list[str]]:
        """Converts a task's generation settings to the engine's parameters and the texts at which an answer ends."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
        until, max_tokens = kwargs.pop("until", None) or [], kwargs.pop("max_gen_toks")
        stops = [until] if isinstance(until, str) else list(until)
        if not kwargs.pop("do_sample"):
            kwargs["temperature"] = 0.0
        if unknown := sorted(kwargs.keys() - set(SAMPLING)):
            raise ConfigError(
                f"generation_kwargs: unknown to the engine: {', '.join(unknown)}; known are until, max_gen_toks, "
                f"do_sample, {', '.join(SAMPLING)}"
            )
        if not 0 < max_tokens < self._engine.max_seq_len:
            raise ConfigError(
                f"generation_kwargs: max_gen_toks: {max_tokens} new tokens leave no room for a prompt in a context of "
                f"{self._engine.max_seq_len}; set it lower in the task"
            )
        ends = [token for token in map(self._tokenizer.id_of, stops) if token is not None]
        stop_ids = tuple(dict.fromkeys((*self._tokenizer.stop_ids, *ends)))
        return SamplingParams(max_tokens=max_tokens, seed=seed, stop_ids=stop_ids, **kwargs), [s for s in stops if s]


def sharing_order(contexts: Sequence[Sequence[int]]) -> list[int]:
    """Order in which prompts are queued so that those with a common beginning find it in the cache: by their ids, and
    of those with equal contexts one first, because a prompt is not shared before it is computed.
    """
    by_ids = sorted(range(len(contexts)), key=lambda number: list(contexts[number]))
    equal = [list(group) for _, group in groupby(by_ids, key=lambda number: list(contexts[number]))]
    order: list[int] = []
    for start in range(0, len(equal), AT_ONCE):
        bunch = equal[start : start + AT_ONCE]
        order += [group[0] for group in bunch] + [number for group in bunch for number in group[1:]]
    return order


AT_ONCE = 8
"""Contexts whose first prompts are queued one after the other."""
