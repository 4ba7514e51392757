"""Personal data and secrets: what is replaced, and what only looks like it."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from faker import Faker

from modelwright.core.config import parse
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import personal_data
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.patterns import KINDS, Finding
from modelwright.data.clean.steps import privacy
from modelwright.data.clean.steps.privacy import Privacy, PrivacyConfig
from modelwright.data.document import Document
from modelwright.pipeline.report import page as corpus
from personal_data import score
from personal_data_set import Example, labeled, negatives
from refusals import config_error

VALUES = [
    ("email", "Write to john.doe+news@mail.example.co.uk today."),
    ("email", "Mail: info@exämple.de"),
    ("phone", "Call +49 30 901820 or come by."),
    ("phone", "Call (212) 555-2368 after six."),
    ("phone", "Tel.: 020 7946 0958"),
    ("phone", "Mobile: 13812345678"),
    ("ip", "The host 85.23.12.9 answered."),
    ("ip", "The host 2a00:1450:4001:81b::200e answered."),
    ("ip", "Reached 2a00::1 at last."),
    ("phone", "Rufen Sie an: +49\u00a030\u2011901\u2011820"),
    ("secret", "token xoxb-abcdefghij"),
    ("card", "Paid with 4111 1111 1111 1111, thanks."),
    ("card", "Paid with 378282246310005."),
    ("card", "Paid by card 6212 3456 7890 1234 569 yesterday."),
    ("iban", "IBAN DE89 3704 0044 0532 0130 00 Berlin"),
    ("iban", "GB29NWBK60161331926819"),
    ("national_id", "SSN 536-90-4399"),
    ("national_id", "His number is 11010519491231002X."),
    ("national_id", "Codice fiscale RSSMRA85T10A562S"),
    ("national_id", "DNI 54362315K"),
    ("national_id", "National Insurance number AB123456C"),
    ("credentials", "postgres://admin:s3cret@db.example.org/x"),
    ("email", "请发邮件到zhang.wei@qq.com，谢谢"),
    ("email", "<a href='mailto:ann@example.org'>"),
    ("phone", "电话13812345678转张先生"),
    ("phone", "Ruf mich an: (0171) 234567"),
    ("phone", "Dial 001-212-555-2368x99 then."),
    ("national_id", "身份证号11010519491231002X，请核对"),
    ("national_id", "マイナンバーは123456789018です"),
    ("national_id", "His SSN is 536904399."),
    ("national_id", "CPF 52998224725"),
    ("card", "カード4111111111111111で支払いました"),
    ("credentials", "git clone https://4f1c9a7be02d4c6f8a93@example.org/x.git"),
    ("credentials", "redis://:Zq8wPf31x@cache.example.org:6379/0"),
    ("credentials", "mysql://ann@example.org:Zq8wPf31x@db.example.org/shop"),
    ("credentials", "amqp://agnes:xvSy$vavfHu9@mq.example.org:5672/a"),
    ("ip", "remote_addr=147.209.247.47 ok"),
    ("phone", "телефон=+380-(95)-836-63-27"),
    ("phone", "puh.: +358 40 720 1300"),
    ("phone", "tel.: 98 897 323"),
    ("card", "card number=5592 1827 4736 3884"),
    ("national_id", "Henkilötunnus=131052-308T"),
    ("national_id", "주민등록번호: 220209-2266030"),
    ("secret", "key AKIAJ2Q5XV7DT4WLPZ6M"),
    ("secret", "ghp_a8Kq2ZxT9bLm4Wv7Rc1YdN6uPs3EgHj5Qf0B"),
    ("secret", "api_key = 'a8f5f167f44f4964e6c998dee827110c'"),
    ("secret", "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA0Z3VS5JJcds3xf\n-----END RSA PRIVATE KEY-----"),
]
HARMLESS = [
    "The meeting is on 2024-01-02 at 10:20:30, or on 12.05.2023.",
    "Version 1.2.3.4 of std::vector, see section 4.1.2.3 and RFC 2616.",
    "pi is 3.14159265358979, the code 1234567890123456 and 0x12345678.",
    "ISBN 978-3-16-148410-0, price 12 500 000 dollars, 1,234,567 people.",
    "The router is 192.168.0.1, the host 10.1.2.3, the network fd00::17.",
    "Listening on 127.0.0.1:8080, 0.0.0.0, ::1 and 192.0.2.7.",
    "@property\ndef f(self): return a@b",
    "https://example.org/users/:id, https://user@host/ and git@github.com:a/b",
    "password = os.environ['PASSWORD_FROM_ENVIRONMENT']",
    "0 1 1 2 3 5 8 13 21 34 55 89 144 233 377 610 987 1597",
    "dates 1999-2004, 555-1234, pages 100-200",
    "mode change 100644 100644 a.py",
    "-rw-r--r-- root/root 04268 2020-03-17 12:35 ./usr/a",
    "Date:   Tue Sep 30 15:09:06 2008 -0400",
    "see section 43.6.4.5, dpkg (1.7.9.5) unstable, upgraded to 10.0.71.47",
    "ISBN 978-0-306-40615-7, ISBN 0306406152, pages 0410-0418, U+0410-044F",
    "Boston, MA 02110-1301, USA (merge 0650614982)",
    "quanta 2650 1514 1514 1514 1514 1514",
    "api_key = YOUR_API_KEY_HERE, OPENAI_API_KEY=sk-xxxxxxxxxxxxxxxxxxxxxxxx",
    "aws_access_key_id = AKIAIOSFODNN7EXAMPLE",
    "https://user:password@host/, postgres://USER:PASSWORD@HOST/NAME",
    "logo@2x.png getty@tty1.service Item@1b6d3586.toString a.b@6cb41068.so.6",
    "git@HOST:a/b, ssh://git@example.org/a/b, git@gitlab.example.org:a/b",
    "order number 4111111111111111, Bestellnummer 0171 2345678",
    "Kontrollnummer: 008-042-6599, Aktenzeichen 984-638-4764, numer kontrolny 01447537361",
    "Updated the viewer to 1.65.2.165 and restarted; ельбор/58.8.171.22 (X11)",
    "https://example.org/a?id=4111111111111111&n=536904399",
]


def found_in(text: str, config: PrivacyConfig | None = None, *, is_code: bool = False) -> list[Finding]:
    config = config or PrivacyConfig()
    failures = Counter[str]()
    findings = privacy.find(text, config.replace, is_code=is_code, regions=config.phone_regions, failures=failures)
    assert not failures
    return findings


def replaced_in(document: Document) -> tuple[Document, dict[str, int]]:
    """The document with markers, and the number of values replaced by kind."""
    step = Privacy(PrivacyConfig())
    return step(document), dict(step.replaced)


def document(text: str, **changes) -> Document:
    return Document(**{"id": "d", "text": text, "kind": "prose", "split": "train", "source": "test"} | changes)


@pytest.mark.parametrize(("kind", "text"), VALUES)
def test_values_are_found(kind: str, text: str) -> None:
    assert [finding.kind for finding in found_in(text)] == [kind]
    changed, counts = replaced_in(document(text))
    assert counts == {kind: 1}
    assert f"<{kind.upper()}_1>" in changed.text
    again, _ = replaced_in(changed)
    assert again.text == changed.text


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_stays(text: str) -> None:
    found = [(finding.kind, text[finding.start : finding.end]) for finding in found_in(text)]
    assert not found


def test_equal_values_get_equal_markers_in_all_parts_of_a_document() -> None:
    question, answer = "Who is Ann@example.org?", "ann@example.org and bob@example.org work here."
    qa = document(f"{question}\n\n{answer}", kind="qa", meta={"question": question, "answer": answer})
    changed, counts = replaced_in(qa)
    assert changed.meta["question"] == "Who is <EMAIL_1>?"
    assert changed.meta["answer"] == "<EMAIL_1> and <EMAIL_2> work here."
    assert changed.text == "Who is <EMAIL_1>?\n\n<EMAIL_1> and <EMAIL_2> work here."
    assert counts["email"] == 3
    assert "example" not in repr(found_in(question)), "values never reach a log"


def test_no_part_of_a_kept_document_holds_a_value() -> None:
    mail = "ann@example.org"
    meta = {"title": f"By {mail}", "summary": f"Ask {mail}."}
    changed, counts = replaced_in(document(f"By {mail}\n\nAsk {mail}. Or not.", meta=meta))
    assert mail not in changed.to_json()
    assert counts == {"email": 2}
    rejected = [{"role": "assistant", "content": f"No, {mail} knows."}]
    meta = {"question": "Who knows?", "answer": f"{mail} knows.", "rejected": rejected}
    changed, counts = replaced_in(document(f"Who knows?\n\n{mail} knows.", kind="qa", meta=meta))
    assert mail not in changed.to_json()
    assert counts == {"email": 2}


def test_the_own_fields_of_a_record_hold_no_value_but_keep_their_numbers() -> None:
    meta = {"id": "13812345678", "url": "https://example.org/?mail=ann@example.org", "score": 4111111111111111}
    changed, counts = replaced_in(document("Nothing here.", meta=meta))
    assert changed.meta == {**meta, "url": "https://example.org/?mail=<EMAIL_1>"}
    assert counts == {}


def test_kinds_and_regions_can_be_chosen() -> None:
    text = "Mail a@example.org, call 0912 345 678."
    only_phones = PrivacyConfig(replace=("phone",), phone_regions=("TW",))
    assert [finding.kind for finding in found_in(text, only_phones)] == ["phone"]
    with config_error("replace"):
        PrivacyConfig(replace=("mail",))
    with config_error("phone_regions"):
        PrivacyConfig(phone_regions=("XX",))


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT"])
def test_made_up_people(locale: str) -> None:
    """At least 95 of 100 values in the formats of a country, which `faker` makes."""
    Faker.seed(0)
    fake = Faker(locale)
    made = {
        "email": [fake.email() for _ in range(100)],
        "ip": [fake.ipv4_public() for _ in range(50)] + [fake.ipv6() for _ in range(50)],
        "card": [fake.credit_card_number() for _ in range(100)],
        "iban": [fake.iban() for _ in range(100)],
    }
    for kind, values in made.items():
        hits = 0
        for value in values:
            text = f"The value is {value}, as was said before."
            hits += any(text[f.start : f.end] == value and f.kind == kind for f in found_in(text))
        assert hits >= 95, kind


@pytest.mark.parametrize("word", ["[]", "", "none", "off", "OFF", False, None, [], ["none"]])
def test_no_kinds_switch_the_stage_off(word) -> None:
    config = parse(CleanConfig, {"privacy": {"replace": word}}).privacy
    assert config.replace == ()
    text = document("ann@example.org")
    assert Privacy(config)(text) is text
    with config_error("privacy.replace"):
        parse(CleanConfig, {"privacy": {"replace": ["phones"]}})


def test_source_code_needs_words_that_name_a_number() -> None:
    number = "x = 4111111111111111\ny = [0171, 2345678]\nz = q @ k.to(device) - w@x.to(device)"
    assert found_in(number, is_code=True) == []
    assert [finding.kind for finding in found_in("# credit card 4111111111111111", is_code=True)] == ["card"]
    assert [finding.kind for finding in found_in("HOST = '85.23.112.9'", is_code=True)] == ["ip"]


def test_text_without_personal_data_keeps_its_bytes() -> None:
    text = document("\n".join(HARMLESS))
    assert Privacy(PrivacyConfig())(text) is text


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return labeled("test", per_kind=160, seed=7) + negatives("test", count=400, seed=7)


@pytest.mark.slow
def test_the_prefilter_hides_no_match(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors and shapes skip most searches; without them the findings are the same."""
    with_prefilter = [found_in(example.text, is_code=example.is_code) for example in examples]
    searched = sum(len(privacy.patterns_for(example.text, KINDS)) for example in examples)
    assert searched < 0.6 * len(examples) * len(privacy.PATTERNS), "the prefilter skips nothing"
    monkeypatch.setattr(privacy, "patterns_for", lambda text, kinds: privacy.PATTERNS)
    assert [found_in(example.text, is_code=example.is_code) for example in examples] == with_prefilter


def test_recall_and_precision_on_a_labeled_set(examples: list[Example]) -> None:
    """Templates of the half that the patterns are not tuned on; values of eight locales and of 50 kinds of keys."""
    found = [
        [(finding.kind, finding.start, finding.end) for finding in found_in(example.text, is_code=example.is_code)]
        for example in examples
    ]
    scores = score([example.values for example in examples], found)
    assert min(scores["all"]) >= 0.95, scores
    assert min(min(scores[kind]) for kind in KINDS) >= 0.85, scores


def test_every_marker_is_stable(examples: list[Example]) -> None:
    """What replaced a value is no value: a second pass changes nothing."""
    step = Privacy(PrivacyConfig())
    for example in examples:
        kind = "code" if example.is_code else "prose"
        once = step(document(example.text, kind=kind))
        assert step(once).text == once.text


def test_every_validator_that_a_pattern_names_can_be_imported() -> None:
    """A module that `python-stdnum` lacks once ended every run on a text with a British insurance number."""
    names = [
        pattern.name
        for pattern in personal_data.NUMBERS
        if getattr(pattern.check, "func", None) is personal_data._stdnum
    ]
    assert len(names) >= 12
    for name in names:
        assert personal_data.validator(name.partition(" ")[0])("") is False, name
    for module in ("iban", "us.ssn", "us.itin"):
        assert personal_data.validator(module)("") is False, module


def test_a_validator_that_raises_is_counted_and_its_value_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def validator(module: str):
        raise ModuleNotFoundError(f"No module named 'stdnum.{module}'")

    monkeypatch.setattr(personal_data, "validator", validator)
    step = Privacy(PrivacyConfig())
    changed = step(document("DNI 54362315K of ann@example.org"))
    assert changed.text == "DNI 54362315K of <EMAIL_1>"
    assert step.take_counts() == {"replaced": {"email": 1}, "failed_validators": {"es.dni": 1}}
    assert step.take_counts() == {"replaced": {}, "failed_validators": {}}


def test_the_report_counts_validators_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def validator(module: str):
        raise IndexError(module)

    monkeypatch.setattr(personal_data, "validator", validator)
    text = "The number of the man who came yesterday is 54362315K, as he says himself."
    documents = iter([document(text), document(f"Again. {text}", id="e")])
    report, _ = clean_documents(documents, build_steps(CleanConfig()), tmp_path, SilentProgress())
    assert report.failed_validators == {"es.dni": report.num_kept}
    assert f"validators that failed: es.dni {report.num_kept} times" in corpus._funnel(asdict(report)).caption
