"""A second labeled set of personal data, made by other packages: mimesis, and locales of Faker not used before.

`benchmarks/personal_data.py --set foreign` measures with it. Values stand in sentences of mimesis in thirteen languages,
without a word that names them, after a label in the language, or in a line of JSON, CSV, a log or a setting. A value
that is digits alone (a Polish PESEL, a Dutch BSN) has its label, because nothing else tells it from another number.
Negatives are versions of the packages on this machine, identifiers with check digits, and measurements.
"""

# ruff: noqa: E501 - tables of made-up texts

import ipaddress
import json
import random
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata

from faker import Faker
from mimesis import Generic, Locale  # pyright: ignore[reportMissingImports]

from personal_data_set import Example

_LOCALES = {
    "pl": "pl_PL", "nl": "nl_NL", "sv": "sv_SE", "ru": "ru_RU", "ko": "ko_KR", "tr": "tr_TR", "cs": "cs_CZ",
    "it": "it_IT", "da": "da_DK", "fi": "fi_FI", "no": "no_NO", "hu": "hu_HU", "uk": "uk_UA",
}  # fmt: skip
_LABELS = {
    "email": ("E-mail", "mail", "E-post", "почта", "이메일", "e-posta", "contact"),
    "phone": ("Telefon", "tel.", "Mobiel", "телефон", "전화", "cep telefonu", "phone"),
    "ip": ("IP", "host", "server", "client address", "remote_addr"),
    "card": ("kaart / card", "Kreditkarte", "card number", "credit card", "carta / card"),
    "iban": ("IBAN", "konto", "rekening", "account"),
}
_IDS: dict[str, tuple[str, bool]] = {
    "it_IT": ("Codice fiscale", False), "pl_PL": ("PESEL", True), "nl_NL": ("BSN", True),
    "sv_SE": ("Personnummer", True), "fi_FI": ("Henkilötunnus", False), "ko_KR": ("주민등록번호", False),
    "pt_BR": ("CPF", False), "en_GB": ("National Insurance number", False), "es_ES": ("DNI", False),
}  # fmt: skip
"""Label of the national number of a locale, and whether nothing but the label tells what it is."""
_SCHEMES = ("postgres", "mysql", "redis", "amqp", "mongodb+srv", "ftp", "https", "smtp", "mssql+pyodbc", "ldap", "rtsp")
_FORMS: tuple[Callable[[str, str], str], ...] = (
    lambda label, value: f"{label}: {value}", lambda label, value: f"{label} {value}",
    lambda label, value: json.dumps({label: value}, ensure_ascii=False), lambda label, value: f"{label}={value}",
    lambda label, value: f"id;{label};city\n17;{value};Gdynia", lambda label, value: f"- {label}:\n  {value}",
)  # fmt: skip


def labeled(*, per_kind: int, seed: int = 0) -> list[Example]:
    """Examples with one value each."""
    rng = random.Random(f"{seed} foreign values")
    Faker.seed(rng.randrange(2**32))
    result: list[Example] = []
    for number in range(per_kind):
        language = list(_LOCALES)[number % len(_LOCALES)]
        made, fake = Generic(Locale(language), seed=rng.randrange(2**32)), Faker(_LOCALES[language])
        values = {
            "email": (made.person.email(), False), "phone": (made.person.phone_number(), True),
            "ip": (fake.ipv4_public() if rng.random() < 0.2 else _public(made), True),
            "card": (made.payment.credit_card_number(), True),
            "iban": (Faker(rng.choice(("pl_PL", "it_IT", "nl_NL", "de_AT", "fr_CH", "pt_PT"))).iban(), False),
        }  # fmt: skip
        for kind, (value, needs_name) in values.items():
            result.append(_placed(rng, made, kind, rng.choice(_LABELS[kind]), value, needs_name))
        locale = list(_IDS)[number % len(_IDS)]
        own, (label, needs_name) = Faker(locale), _IDS[locale]
        value = {"pt_BR": "cpf", "es_ES": "nif"}.get(locale, "ssn")
        result.append(_placed(rng, made, "national_id", label, getattr(own, value)(), needs_name))
        user, secret = fake.user_name(), _password(rng)
        host = f"{made.internet.hostname()}"
        login = f"{user if rng.random() < 0.85 else ''}:{secret}"
        url = f"{rng.choice(_SCHEMES)}://{login}@{host}:{rng.randrange(80, 9999)}/a"
        example = _placed(rng, made, "credentials", "DATABASE_URL", url, False)
        start = example.text.index(login)
        result.append(replace(example, values=(("credentials", start, start + len(login)),)))
    return result


def _public(made: Generic) -> str:
    while True:
        value = made.internet.ip_v4()
        address = ipaddress.ip_address(value)
        if address.is_global and not address.is_multicast:
            return value


def _password(rng: random.Random) -> str:
    alphabet = "abcdefghkmnpqrstuvwxyzABCDEFGHKMNPQRSTUVWXYZ23456789" + rng.choice(("", "-_.", "!$*", "%+"))
    text = "".join(rng.choices(alphabet, k=rng.randrange(8, 24)))
    return text.replace("%", "%40")


def _placed(rng: random.Random, made: Generic, kind: str, label: str, value: str, needs_name: bool) -> Example:
    """A value in a sentence, or after its label."""
    sentence = made.text.sentence().strip()
    if needs_name or rng.random() < 0.6:
        text = f"{sentence}\n{rng.choice(_FORMS)(label, value)}\n{made.text.word()}"
    else:
        before, _, after = sentence.partition(" ")
        text = rng.choice((f"{before} {value} {after}", f"{sentence} ({value})", f"{sentence} {value}."))
    start = text.index(value)
    return Example(text, False, ((kind, start, start + len(value)),))


def negatives(*, count: int, seed: int = 0) -> list[Example]:
    """Texts with numbers that are none of these."""
    rng = random.Random(f"{seed} foreign negatives")
    Faker.seed(rng.randrange(2**32))
    versions = sorted({one.version for one in metadata.distributions() if one.version.count(".") >= 2})
    fake = Faker(["en_US", "sv_SE", "it_IT"])
    result: list[Example] = []
    for number in range(count):
        made = Generic(Locale(list(_LOCALES)[number % len(_LOCALES)]), seed=rng.randrange(2**32))
        version = f"{rng.choice(versions).split('+')[0]}.{rng.randrange(250)}"
        four = f"{rng.randrange(1, 140)}.{rng.randrange(12)}.{rng.randrange(9000)}.{rng.randrange(250)}"
        small = ".".join(str(rng.randrange(1, 250)) for _ in range(4))
        control = "".join(rng.choices("0123456789", k=rng.choice((9, 10, 11, 12))))
        grouped = "-".join(
            "".join(rng.choices("0123456789", k=size)) for size in rng.choice(((3, 3, 4), (4, 4, 3), (2, 7)))
        )
        texts = (
            f"Updated {made.text.word()} to {version} and restarted.", f"{made.text.word()}/{four} (X11; Linux)",
            f"driver version {small} is required", f"{made.text.word()}-{small}.tar.gz", f"Release {small}: {made.text.sentence()}",
            f"ISBN {made.code.isbn()}", f"EAN {made.code.ean()}", f"IMEI {made.code.imei()}",
            f"Control number {control}", f"Kontrollnummer: {grouped}", f"Aktenzeichen {grouped}", f"control no. {grouped}",
            f"numer kontrolny {control}", f"Protokoll-Nr. {grouped}", f"case {grouped}", f"checksum {made.cryptographic.hash()}",
            f"{made.cryptographic.uuid()} {made.text.word()}", f"{fake.iso8601()} {made.text.sentence()}",
            f"lat {made.address.latitude()}, lon {made.address.longitude()}", f"{fake.mac_address()} {fake.swift()}",
            f"{made.text.sentence()} {rng.randrange(10**6):,} {made.text.word()}", f"{fake.ean13()} {made.text.word()}",
            f"https://{made.internet.hostname()}:{rng.randrange(80, 9999)}/{made.text.word()}?v={control}",
            f"https://example.org/@{made.text.word()}/{control}", f"frame {rng.randrange(10**9)} of {rng.randrange(10**10)}",
            f"{made.numeric.float_number(precision=9)} ± {made.numeric.float_number(0, 1, 9)}", made.text.text(quantity=2),
        )  # fmt: skip
        result.append(Example(texts[number % len(texts)], False, ()))
    return result
