"""What the standard tools send: lm-eval, guidellm, vllm bench, LangChain, and the official client's rarer fields."""

import base64
import math
import struct

import httpx
import openai
import pytest
import torch
from openai import OpenAI

from modelwright.model.attention import causal_attend
from modelwright.serve.server import ServerThread

QUESTION = [{"role": "user", "content": "what does this do?"}]
DOCUMENTS = [
    ("the quick brown fox", " jumps over the lazy dog"),
    ("what does this do? it copies", " a tree"),
    ("größer — 日本語", " 🙂"),
    ("the", " the the the the"),
]


def post(server: ServerThread, path: str, body: dict) -> dict:
    response = httpx.post(f"{server.url}{path}", json={"model": "tiny"} | body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@torch.inference_mode()
def local_loglikelihood(server: ServerThread, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    model = server.service.worker.client.engine._runner._model
    ids = torch.tensor([context + continuation])
    logprobs_TV = model.logits(model(ids, torch.arange(ids.shape[1])[None], causal_attend()))[0].log_softmax(dim=-1)
    places = range(len(context) - 1, ids.shape[1] - 1)
    chosen = [float(logprobs_TV[place, token]) for place, token in zip(places, continuation, strict=True)]
    return sum(chosen), all(int(logprobs_TV[p].argmax()) == t for p, t in zip(places, continuation, strict=True))


def test_lm_eval_loglikelihoods_equal_local_ones(server: ServerThread):
    """The request and the parsing of lm-eval's `local-completions`, several documents at once."""
    tokenizer = server.service.model.tokenizer
    pairs = [(tokenizer.encode(context), tokenizer.encode(rest, with_begin=False)) for context, rest in DOCUMENTS]
    likeliest = post(server, "/v1/completions", {"prompt": pairs[0][0], "max_tokens": 3, "temperature": 0,
                                                 "return_token_ids": True})  # fmt: skip
    pairs.append((pairs[0][0], likeliest["choices"][0]["token_ids"]))
    body = {"prompt": [context + rest for context, rest in pairs], "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True}  # fmt: skip
    choices = sorted(post(server, "/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    greedy = []
    for choice, (context, rest) in zip(choices, pairs, strict=True):
        logprobs = choice["logprobs"]
        found = sum(logprobs["token_logprobs"][len(context) : -1])
        tokens, tops = logprobs["tokens"][len(context) : -1], logprobs["top_logprobs"][len(context) : -1]
        expected, is_greedy = local_loglikelihood(server, context, rest)
        assert found == pytest.approx(expected, abs=1e-3)
        greedy.append(all(token == max(top, key=top.get) for token, top in zip(tokens, tops, strict=True)))
        assert greedy[-1] or not is_greedy
    assert greedy[-1]


def test_an_echo_is_the_prompt_and_then_the_answer(server: ServerThread):
    body = {"prompt": "the quick brown", "max_tokens": 6, "temperature": 0, "seed": 1}
    plain = post(server, "/v1/completions", body | {"logprobs": 2})["choices"][0]
    echoed = post(server, "/v1/completions", body | {"logprobs": 2, "echo": True})["choices"][0]
    assert echoed["text"] == "the quick brown" + plain["text"]
    logprobs, own = echoed["logprobs"], plain["logprobs"]
    assert logprobs["tokens"][-6:] == own["tokens"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][-6:] == pytest.approx(own["token_logprobs"], abs=1e-5)
    assert logprobs["text_offset"][-6:] == [offset + len("the quick brown") for offset in own["text_offset"]]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert post(server, "/v1/completions", body | {"echo": True})["choices"][0]["text"] == echoed["text"]
    scored = post(server, "/v1/completions", body | {"echo": True, "max_tokens": 0, "logprobs": 0})
    assert scored["choices"][0]["text"] == "the quick brown"
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-6]
    assert (scored["choices"][0]["finish_reason"], scored["usage"]["completion_tokens"]) == ("length", 0)


def test_a_streamed_echo_joins_to_the_same(client: OpenAI):
    asked = {"model": "tiny", "prompt": ["the quick", "lazy"], "max_tokens": 5, "temperature": 0, "echo": True,
             "logprobs": 1}  # fmt: skip
    whole = client.completions.create(**asked)
    texts, offsets = ["", ""], [[], []]
    for event in client.completions.create(**asked, stream=True):
        choice = event.choices[0]
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]


def test_prompt_logprobs_have_ids_ranks_and_texts(server: ServerThread):
    ids = server.service.model.tokenizer.encode("the quick brown")
    completion = post(server, "/v1/completions", {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2})
    chat = post(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "prompt_logprobs": 0})
    for entries, prompt in (
        (completion["choices"][0]["prompt_logprobs"], ids),
        (chat["prompt_logprobs"], server.service.model.tokenizer.encode_chat(QUESTION)),
    ):
        assert entries[0] is None
        assert len(entries) == len(prompt)
        for entry, token in zip(entries[1:], prompt[1:], strict=True):
            assert entry[str(token)]["rank"] >= 1
            assert entry[str(token)]["logprob"] < 0
            assert len(entry) <= 3


def test_guidellm_and_vllm_bench_streams_count_every_token(server: ServerThread):
    guidellm = {"prompt": "the quick", "stream": True, "max_tokens": 12, "stop": None, "ignore_eos": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    vllm_bench = {"prompt": "the quick", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 12,
                  "logprobs": None, "stream_options": {"include_usage": True}, "stream": True,
                  "ignore_eos": True}  # fmt: skip
    for body in (guidellm, vllm_bench):
        response = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny"} | body, timeout=60)
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        usages = [httpx.Response(200, text=event).json()["usage"] for event in events[:-1]]
        assert usages[-1]["completion_tokens"] == 12
        if body is guidellm:
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts)
            assert len(set(counts)) > 4
        else:
            assert usages[:-1] == [None] * (len(usages) - 1)


def test_stop_tokens_end_an_answer_and_ignore_eos_lets_it_go_on(server: ServerThread):
    body = {"prompt": "the quick", "temperature": 0, "max_tokens": 10, "return_token_ids": True}
    free = post(server, "/v1/completions", body)["choices"][0]["token_ids"]
    stopped = post(server, "/v1/completions", body | {"stop_token_ids": [free[4]]})["choices"][0]
    assert stopped["token_ids"] == free[: free.index(free[4]) + 1]
    assert stopped["finish_reason"] == "stop"
    later = post(server, "/v1/completions", body | {"stop_token_ids": [free[0]], "min_tokens": 3})["choices"][0]
    assert free[0] not in later["token_ids"][:3]
    assert len(later["token_ids"]) >= 3
    end = server.service.model.tokenizer.stop_ids[0]
    forced = body | {"logit_bias": {str(end): 100}}
    assert post(server, "/v1/completions", forced)["choices"][0]["token_ids"] == [end]
    ignored = post(server, "/v1/completions", forced | {"ignore_eos": True})["choices"][0]
    assert (ignored["token_ids"], ignored["text"], ignored["finish_reason"]) == ([end] * 10, "", "length")


def test_logit_bias_and_penalties_reach_the_sampler(client: OpenAI):
    def text(**options) -> str:
        options = {"model": "tiny", "prompt": "the quick", "temperature": 0, "max_tokens": 12} | options
        return client.completions.create(**options).choices[0].text

    plain = text()
    assert text(logit_bias={"70": 100}) != plain
    assert len(set(text(extra_body={"repetition_penalty": 8.0}))) >= len(set(plain))
    assert text(extra_body={"top_k": 1}, temperature=1.5) == plain
    assert text(extra_body={"min_p": 1.0}, temperature=1.5) == plain
    assert text(extra_body={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}) == plain


def test_token_ids_of_chats_whole_and_streamed(server: ServerThread):
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    whole = post(server, "/v1/chat/completions", body)
    assert whole["prompt_token_ids"] == server.service.model.tokenizer.encode_chat(QUESTION)
    assert (
        server.service.model.tokenizer.decode(whole["choices"][0]["token_ids"])
        == whole["choices"][0]["message"]["content"]
    )
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", "stream": True} | body)
    events = [httpx.Response(200, text=line[6:]).json() for line in response.text.split("\n\n")[:-2]]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]


def test_embeddings_as_numbers_and_as_the_client_decodes_them(client: OpenAI, server: ServerThread):
    answer = client.embeddings.create(model="tiny", input=["the quick", "lazy dog", "the quick"])
    vectors = [one.embedding for one in answer.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert math.hypot(*vectors[0]) == pytest.approx(1, abs=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    numbers = post(server, "/v1/embeddings", {"input": server.service.model.tokenizer.encode("the quick")})
    assert numbers["data"][0]["embedding"] == pytest.approx(vectors[0], abs=1e-6)
    packed = post(server, "/v1/embeddings", {"input": "the quick", "encoding_format": "base64"})
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(vectors[0], abs=1e-6)
    for wrong in ([], [[]], [[336]], "dog " * 600):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="tiny", input=wrong)


def test_tokens_and_back(server: ServerThread):
    tokens = post(server, "/tokenize", {"prompt": "the quick", "return_token_strs": True})
    assert tokens["tokens"] == server.service.model.tokenizer.encode("the quick")
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
    assert "".join(tokens["token_strs"][1:]) == "the quick"
    bare = post(server, "/tokenize", {"prompt": "the quick", "add_special_tokens": False})
    assert bare["tokens"] == tokens["tokens"][1:]
    for flags, number in (({}, len(tokens["tokens"])), ({"add_special_tokens": False}, len(bare["tokens"]))):
        answer = post(server, "/v1/completions", {"model": "tiny", "prompt": "the quick", "max_tokens": 1, **flags})
        assert answer["usage"]["prompt_tokens"] == number
    chat = post(server, "/tokenize", {"messages": QUESTION})
    assert chat["tokens"] == server.service.model.tokenizer.encode_chat(QUESTION)
    assert post(server, "/detokenize", {"tokens": bare["tokens"]}) == {"prompt": "the quick"}
    for path, wrong in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": QUESTION}),
                        ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": "a"})):  # fmt: skip
        assert httpx.post(f"{server.url}{path}", json=wrong).status_code == 400


def test_answers_name_the_weights_that_made_them(client: OpenAI, server: ServerThread, slow_server):
    fingerprint = client.completions.create(model="tiny", prompt="a", max_tokens=1).system_fingerprint
    assert fingerprint == server.service.model.fingerprint
    assert fingerprint is not None
    assert fingerprint.startswith("fp_")
    other = slow_server(model_aliases=("gpt-small", "another"))
    assert other.service.model.fingerprint == fingerprint, "the same weights"
    with OpenAI(base_url=f"{other.url}/v1", api_key="x", max_retries=0) as second:
        assert [model.id for model in second.models.list()] == ["tiny", "gpt-small", "another"]
        answer = second.completions.create(model="gpt-small", prompt="a", max_tokens=1)
        assert answer.model == "gpt-small"
        with pytest.raises(openai.NotFoundError, match="'tiny' or 'gpt-small' or 'another'"):
            second.completions.create(model="third", prompt="a")
