"""Images in chat requests over HTTP: answers are those of the engine, and whatever is wrong is named."""

import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from modelwright.data.images.decode import square_pixels
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.api import chat
from modelwright.serve.config import PromptImagesConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource
from modelwright.serve.server import ServerThread
from serve.image_model import (
    IMAGE_TOKEN,
    NUM_PATCHES,
    SIDE,
    data_url,
    image_model,
    image_tokenizer,
    png,
    write_image_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[ServerThread]:
    config = ServeConfig(port=0, images=PromptImagesConfig(max_count=2, max_bytes=200_000))
    source = ModelSource(name="eyes", folder=folder)
    with ServerThread(*load_engines(source, config), config, model_name="eyes", source=source) as running:
        yield running


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(server: ServerThread, content: Any, **more: Any) -> httpx.Response:
    body = {"model": "eyes", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more}, timeout=60)


def expected_ids(text: str, files: list[bytes]) -> list[int]:
    """The engine's own tokens for a turn that begins with these images."""
    image_text = IMAGE_TOKEN * NUM_PATCHES
    rendered = f"<|bos|><|user|>{''.join(image_text + chr(10) for _ in files)}{text}<|end|><|assistant|>"
    tokenizer = image_tokenizer()
    ids = tokenizer.chat.encode_rendered(rendered)
    model = image_model()
    engine = Engine(model, EngineConfig(enable_prefix_caching=False), head=model.logits)
    params = SamplingParams(max_tokens=8, temperature=0.0, stop_ids=tokenizer.stop_ids)
    engine.add("0", ids, params, images=[square_pixels(one, size=SIDE, fit="crop") for one in files])
    found: list[int] = []
    while engine.has_work:
        found += [output.token_id for output in engine.step()]
    return found


def test_an_answer_is_the_engines_own_for_the_same_pixels(reader: ServerThread) -> None:
    answers = []
    for files in ([png(1)], [png(2)], [png(1), png(2)]):
        parts = [*(image_part(data_url(one)) for one in files), {"type": "text", "text": "what is this?"}]
        reply = ask(reader, parts, return_token_ids=True)
        assert reply.status_code == 200, reply.text
        body = reply.json()
        found = body["choices"][0]["token_ids"]
        assert found == expected_ids("what is this?", files)
        assert body["usage"]["prompt_tokens"] > NUM_PATCHES * len(files)
        answers.append(found)
    assert answers[0] != answers[1]


def test_the_official_client_streams_an_answer_and_the_model_says_what_it_reads(reader: ServerThread) -> None:
    with OpenAI(base_url=f"{reader.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        content: Any = [{"type": "text", "text": "look:"}, image_part(data_url(png(3)))]
        stream = client.chat.completions.create(
            model="eyes", messages=[{"role": "user", "content": content}], stream=True, max_tokens=5, temperature=0
        )
        text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
        assert text
        content = [image_part("https://example.com/cat.png")]
        with pytest.raises(BadRequestError, match="fetches nothing"):
            client.chat.completions.create(model="eyes", messages=[{"role": "user", "content": content}])
    models = httpx.get(f"{reader.url}/v1/models").json()["data"]
    assert models[0]["input_modalities"] == ["text", "image"]
    count = httpx.post(f"{reader.url}/tokenize", json={"messages": [{"role": "user", "content": content}]})
    assert count.status_code == 400
    counted = [image_part(data_url(png(3))), {"type": "text", "text": "x"}]
    body = httpx.post(f"{reader.url}/tokenize", json={"messages": [{"role": "user", "content": counted}]}).json()
    assert body["tokens"].count(image_tokenizer().id_of(IMAGE_TOKEN)) == NUM_PATCHES


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that asks for many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, format="JPEG")
    return file.getvalue()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
FAULTS = {
    "bomb": (data_url(bomb(5_000)), "5000 x 5000 pixels, limit 16,000,000"),
    "large bomb": (data_url(bomb(50_000)), "too many pixels"),
    "truncated": (data_url(png(1)[:-40]), "cannot be decoded"),
    "truncated JPEG": (data_url(jpeg()[:200], "image/jpeg"), "cannot be decoded"),
    "vector": (data_url(SVG, "image/svg+xml"), "SVG"),
    "no image": (data_url(b"hello, this is text"), "is of no known image format"),
    "empty": ("data:image/png;base64,", "is empty"),
    "no base64": ("data:image/png;base64,???", "not valid base64"),
    "beyond ASCII": ("data:image/png;base64,\u00e9AAA", "not valid base64"),
    "too large": (data_url(b"\x89PNG" + bytes(200_000)), "more than 200,000 bytes"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_an_image_that_cannot_be_used_is_a_400_that_names_the_part(name: str, reader: ServerThread) -> None:
    url, reason = FAULTS[name]
    reply = ask(reader, [{"type": "text", "text": "a"}, image_part(url)])
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "messages"
    assert error["code"] == "invalid_image"
    assert "'messages.0.content.1'" in error["message"]
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([image_part("http://example.com/a.png")], "'messages.0.content': part 0: this server fetches nothing"),
        ([image_part("file:///etc/passwd")], "this server fetches nothing"),
        ([image_part("data:image/png,abc")], "in base64"),
        ([{"type": "image_url", "image_url": "data:image/png;base64,AA"}], "an image must be"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "x": 1}}], "an image must be"),
        ([image_part(data_url(png(1)))] * 3, "at most 2 images"),
        ([{"type": "input_audio", "input_audio": {}}], "parts of type 'input_audio'"),
    ],
)
def test_a_part_that_is_no_image_is_refused_by_name(content: Any, reason: str, reader: ServerThread) -> None:
    reply = ask(reader, content)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]


def test_images_belong_into_turns_of_the_user(reader: ServerThread) -> None:
    messages = [{"role": "system", "content": [image_part(data_url(png(1)))]}, {"role": "user", "content": "x"}]
    reply = ask(reader, "", messages=messages)
    assert reply.status_code == 400
    assert "turns of the user" in reply.json()["error"]["message"]


def test_the_placeholder_in_a_clients_own_text_is_text(reader: ServerThread) -> None:
    for text in (IMAGE_TOKEN * NUM_PATCHES, "\ufdd3"):
        reply = ask(reader, f"{text} hello", return_token_ids=True)
        assert reply.status_code == 200, reply.text
        assert image_tokenizer().id_of(IMAGE_TOKEN) not in reply.json()["prompt_token_ids"]
    ids = [image_tokenizer().id_of(IMAGE_TOKEN)] * NUM_PATCHES
    reply = httpx.post(
        f"{reader.url}/v1/completions", json={"model": "eyes", "prompt": ids, "max_tokens": 2}, timeout=60
    )
    assert reply.status_code == 400
    assert "0 were given" in reply.json()["error"]["message"]


def test_a_body_beyond_what_images_take_is_refused(reader: ServerThread) -> None:
    reply = ask(reader, [image_part("data:image/png;base64," + "A" * 700_000)])
    assert reply.status_code == 413


def test_a_model_that_reads_text_only_refuses_images_by_name(server: ServerThread) -> None:
    content = [{"type": "text", "text": "a"}, image_part(data_url(png(1)))]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_image", "messages")
    assert "'messages.0.content.1': this model reads no images" in error["message"]
    large = [image_part("data:image/png;base64," + "A" * 30_000)]
    body = {"model": "tiny", "messages": [{"role": "user", "content": large}]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 413
    assert "this model reads no images" in reply.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_images_are_decoded_beside_the_event_loop(reader: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is decoded, however small its file, the server answers others."""
    is_decoding, may_end = threading.Event(), threading.Event()
    decode = chat.decode

    def slow(*arguments: Any, **named: Any) -> Any:
        is_decoding.set()
        assert may_end.wait(60)
        return decode(*arguments, **named)

    monkeypatch.setattr(chat, "decode", slow)
    found: list[int] = []
    asking = threading.Thread(
        target=lambda: found.append(ask(reader, [image_part(data_url(png(1, width=4, height=4)))]).status_code)
    )
    asking.start()
    assert is_decoding.wait(60)
    started = time.monotonic()
    assert httpx.get(f"{reader.url}/health", timeout=30).status_code == 200
    assert time.monotonic() - started < 30
    may_end.set()
    asking.join(60)
    assert found == [200]


def test_an_engine_process_gives_the_same_answer(folder: Path, reader: ServerThread) -> None:
    config = ServeConfig(port=0, engines=2, engine=EngineConfig(kv_cache_tokens=1024))
    source = ModelSource(name="eyes", folder=folder)
    content = [image_part(data_url(png(4))), {"type": "text", "text": "and this?"}]
    with ServerThread(*load_engines(source, config), config, model_name="eyes", source=source) as pooled:
        found = ask(pooled, content, return_token_ids=True).json()["choices"][0]["token_ids"]
    assert found == ask(reader, content, return_token_ids=True).json()["choices"][0]["token_ids"]
