"""Images in prompts: tokens of whole forward passes, in chunks, under load, with and without the prefix cache."""

from typing import Any

import numpy as np
import pytest
import torch

from infer.engine_runs import GREEDY, SAMPLED, VOCAB_SIZE, answer, drain, make_engine, make_model, tokens
from modelwright.infer.generate import generate
from modelwright.infer.sampler import SampleRequest, sample
from modelwright.infer.sequence import Pixels, SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.model.vision.config import VisionConfig
from modelwright.model.vision.llava import IMAGES, PIXELS, ImagePrefix, inserted_images
from modelwright.model.vision.vit import VisionTower
from refusals import config_error

IMAGE_TOKEN, SIDE, NUM_PATCHES = VOCAB_SIZE - 1, 20, 25


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = make_model()
    torch.manual_seed(0)
    shape = VisionConfig(image_size=SIDE, patch_size=4, num_layers=2, model_dim=24, num_heads=2, ffn_dim=32)
    prefix = ImagePrefix(VisionTower(shape), decoder.config.model_dim, feature_layer=-1, token_id=IMAGE_TOKEN)
    with torch.no_grad():
        for one in prefix.projector.parameters():
            one.copy_(torch.randn(one.shape) * 0.2)
    decoder.heads[IMAGES] = prefix
    return decoder.eval()


def picture(seed: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (3, SIDE, SIDE), dtype=np.uint8)


def text(count: int, seed: int) -> list[int]:
    return [token for token in tokens(2 * count + 9, seed) if token != IMAGE_TOKEN][:count]


def prompt(before: int, between: int, after: int, num_images: int = 1) -> list[int]:
    image = [IMAGE_TOKEN] * NUM_PATCHES
    middle = [token for _ in range(num_images - 1) for token in (*text(between, 2), *image)]
    return [*text(before, 1), *image, *middle, *text(after, 3)]


@torch.inference_mode()
def naive(model: Decoder, prompt_ids: list[int], images: list[Pixels], params: SamplingParams) -> list[int]:
    """A whole forward pass over everything so far for each token."""
    ids, found = list(prompt_ids), []
    pixels = torch.from_numpy(np.stack(images))[None] if images else None
    while len(found) < params.max_tokens:
        tokens_1T = torch.tensor([ids])
        is_new = torch.arange(len(ids))[None] >= len(prompt_ids)
        insert = inserted_images(model, tokens_1T.masked_fill(is_new, 0), {PIXELS: pixels} if images else {})
        hidden = model(tokens_1T, torch.arange(len(ids))[None], causal_attend(), insert=insert)
        (draw,) = sample(model.logits(hidden[:, -1]), [SampleRequest(params, len(found), {}, (), None)])
        ids.append(draw.token_id)
        found.append(draw.token_id)
    return found


CASES = {
    "image first": (0, 0, 9, 1),
    "image last": (7, 0, 0, 1),
    "across chunks": (13, 0, 20, 1),
    "two images": (3, 0, 5, 2),
    "three apart": (1, 11, 2, 3),
}


@pytest.mark.parametrize("chunk", [16, 24, 256])
def test_greedy_tokens_are_those_of_whole_forward_passes(model: Decoder, chunk: int) -> None:
    engine = make_engine(model, prefill_chunk_size=chunk)
    for name, shape in CASES.items():
        images = [picture(10 * number + len(name)) for number in range(shape[3])]
        engine.add(name, prompt(*shape), GREEDY, images=images)
        found = [output.token_id for output in drain(engine)[name]]
        assert found == naive(model, prompt(*shape), images, GREEDY), name


def test_answers_depend_on_the_image_and_on_no_neighbor(model: Decoder) -> None:
    requests: dict[str, tuple[list[int], list[Pixels], SamplingParams]] = {}
    for number in range(8):
        params = GREEDY if number % 2 else SAMPLED
        requests[str(number)] = (
            prompt(5, 3, 9, 1 + number % 2),
            [picture(number), picture(50)][: 1 + number % 2],
            params,
        )
    requests["text"] = (text(30, 4), [], SAMPLED)
    alone = {name: one_alone(model, *request) for name, request in requests.items()}
    assert alone["1"] != alone["3"]
    engine = make_engine(model, kv_cache_tokens=256, max_num_seqs=4, max_num_batched_tokens=32)
    for name, (ids, images, params) in requests.items():
        engine.add(name, ids, params, images=images)
    together = drain(engine)
    assert engine.stats().num_preemptions > 0
    assert {name: answer(outputs) for name, outputs in together.items()} == alone


def one_alone(model: Decoder, ids: list[int], images: list[Pixels], params: SamplingParams) -> list[tuple[Any, ...]]:
    engine = make_engine(model, enable_prefix_caching=False)
    engine.add("0", ids, params, images=images)
    return answer(drain(engine)["0"])


def test_the_prefix_cache_shares_an_image_with_itself_alone(model: Decoder) -> None:
    engine, ids = make_engine(model), prompt(20, 0, 30)
    cached = []
    for seed in (1, 2, 1, 2):
        engine.add("0", ids, GREEDY, images=[picture(seed)])
        outputs = drain(engine)["0"]
        assert answer(outputs) == one_alone(model, ids, [picture(seed)], GREEDY)
        cached.append(outputs[0].num_cached_tokens)
    # 75 tokens, the image from 20 to 44: without its image a prompt shares its first chunk of 16
    assert cached == [0, 16, 64, 64]


def test_neighbors_with_the_same_tokens_and_other_images_do_not_follow_each_other(model: Decoder) -> None:
    engine, ids = make_engine(model), prompt(2, 0, 12)
    pictures = [picture(seed) for seed in (1, 1, 2, 2)]
    for number, image in enumerate(pictures):
        engine.add(str(number), ids, GREEDY, images=[image])
    for name, outputs in drain(engine).items():
        assert answer(outputs) == one_alone(model, ids, [pictures[int(name)]], GREEDY)


def test_an_image_in_the_cache_is_not_encoded_again(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = make_engine(model), prompt(2, 0, 30)
    calls: list[int] = []
    prefix = model.heads[IMAGES]
    before = prefix.forward
    monkeypatch.setattr(prefix, "forward", lambda pixels: (calls.append(len(pixels)), before(pixels))[1])
    for _ in range(2):
        engine.add("0", ids, GREEDY, images=[picture(1)])
        drain(engine)
    assert calls == [1]


def test_completions_of_many_prompts_take_images(model: Decoder) -> None:
    ids, images = prompt(3, 0, 4), [[picture(1)], [picture(2)]]
    found = generate(model, [ids, ids], [GREEDY, GREEDY], images=images)
    assert [one.token_ids for one in found] == [naive(model, ids, own, GREEDY) for own in images]


def test_images_that_do_not_fit_the_prompt_are_refused(model: Decoder) -> None:
    engine, ids = make_engine(model), prompt(3, 0, 4)
    with config_error("images", match="for 1 images, and 0 were given"):
        engine.add("0", ids, GREEDY)
    with config_error("images", match="for 1 images, and 2 were given"):
        engine.add("0", ids, GREEDY, images=[picture(1), picture(2)])
    with config_error("prompt", match="25 in a row"):
        engine.add("0", [*ids[:10], 3, *ids[10:]], GREEDY, images=[picture(1)])
    with config_error("images", match="20 x 20 pixels"):
        engine.add("0", ids, GREEDY, images=[picture(1)[:, :10]])
    with config_error("images", match="reads text only"):
        make_engine(make_model()).add("0", ids, GREEDY, images=[picture(1)])
    assert not engine.has_work
