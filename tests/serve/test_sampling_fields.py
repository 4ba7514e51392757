"""Each field that decides tokens or what is said of them, over HTTP, against the engine's own definition of it."""

import json
import math
from typing import Any

import httpx
import pytest
import torch

from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_served_tokenizer
from serve.test_monitoring import samples

PROMPT = "the quick brown fox"


def complete(server: ServerThread, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "return_token_ids": True} | fields
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(server: ServerThread, **fields: Any) -> list[int]:
    return complete(server, **fields)["choices"][0]["token_ids"]


def events(server: ServerThread, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "stream": True} | fields
    lines = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


FIELDS = [
    {"temperature": 1.3, "seed": 3},
    {"temperature": 1.3, "seed": 3, "top_k": 5},
    {"temperature": 1.3, "seed": 3, "top_p": 0.4},
    {"temperature": 1.5, "seed": 3, "min_p": 0.2},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.8},
]


@pytest.mark.parametrize("fields", FIELDS, ids=[list(fields)[-1] for fields in FIELDS])
def test_fields_of_sampling_mean_what_the_engine_means(server: ServerThread, fields: dict[str, Any]):
    tokenizer = server.service.model.tokenizer
    params = SamplingParams(max_tokens=10, stop_ids=tokenizer.stop_ids, **fields)
    (wanted,) = generate(make_model(), [tokenizer.encode(PROMPT)], [params])
    assert ids_of(server, **fields) == wanted.token_ids


def test_each_field_of_sampling_has_an_effect(server: ServerThread):
    assert len({tuple(ids_of(server, **fields)) for fields in FIELDS}) == len(FIELDS)


def test_biases_and_stop_tokens(server: ServerThread):
    plain = ids_of(server)
    banned = ids_of(server, logit_bias={str(plain[0]): -100})
    assert plain[0] not in banned
    assert set(ids_of(server, logit_bias={"70": 100})) == {70}
    stopped = complete(server, stop_token_ids=[plain[4]])["choices"][0]
    assert stopped["token_ids"] == plain[: plain.index(plain[4]) + 1]
    assert stopped["finish_reason"] == "stop"
    later = complete(server, stop_token_ids=[plain[4]], min_tokens=8)["choices"][0]["token_ids"]
    assert plain[4] not in later[:8]
    assert len(later) >= 8


def test_stop_strings_wait_for_min_tokens(server: ServerThread):
    text = complete(server)["choices"][0]["text"]
    stop = text[2:4]
    cut = complete(server, stop=stop)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
    whole = complete(server, stop=stop, min_tokens=10)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, "length")
    assert "".join(one["choices"][0]["text"] for one in events(server, stop=stop, min_tokens=10)) == text


def test_several_answers_are_distinct_and_can_be_repeated(server: ServerThread):
    for route, more in (("completions", {}), ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})):
        body = {"model": "tiny", "max_tokens": 8, "temperature": 1.4, "seed": 11, "n": 4, "return_token_ids": True}
        body |= more or {"prompt": PROMPT}
        found = []
        for _ in range(2):
            reply = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60).json()
            found.append([choice["token_ids"] for choice in reply["choices"]])
        assert found[0] == found[1]
        assert len({tuple(ids) for ids in found[0]}) == 4
        other = httpx.post(f"{server.url}/v1/{route}", json=body | {"seed": 12}, timeout=60).json()
        assert [choice["token_ids"] for choice in other["choices"]] != found[0]


def test_log_probabilities_of_prompt_and_answer(server: ServerThread):
    reply = complete(server, logprobs=20, prompt_logprobs=3)
    (choice,) = reply["choices"]
    ids = server.service.model.tokenizer.encode(PROMPT)
    assert choice["prompt_token_ids"] == ids
    whole = ids + choice["token_ids"]
    with torch.no_grad():
        model = make_model()
        hidden = model(torch.tensor([whole]), torch.arange(len(whole))[None], causal_attend())
        log_probs = model.logits(hidden)[0].log_softmax(dim=-1)
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(ids)
    for place, entry in enumerate(choice["prompt_logprobs"][1:]):
        assert entry[str(ids[place + 1])]["logprob"] == pytest.approx(float(log_probs[place, ids[place + 1]]), abs=1e-4)
        best = sorted((one["rank"], int(token)) for token, one in entry.items())[:3]
        assert [token for _, token in best] == log_probs[place].topk(3).indices.tolist()
    for number, token in enumerate(choice["token_ids"]):
        place = len(ids) + number - 1
        found = choice["logprobs"]["token_logprobs"][number]
        assert found == pytest.approx(float(log_probs[place, token]), abs=1e-4)
        likeliest = choice["logprobs"]["top_logprobs"][number]
        assert max(likeliest.values()) == pytest.approx(float(log_probs[place].max()), abs=1e-4)
        assert sum(math.exp(value) for value in likeliest.values()) <= 1.0001
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": PROMPT, "logprobs": 21})
    assert refused.status_code == 400


def test_every_event_can_say_the_usage_so_far(server: ServerThread):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(server, stream_options=options, return_token_ids=True)
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert len(set(counts)) > 5
    tokens = [token for one in found for choice in one["choices"] for token in choice["token_ids"]]
    assert tokens == ids_of(server)
    assert {one["system_fingerprint"] for one in found} == {server.service.model.fingerprint}
    assert all("prompt_tokens_details" in one["usage"] for one in found)


def test_tokens_there_and_back(server: ServerThread):
    def post(path: str, **body: Any) -> dict[str, Any]:
        return httpx.post(f"{server.url}{path}", json=body, timeout=60).json()

    there = post("/tokenize", model="tiny", prompt=PROMPT, add_special_tokens=False, return_token_strs=True)
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert post("/detokenize", model="tiny", tokens=there["tokens"]) == {"prompt": PROMPT}
    turns = [{"role": "user", "content": PROMPT}]
    chat = post("/tokenize", model="tiny", messages=turns)
    assert chat["tokens"] == server.service.model.tokenizer.encode_chat(turns)
    for body in ({"prompt": "a", "x": 1}, {"model": "nobody", "prompt": "a"}, {"model": "tiny"}):
        assert "error" in post("/tokenize", **body)


def test_guessed_tokens_change_no_answer_and_are_counted(server: ServerThread):
    config = ServeConfig(port=0, engine=EngineConfig(num_speculative_tokens=4))
    text, changes = "the lazy dog jumps " * 6, ({"temperature": 0}, {"temperature": 0.3, "seed": 2, "n": 3})
    with ServerThread(
        engine_in_thread(make_model(), config), make_served_tokenizer(), config, model_name="tiny"
    ) as guessing:
        for change in changes:
            asked = {"prompt": text, "max_tokens": 60, "logprobs": 1} | change
            plain, guessed = (complete(one, **asked)["choices"] for one in (server, guessing))
            assert plain == guessed
            streamed = events(guessing, **asked)
            assert sum(len(one["choices"][0]["logprobs"]["tokens"]) for one in streamed) == 60 * len(plain)
        found = samples(guessing)
    assert 0 < found["modelwright_accepted_tokens_total"] < found["modelwright_draft_tokens_total"]
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        of_vllm = found[f'vllm:spec_decode_num_{name}_total{{model_name="tiny"}}']
        assert of_vllm == found[f"modelwright_{name}_total"] > 0


def test_with_ids_there_is_a_log_probability_for_each(server: ServerThread):
    """Also for a token of which only a part of a character has come, and for the stop token; by names that no two
    tokens share if the client asks for that.
    """
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 40, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = complete(server, **fields, stop_token_ids=list(range(60, 90)))["choices"][0]
    assert choice["finish_reason"] == "stop"
    logprobs, ids = choice["logprobs"], choice["token_ids"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in ids]
    assert len(ids) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) > 1
    assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    streamed = events(server, **fields, stop_token_ids=list(range(60, 90)), return_token_ids=True)
    parts = [event["choices"][0] for event in streamed]
    for part in parts:
        assert part["logprobs"]["tokens"] == [f"token_id:{token}" for token in part["token_ids"]]
    assert [token for part in parts for token in part["token_ids"]] == ids
