"""Jobs as requests to vLLM's /v1/completions, its replies as outputs of an engine (token ids in both directions), and
its /metrics as figures of the cache (vllm.v1.metrics.loggers).

The fields follow vllm/entrypoints/openai/completion/protocol.py and serving.py, 0.14 to 0.29.
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from modelwright.infer.engine import StepOutput
from modelwright.infer.sequence import ScoredToken
from modelwright.serve.api.answers import ID_PREFIX
from modelwright.serve.engines.client import Job
from modelwright.serve.engines.grammars import JSON_FORM
from modelwright.serve.errors import ApiError

SERVED_NAME = "model"
"""Name of the model in vLLM."""
MOST_SEED = 2**63
SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
GRAMMAR_KINDS = {"json": "json", "regex": "regex", "lark": "grammar"}
"""Fields of `structured_outputs` by the kind of a `GrammarSource`. Its guidance back-end is llguidance, as ours."""
FINISHED = ("stop", "length")


def body_of(job: Job, context: int) -> dict[str, Any]:
    """Returns the body of a job's request. A job with log-probabilities of its prompt is answered in one piece,
    because vLLM's streams lack them. Raises `ApiError` 400 if the prompt fills the context.
    """
    message = job.to_message()
    params, room = message["params"], context - len(job.prompt_ids)
    if room < 1:
        text = f"The prompt leaves no room in a context of {context} tokens."
        raise ApiError(400, text, param="prompt", code="context_length_exceeded")
    is_whole = params["num_prompt_logprobs"] is not None
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": list(job.prompt_ids),
        "max_tokens": min(params["max_tokens"], room),
        "min_tokens": min(params["min_tokens"], room),
        "seed": params["seed"] % MOST_SEED,
        "stop_token_ids": list(params["stop_ids"]),
        "ignore_eos": message["grammar"] is None,  # the model's own end token counts only if it is one of these
        "return_token_ids": True,
        **{name: params[name] for name in SAME_NAMES},
    }
    if is_whole:
        body["prompt_logprobs"] = params["num_prompt_logprobs"]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if message["wants_logprobs"]:
        body |= {"logprobs": params["num_logprobs"], "return_tokens_as_token_ids": True}
    if params["logit_bias"]:
        body["logit_bias"] = {str(token): value for token, value in params["logit_bias"]}
    if message["cache_salt"]:
        body["cache_salt"] = message["cache_salt"]
    if message["grammar"]:
        kind, grammar = message["grammar"]["kind"], message["grammar"]["text"]
        if kind == "json":
            schema = json.loads(grammar)
            schema = {} if schema is True else schema
            # JSON in the form in which our own engine writes it.
            grammar = {**schema, "x-guidance": JSON_FORM} if isinstance(schema, dict) else schema
        body["structured_outputs"] = {GRAMMAR_KINDS[kind]: grammar}
    return body


class AnswerReader:
    """Converts the replies to one request into outputs: the events of a stream, or one whole body."""

    def __init__(self, request_id: str, body: Mapping[str, Any]) -> None:
        self._request_id = request_id
        self._num_left = body["max_tokens"]
        self._num_logprobs = body.get("logprobs")
        self._prompt_ids = body["prompt"]
        self._held: deque[StepOutput] = deque()
        self._reason = ""
        self._num_cached = 0

    def read(self, reply: Mapping[str, Any]) -> list[StepOutput]:
        """Returns the new tokens of a reply. The last token of an answer is held back until `end`: only then are its
        reason and the number of cached tokens known. Raises `ApiError` for a reply that is an error.
        """
        if "error" in reply:
            raise refusal(reply, 0)
        usage = reply.get("usage") or {}
        self._num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in reply["choices"]:
            ids: Sequence[int] = choice.get("token_ids") or []
            self._num_left -= len(ids)
            scored = self._logprobs(choice.get("logprobs"), len(ids))
            outputs = [
                StepOutput(self._request_id, token, logprob, others, "")
                for token, (logprob, others) in zip(ids, scored, strict=True)
            ]
            if outputs and choice.get("prompt_logprobs"):
                outputs[0] = replace(outputs[0], prompt_scores=self._prompt_scores(choice["prompt_logprobs"]))
            self._held.extend(outputs)
            self._reason = choice.get("finish_reason") or self._reason
        num_ready = len(self._held) - bool(self._reason or self._num_left <= 0)
        return [self._held.popleft() for _ in range(num_ready)]

    def end(self) -> StepOutput:
        """Returns the last token. Raises `ApiError` if the replies have ended before the answer."""
        if self._reason not in FINISHED or len(self._held) != 1:
            what = f"with the reason {self._reason!r}" if self._reason else "in the middle of an answer"
            raise ApiError(500, f"vLLM has ended {what}; see the server's log.", code="engine_failed")
        return replace(self._held.popleft(), finish_reason=self._reason, num_cached_tokens=self._num_cached)

    def _logprobs(self, reply: Mapping[str, Any] | None, num_tokens: int) -> list[tuple[float, Any]]:
        """Returns the log-probability and the alternatives of each token, the likeliest first."""
        if self._num_logprobs is None or not num_tokens:
            return [(0.0, ())] * num_tokens
        if reply is None or len(reply["token_logprobs"]) != num_tokens:
            raise ApiError(500, "vLLM has left out log-probabilities of its tokens.", code="engine_failed")
        tops = reply.get("top_logprobs") or [None] * num_tokens
        scored: list[tuple[float, Any]] = []
        for logprob, top in zip(reply["token_logprobs"], tops, strict=True):
            # The token itself is among them even if others are likelier.
            pairs = [(int(name.removeprefix(ID_PREFIX)), value) for name, value in (top or {}).items()]
            scored.append((logprob, tuple(sorted(pairs, key=lambda pair: -pair[1])[: self._num_logprobs])))
        return scored

    def _prompt_scores(self, entries: Sequence[Mapping[str, Any] | None]) -> tuple[ScoredToken, ...]:
        """Returns the scores of the prompt's tokens from the second one on."""
        scores = []
        for token, entry in zip(self._prompt_ids[1:], entries[1:], strict=True):
            assert entry is not None, "only the first token follows nothing"
            others = sorted((one["rank"], int(other), one["logprob"]) for other, one in entry.items())
            own = entry[str(token)]
            alternatives = tuple((other, logprob) for _, other, logprob in others)
            scores.append(ScoredToken(token, own["logprob"], own["rank"], alternatives))
        return tuple(scores)


def refusal(reply: Mapping[str, Any], status: int) -> ApiError:
    """Returns the error that vLLM sends in place of an answer. status: HTTP status, 0 for an event of a stream."""
    error = reply.get("error") or {}
    status = status or (error["code"] if isinstance(error.get("code"), int) else 500)
    message = str(error.get("message") or reply.get("message") or "no reason given")
    if status in (400, 422):
        return ApiError(400, f"vLLM refuses the request: {message}", code="invalid_value")
    return ApiError(500, f"vLLM has failed at the request: {message}", code="engine_failed")


BLOCKS, USAGE = "vllm:cache_config_info", "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, kw_only=True)
class VllmFigures:
    """Figures of all engines of a vLLM together, since its start. num_blocks: blocks of the cache; used_share: share of
    blocks in use, the mean over the engines.
    """

    num_blocks: int = 0
    used_share: float = 0.0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


def read_figures(text: str) -> VllmFigures:
    """Parses the text of /metrics; a missing metric is 0. Raises `ValueError` for another format."""
    names = (BLOCKS, USAGE, PREEMPTIONS, QUERIES, HITS)
    # Parsing all metrics each second would delay streams.
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(names)]
    sums, counts, num_blocks = defaultdict[str, float](float), Counter[str](), 0
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            sums[sample.name] += sample.value
            counts[sample.name] += 1
            if sample.name == BLOCKS:
                blocks = sample.labels.get("num_gpu_blocks", "")
                num_blocks += int(blocks) if blocks.isdigit() else 0
    return VllmFigures(
        num_blocks=num_blocks,
        used_share=sums[USAGE] / max(1, counts[USAGE]),
        num_preemptions=round(sums[PREEMPTIONS]),
        num_prefix_queries=round(sums[QUERIES]),
        num_prefix_hits=round(sums[HITS]),
    )
