"""Encodings that were mistaken: right text stays, and wrong text becomes what it was."""

import pytest
from faker import Faker

from mistaken_text import MISTAKES, SENTENCES, broken, mistakes
from modelwright.data.clean.steps.format import Format, FormatConfig, normalize, repair
from modelwright.data.clean.steps.step import Drop
from modelwright.data.document import Document

LEAST_RECALL = {
    "zh": 0.95, "zh-TW": 0.95, "ru": 0.95, "uk": 0.95, "el": 0.9, "ja": 0.95, "ko": 0.95, "ar": 0.95, "he": 0.5,
    "pl": 0.7,
}  # fmt: skip


def formatted(text: str) -> str:
    document = Document(id="d", text=text, kind="prose", split="train", source="test")
    result = Format(FormatConfig())(document)
    return "" if isinstance(result, Drop) else result.text


@pytest.mark.parametrize("language", SENTENCES)
def test_right_text_stays(language: str) -> None:
    for sentence in SENTENCES[language]:
        for text in (sentence, sentence.upper(), f"{sentence} http://example.org/ (OK)", f"# {sentence[:20]}"):
            assert formatted(text) == normalize(text)
    whole = "\n".join(SENTENCES[language])
    assert formatted(whole) == normalize(whole)


@pytest.mark.parametrize("language", MISTAKES)
def test_wrong_text_becomes_what_it_was(language: str) -> None:
    cases = broken(language)
    repaired = [formatted(wrong) == normalize(right) for right, wrong, *_ in cases]
    assert len(cases) >= 2
    assert sum(repaired) / len(cases) >= LEAST_RECALL[language]


LOCALES = {
    "zh": "zh_CN", "zh-TW": "zh_TW", "ru": "ru_RU", "uk": "uk_UA", "bg": "bg_BG", "el": "el_GR", "ja": "ja_JP",
    "ko": "ko_KR", "ar": "ar_AA", "fa": "fa_IR", "he": "he_IL", "pl": "pl_PL", "cs": "cs_CZ", "fr": "fr_FR",
    "th": "th_TH", "vi": "vi_VN", "hy": "hy_AM",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("language", LOCALES)
def test_text_that_nothing_was_tuned_on(language: str) -> None:
    fake = Faker(LOCALES[language])
    fake.seed_instance(5)
    texts = [fake.sentence(length) for length in (5, 9, 15) for _ in range(20)]
    texts += [f"{fake.name()}, {' '.join(fake.address().split())}" for _ in range(15)]
    assert [text for text in texts if formatted(text) != normalize(text)] == []
    cases = [case for text in texts[30:40] for case in mistakes(text, language)]
    repaired = sum(formatted(wrong) == normalize(right) for right, wrong, *_ in cases)
    assert repaired >= LEAST_RECALL.get(language, 0.0) * len(cases)


def test_only_the_lines_that_are_wrong_change() -> None:
    right = "Привет, мир! Сегодня хорошая погода."
    wrong = right.encode("koi8-r").decode("cp1251")
    text = f"A title\n{wrong}\n今天的天气很好，我们一起去公园散步吧。\nÜbermäßige Größe"
    assert formatted(text) == text.replace(wrong, right)


RIGHT = (
    "ПРОКУРОР", "ИЛИЕВА", "БЕЗБОРОДЬКО", "ШТУКАТУР", "  --include-foreign-data=ШАБЛОН", "КЛХ РОСЛАВЛЬ",
    "ТЕРЕЩЕНКО, ЗІНЧУК AND БАБИЧЕНКО", "Аэродром †", "Филтър", "скрипт Ruby", "ΕΝΕΡΓΕΙΑ", "数据库簇状态: %s",
    "请求参数错误", "网络文件系统", "雷亚尔价值单位", "依存関係の取得中", "聚焦視窗元件",
)  # fmt: skip
"""Names, headings and messages of programs, each of which is another text in some other encoding."""


@pytest.mark.parametrize("text", RIGHT)
def test_short_right_lines_stay(text: str) -> None:
    assert formatted(text) == normalize(text)


def test_a_doubtful_line_stays_in_a_document_that_is_right() -> None:
    doubtful = "връзка към връзка"
    text = "\n\n".join((*SENTENCES["bg"], doubtful))
    assert repair(doubtful) != doubtful, "by itself it could be Greek"
    assert repair(text) == text
