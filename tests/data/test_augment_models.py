"""Methods with a model: back translation over HTTP and by Marian-type models, masked replacement, span infilling."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import tokenizers
import torch
import transformers
import yaml
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer

import augment_texts
from marian_folders import write_marian
from modelwright.core.config import DataError
from modelwright.data.augment import back_translation as translators
from modelwright.data.augment.augmentation import find_words
from modelwright.data.augment.back_translation import (
    BackTranslationConfig,
    EndpointConfig,
    EndpointTranslator,
    MarianTranslator,
    back_translation,
    problem_of,
)
from modelwright.data.augment.masked_replacement import MaskedModel, MaskedReplacementConfig, masked_replacement
from modelwright.data.augment.span_infilling import SpanInfillingConfig, first_words, span_infilling
from modelwright.data.document import Document
from recorded_models import Endpoint, serve_translations, translations
from refusals import config_error

pytestmark = pytest.mark.slow

ANSWERS = yaml.safe_load((Path(__file__).parent / "golden" / "augment_answers.yaml").read_text(encoding="utf-8"))
SENTENCE = "The committee rejected the proposal after a long debate."
PARAPHRASE = "After a long debate, the committee turned the proposal down."


def document(text: str, name: str = "a") -> Document:
    return Document(id=name, text=text, kind="prose", split="train", source="test")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve_translations({SENTENCE: "Der Ausschuss ...", "Der Ausschuss ...": PARAPHRASE}) as serving:
        yield serving


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


def test_an_endpoint_of_completions_gets_many_sentences_in_one_request(endpoint: Endpoint, tmp_path: Path) -> None:
    recorded = ANSWERS["back_translation"]
    endpoint.answers = translations(recorded)
    sentences = [entry["en"] for entry in recorded[:20]]
    method = back_translation(config(endpoint, tmp_path, api="completions"))
    copy = method(document("\n\n".join(sentences)), Random(0))
    assert copy is not None
    backs = [entry["en"] if problem_of(entry["back"], entry["en"]) else entry["back"] for entry in recorded[:20]]
    assert copy.text == "\n\n".join(backs)
    assert sorted(map(len, endpoint.requests)) == [4, 4, 16, 16]
    asked = len(endpoint.requests)
    chat = back_translation(config(endpoint, tmp_path))(document(sentences[0]), Random(0))
    assert chat is not None
    assert len(endpoint.requests) == asked + 2, "what one API answered is not taken for the other's answer"


def test_a_completion_that_does_not_end_is_no_translation(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.answers = {SENTENCE: "Der Ausschuss " * 100, "short": "kurz"}
    translate = EndpointTranslator(
        EndpointConfig(url=endpoint.url, model="m", api="completions"), source="English", target="German"
    )
    assert translate([SENTENCE, "short"]) == ["", "kurz"]


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


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("`--dry-run`", "`--dry run`"),
        ("https://example.org/shop", "https://example.org/laden"),
        ("info@example.org", "info@beispiel.org"),
    ],
)
def test_a_paraphrase_keeps_code_and_addresses(part: str, other: str) -> None:
    original = "Use `--dry-run` (https://example.org/shop), or ask info@example.org."
    paraphrase = "Try `--dry-run`, see https://example.org/shop or write to info@example.org."
    assert problem_of(paraphrase, original) == ""
    assert problem_of(paraphrase.replace(part, other), original) == "other code or addresses"


def test_wrong_settings_of_back_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with config_error("back_translation"):
        back_translation(BackTranslationConfig())
    with config_error("model", match="model: is not set"):
        EndpointConfig(url="http://localhost/v1")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with config_error("api_key_env", match="NO_SUCH_KEY is not set"):
        back_translation(config(Endpoint({}, url="http://x/v1"), tmp_path, api_key_env="NO_SUCH_KEY"))
    with config_error("back_translation.forward"):
        back_translation(BackTranslationConfig(forward=tmp_path, backward=tmp_path, cache=tmp_path))


def words_of_texts() -> list[str]:
    return sorted({word.text.lower() for text in augment_texts.PROSE for word in find_words(text)})


BY_HEART = [entry for entry in ANSWERS["back_translation"] if entry["en"].split()[1] in ("chairman", "vast", "final")]


@pytest.fixture(scope="module")
def marians(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two Marian models that translate some sentences into German and back."""
    folders = tmp_path_factory.mktemp("marian")
    there, back = folders / "en-de", folders / "de-en"
    recorded = ANSWERS["back_translation"]
    write_marian(there, {one["en"]: one["de"] for one in BY_HEART}, [(one["en"], one["de"]) for one in recorded])
    write_marian(back, {one["de"]: one["back"] for one in BY_HEART}, [(one["de"], one["back"]) for one in recorded])
    return there, back


@pytest.mark.slow
def test_marian_models_translate_the_same_alone_and_together(
    marians: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    translate = MarianTranslator(marians[0], setting="forward")
    assert type(translate._tokenizer).__name__ == "MarianTokenizer"
    known = [entry["en"] for entry in BY_HEART]
    together = translate([*known, "They breathe air.", known[0]])
    assert together[: len(known)] == [entry["de"] for entry in BY_HEART]
    assert together[-1] == together[0]
    assert together == [translate([text])[0] for text in [*known, "They breathe air.", known[0]]]
    assert not caplog.records


@pytest.mark.slow
def test_two_marian_folders_write_paraphrases(marians: tuple[Path, Path], tmp_path: Path) -> None:
    forward, backward = marians
    settings = BackTranslationConfig(forward=forward, backward=backward, cache=tmp_path, fraction=1.0)
    method = back_translation(settings)
    copy = method(document(" ".join(entry["en"] for entry in BY_HEART)), Random(0))
    assert copy is not None
    assert copy.text == " ".join(entry["back"] for entry in BY_HEART)
    assert method.counts() == {}


def test_a_tokenizer_without_its_package_says_what_to_install(
    marians: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translators, "find_spec", lambda name: None)
    with config_error("augment"):
        MarianTranslator(marians[0], setting="forward")


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


def test_a_masked_model_must_be_one(tmp_path: Path) -> None:
    with config_error("masked_replacement.model", match=r"masked_replacement.model: is not set"):
        MaskedModel(Path())
    with config_error("masked_replacement.model", match=r"holds no config\.json"):
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
