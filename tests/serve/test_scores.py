"""Embeddings, scores and reranking over HTTP, and what a model cannot do."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from openai import OpenAI

from modelwright.infer.engine import EngineConfig
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_sequence_classifier, save_sequence_classifier
from modelwright.objectives.preference import ModelRewardConfig
from modelwright.reward.reward import Sample
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_tokenizer

QUERY = "what does this do?"
DOCUMENTS = ["it copies a tree of files", "the lazy dog", "the quick brown fox jumps over the lazy dog " * 3, "größer"]


def write_judge(path: Path) -> Path:
    """A reward model as the stage `reward` saves it."""
    model = make_model(seed=5)
    model.heads["score"] = torch.nn.Linear(model.config.model_dim, 1, bias=False)
    model.heads["score"].weight.data.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.3)
    tokenizer = make_tokenizer()
    save_sequence_classifier(model, path, head="score", label="reward", eos_id=tokenizer.eos_id or 0, pad_id=9)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("models") / "judge")


@pytest.fixture(scope="module")
def judge(folder: Path) -> Iterator[ServerThread]:
    config = ServeConfig(port=0, engine=EngineConfig(prefill_chunk_size=16))
    source = ModelSource(name="judge", folder=folder)
    with ServerThread(*load_engines(source, config), config, model_name="judge", source=source) as running:
        yield running


def post(server: ServerThread, path: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def rewards(folder: Path) -> list[float]:
    """The scores that the stages of alignment see."""
    samples = [Sample(prompt=[{"role": "user", "content": QUERY}], answer=text, num_tokens=9) for text in DOCUMENTS]
    return [float(score.value) for score in ModelRewardConfig(path=str(folder)).build("judge").score(samples)]


def test_scores_are_those_of_the_reward_model(judge: ServerThread, folder: Path):
    wanted = rewards(folder)
    assert max(wanted) - min(wanted) > 0.1
    reply = post(judge, "/v1/score", model="judge", text_1=QUERY, text_2=DOCUMENTS, use_activation=False).json()
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(wanted, abs=1e-4)
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2, 3]
    assert (reply["object"], reply["model"], reply["id"][:6]) == ("list", "judge", "score-")
    num_tokens = sum(len(judge.service.model.tokenizer.encode_answer(QUERY, text)) for text in DOCUMENTS)
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    paired = post(judge, "/v1/score", model="judge", text_1=[QUERY] * 4, text_2=DOCUMENTS).json()
    sigmoids = torch.tensor(wanted).sigmoid().tolist()
    assert [entry["score"] for entry in paired["data"]] == pytest.approx(sigmoids, abs=1e-4)
    one = post(judge, "/v1/score", model="judge", text_1=QUERY, text_2=DOCUMENTS[1]).json()
    assert one["data"] == [paired["data"][1] | {"index": 0}]


def test_reranking_orders_by_score(judge: ServerThread, folder: Path):
    wanted = torch.tensor(rewards(folder)).sigmoid()
    order = wanted.argsort(descending=True).tolist()
    reply = post(judge, "/v1/rerank", model="judge", query=QUERY, documents=DOCUMENTS).json()
    assert [result["index"] for result in reply["results"]] == order
    assert [result["document"]["text"] for result in reply["results"]] == [DOCUMENTS[index] for index in order]
    found = [result["relevance_score"] for result in reply["results"]]
    assert found == pytest.approx(wanted[order].tolist(), abs=1e-4)
    best = post(judge, "/v1/rerank", model="judge", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [result["index"] for result in best.json()["results"]] == order[:2]
    assert all("document" not in result for result in best.json()["results"])


BAD = [
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, None, "text_1 has 2 texts and text_2 has 3"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "must be a text or a list of texts"),
    ("/v1/score", {"text_1": "a", "text_2": ["a"] * 2049}, "text_2", "at most 2048"),
    ("/v1/score", {"text_1": "a", "text_2": "dog " * 600}, "text_2", "context is 512 tokens"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "activation": True}, "activation", "Unknown field"),
    ("/v1/rerank", {"query": 5, "documents": ["a"]}, "query", "must be a string"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "greater than or equal to 0"),
    ("/v1/rerank", {"query": "a"}, "documents", "Missing required field"),
    ("/v1/completions", {"prompt": "a"}, "model", "scores texts and generates none"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "ask /v1/score"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD, ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD)])
def test_refusals(judge: ServerThread, path, body, param, words):
    reply = post(judge, path, model="judge", **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_a_language_model_cannot_score(server: ServerThread):
    for path, body in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = post(server, path, model="tiny", **body).json()["error"]
        assert (error["param"], error["code"]) == ("model", "unsupported_task")
        assert "'tiny' generates text" in error["message"]


def pooled(model: Decoder, ids: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        hidden_TD = model(torch.tensor([ids]), torch.arange(len(ids))[None], causal_attend())[0]
    return hidden_TD[-1] if pooling == "last" else hidden_TD.mean(dim=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(client: OpenAI, server: ServerThread, pooling: str):
    tokenizer, model = server.service.model.tokenizer, make_model()
    inputs = [tokenizer.encode(text) for text in DOCUMENTS]
    extra = {"pooling": pooling}
    reply = client.embeddings.create(model="tiny", input=DOCUMENTS, extra_body=extra)
    for number, ids in enumerate(inputs):
        wanted = torch.nn.functional.normalize(pooled(model, ids, pooling), dim=0)
        assert reply.data[number].embedding == pytest.approx(wanted.tolist(), abs=1e-5)
        assert reply.data[number].index == number
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, inputs))
    by_ids = client.embeddings.create(model="tiny", input=inputs, encoding_format="float", extra_body=extra)
    assert [one.embedding for one in by_ids.data] == [one.embedding for one in reply.data]
    raw = post(server, "/v1/embeddings", model="tiny", input=DOCUMENTS[0], encoding_format="base64", **extra).json()
    unpacked = struct.unpack("<48f", base64.b64decode(raw["data"][0]["embedding"]))
    assert list(unpacked) == reply.data[0].embedding
    short = client.embeddings.create(model="tiny", input=DOCUMENTS[0], dimensions=8, extra_body=extra).data[0].embedding
    first = torch.nn.functional.normalize(torch.tensor(reply.data[0].embedding[:8]), dim=0)
    assert short == pytest.approx(first.tolist(), abs=1e-6)


def test_embeddings_of_many_inputs_have_a_limit_of_their_own(client: OpenAI, server: ServerThread):
    """Sixteen at a time, so that they do not fill the queue."""
    inputs = [DOCUMENTS[number % len(DOCUMENTS)] for number in range(100)]
    vectors = [one.embedding for one in client.embeddings.create(model="tiny", input=inputs).data]
    few = [one.embedding for one in client.embeddings.create(model="tiny", input=DOCUMENTS).data]
    assert len(vectors) == 100
    for number, vector in enumerate(vectors):
        assert vector == pytest.approx(few[number % len(DOCUMENTS)], abs=1e-5)
    assert len(client.embeddings.create(model="tiny", input=["a"] * 2048).data) == 2048
    refused = post(server, "/v1/embeddings", model="tiny", input=["a"] * 2049)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "'input' has 2049 entries; a request may have at most 2048" in refused.json()["error"]["message"]


def test_2048_pairs_are_scored(judge: ServerThread):
    for first in ("a", ["a"] * 2048):
        reply = post(judge, "/v1/score", model="judge", text_1=first, text_2=["b"] * 2048)
        assert reply.status_code == 200, reply.text
        assert [one["index"] for one in reply.json()["data"]] == list(range(2048))
    refused = post(judge, "/v1/score", model="judge", text_1="a", text_2=["b"] * 2049)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_2")


def test_embeddings_that_cannot_be_made_are_refused(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="has 48 dimensions, fewer than 49"):
        client.embeddings.create(model="tiny", input="a", dimensions=49)
    with pytest.raises(openai.BadRequestError, match="'dimensions': must be greater than or equal to 1"):
        client.embeddings.create(model="tiny", input="a", dimensions=0)
    with pytest.raises(openai.BadRequestError, match="must be 'last' or 'mean'"):
        client.embeddings.create(model="tiny", input="a", extra_body={"pooling": "max"})


def test_a_reward_model_embeds_with_the_hidden_states_it_scores(judge: ServerThread, folder: Path):
    model = load_sequence_classifier(folder, head="score")
    reply = post(judge, "/v1/embeddings", model="judge", input="the lazy dog").json()
    wanted = pooled(model, judge.service.model.tokenizer.encode("the lazy dog"), "last")
    assert reply["data"][0]["embedding"] == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)
