"""Methods with a model: back translation over HTTP and by Marian-type models, masked replacement, span infilling."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random

import pytest
import tokenizers
import torch
import transformers
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, Whitespace

import augment_texts
from modelwright.core.errors import ConfigError, DataError
from modelwright.data.augment.back_translation import BackTranslationConfig, back_translation, problem_of
from modelwright.data.augment.masked_replacement import MaskedModel, MaskedReplacementConfig, masked_replacement
from modelwright.data.augment.span_infilling import SpanInfillingConfig, first_words, span_infilling
from modelwright.data.augment.translators import EndpointConfig, MarianTranslator
from modelwright.data.augment.word_spans import find_words
from modelwright.data.document import Document

SENTENCE = "The committee rejected the proposal after a long debate."
PARAPHRASE = "After a long debate, the committee turned the proposal down."


def document(text: str, name: str = "a") -> Document:
    return Document(id=name, text=text, kind="prose", split="train", source="test")


@dataclass
class Endpoint:
    """A chat API that translates by a table, after a delay; it remembers the requests."""

    answers: dict[str, str]
    delay_s: float = 0.0
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, text: str) -> str:
        self.requests.append(text)
        time.sleep(self.delay_s)
        return self.answers.get(text, text)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    serving = Endpoint({SENTENCE: "Der Ausschuss ...", "Der Ausschuss ...": PARAPHRASE})

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = serving.answer(request["messages"][-1]["content"])
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            content = json.dumps(body).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except BrokenPipeError:
                pass

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    serving.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield serving
    server.shutdown()
    thread.join()
    server.server_close()


def config(endpoint: Endpoint, cache: Path, **changes: object) -> BackTranslationConfig:
    settings = EndpointConfig(url=endpoint.url, model="m", **changes)  # pyright: ignore[reportArgumentType]
    return BackTranslationConfig(endpoint=settings, cache=cache, fraction=1.0)


def test_an_endpoint_translates_once_and_copies_are_left_out(endpoint: Endpoint, tmp_path: Path) -> None:
    text = f"{SENTENCE} Nobody was surprised by it."
    method = back_translation(config(endpoint, tmp_path))
    copy = method(document(text), Random(0))
    assert copy is not None
    assert copy.text == f"{PARAPHRASE} Nobody was surprised by it."
    assert method.counts() == {"copies": 1}
    num_requests = len(endpoint.requests)
    assert num_requests == 4
    again = back_translation(config(endpoint, tmp_path))([document(text)][0], Random(0))
    assert again == copy
    assert len(endpoint.requests) == num_requests, "the second run reads the cache"


def test_an_endpoint_that_times_out_is_one_error_or_a_counted_skip(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.delay_s = 1.0
    strict = back_translation(config(endpoint, tmp_path, timeout_s=0.1))
    with pytest.raises(DataError, match=r"127.0.0.1.*a translation failed.*limit 0.1 s.*on_failure"):
        strict(document(SENTENCE), Random(0))
    patient = back_translation(config(endpoint, tmp_path, timeout_s=0.1, on_failure="skip"))
    assert patient(document(SENTENCE), Random(0)) is None
    assert patient.counts() == {"failed requests": 1}
    endpoint.delay_s = 0.0
    assert patient(document(SENTENCE), Random(0)) is not None, "what failed is tried again"


def test_an_endpoint_that_never_answers_ends_the_work_even_with_skip(tmp_path: Path) -> None:
    nobody = Endpoint({}, url="http://127.0.0.1:9/v1")
    method = back_translation(config(nobody, tmp_path, timeout_s=5.0, on_failure="skip"))
    many = " ".join(f"Sentence number {number} stands right here." for number in range(12))
    with pytest.raises(DataError, match="a translation failed"):
        method(document(many), Random(0))


@pytest.mark.parametrize(
    ("paraphrase", "problem"),
    [
        (PARAPHRASE, ""),
        ("", "unlike in length"),
        (SENTENCE * 3, "unlike in length"),
        ("the committee rejected the proposal, after a long debate!", "copies"),
        ("After a debate of 3 hours, the committee turned it down.", "other figures"),
        ("After a long debate, the committee turned it down,", "another end"),
    ],
)
def test_guards(paraphrase: str, problem: str) -> None:
    assert problem_of(paraphrase, SENTENCE) == problem


def test_wrong_settings_of_back_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="names no translator"):
        back_translation(BackTranslationConfig())
    with pytest.raises(ConfigError, match="model: is not set"):
        EndpointConfig(url="http://localhost/v1")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        back_translation(config(Endpoint({}, url="http://x/v1"), tmp_path, api_key_env="NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match=r"forward: .* holds no config.json"):
        back_translation(BackTranslationConfig(forward=tmp_path, backward=tmp_path, cache=tmp_path))


def words_of_texts() -> list[str]:
    return sorted({word.text.lower() for text in augment_texts.PROSE for word in find_words(text)})


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Marian model with random weights."""
    folder = tmp_path_factory.mktemp("marian")
    names = ["<pad>", "</s>", "<unk>", *words_of_texts()]
    library = tokenizers.Tokenizer(WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    library.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", model_max_length=64
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    settings = transformers.MarianConfig(vocab_size=len(names), init_std=0.5, **shape, **heads, **special)
    transformers.MarianMTModel(settings).save_pretrained(folder)
    return folder


def test_marian_models_translate_the_same_alone_and_together(marian: Path, tmp_path: Path) -> None:
    translate = MarianTranslator(marian, setting="forward")
    texts = [SENTENCE.lower(), "they breathe air", "the paper torn", "we spent the summers there"]
    together = translate(texts)
    assert all(together)
    assert together == [translate([text])[0] for text in texts]
    settings = BackTranslationConfig(forward=marian, backward=marian, cache=tmp_path, fraction=1.0)
    method = back_translation(settings)
    copy = method(document(" ".join(augment_texts.PROSE[:3])), Random(0))
    assert copy is not None or sum(method.counts().values()) >= 3, "what random weights write fails the guards"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights whose vocabulary has whole words and parts of words."""
    folder = tmp_path_factory.mktemp("bert")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,", *words_of_texts()]
    names = list(dict.fromkeys([*names, "##ing", "##s", "[unused1]", "2019"]))
    library = tokenizers.Tokenizer(WordPiece({name: place for place, name in enumerate(names)}, unk_token="[UNK]"))
    library.pre_tokenizer = BertPreTokenizer()
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]", model_max_length=512
    ).save_pretrained(folder)
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForMaskedLM(settings).save_pretrained(folder)
    return folder


def test_a_masked_model_replaces_whole_words_in_place(bert: Path) -> None:
    settings = MaskedReplacementConfig(model=bert, fraction=0.3, top_k=5, min_probability=0.0)
    method = masked_replacement(settings)
    vocabulary = set(words_of_texts())
    for number, text in enumerate(augment_texts.PROSE):
        copy = method(document(text), Random(number))
        assert copy is not None
        before, after = text.split(), copy.text.split()
        assert len(before) == len(after)
        different = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert different
        for old, new in different:
            assert {word.text.lower() for word in find_words(new)} <= vocabulary
            assert old.lower() in ("a", "an") or old[:1].islower(), "names and beginnings stay"
        assert copy == method(document(text), Random(number))


def test_predictions_are_those_of_the_model_for_each_place_alone(bert: Path) -> None:
    model = MaskedModel(bert)
    text = augment_texts.PROSE[0]
    words = find_words(text)[2:7]
    together = model.fill(text, words, 4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    reference = transformers.BertForMaskedLM.from_pretrained(bert).eval()
    for word, fills in zip(words, together, strict=True):
        masked = tokenizer(f"{text[: word.start]}[MASK]{text[word.end :]}", return_tensors="pt")
        place = int((masked["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0, 0])
        with torch.no_grad():
            probabilities = reference(**masked).logits[0, place].softmax(dim=-1)
        for fill in fills:
            expected = probabilities[tokenizer.convert_tokens_to_ids(fill.word)]
            assert fill.probability == pytest.approx(float(expected), rel=1e-4)


def test_a_masked_model_must_be_one(marian: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"masked_replacement.model: is not set"):
        MaskedModel(Path())
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        MaskedModel(tmp_path)


@dataclass
class Writer:
    """A language model that writes what it is told and prefers one continuation."""

    completions: Sequence[str]
    favorite: str
    prompts: list[str] = field(default_factory=list)

    def complete(self, prompts: Sequence[str], *, max_tokens: int, seeds: Sequence[int]) -> list[str]:
        self.prompts += prompts
        return [self.completions[place % len(self.completions)] for place in range(len(prompts))]

    def log_probs(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        return [0.0 if context.endswith(self.favorite) else -9.0 for context in contexts]


def test_a_gap_gets_the_candidate_that_leads_best_to_what_follows() -> None:
    writer = Writer([" under the table and", " in our garden now", " 12 of them", "s and so"], favorite="in our garden")
    method = span_infilling(SpanInfillingConfig(model=Path("x"), fraction=0.2), lambda folder: writer)
    text = "Yesterday we saw three small birds, and they sang on the old fence."
    copy = method(document(text), Random(1))
    assert copy is not None
    assert "in our garden" in copy.text
    assert all(text.startswith(prompt) and not prompt.endswith(" ") for prompt in writer.prompts)
    before, after = copy.text.split("in our garden")
    assert text.startswith(before)
    assert text.endswith(after)
    silent = Writer([" 12", ""], favorite="")
    assert (
        span_infilling(SpanInfillingConfig(model=Path("x")), lambda folder: silent)(document(text), Random(1)) is None
    )


@pytest.mark.parametrize(
    ("completion", "words"),
    [(" one two three fo", "one two three"), (" one tw", "one"), ("one two", ""), (" one, two x", ""), ("", "")],
)
def test_only_whole_plain_words_of_a_continuation_count(completion: str, words: str) -> None:
    assert first_words(completion) == words
