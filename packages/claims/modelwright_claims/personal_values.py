"""Made-up values of personal data, and secrets in the formats that providers publish.

The formats of keys are those of gitleaks (config/gitleaks.toml) and detect-secrets (detect_secrets/plugins), written
again from their descriptions.
"""

import base64
import random
import string
from collections.abc import Callable, Mapping

from faker import Faker
from stdnum.iso7064 import mod_11_10

ALNUM = string.ascii_letters + string.digits
UPPER = string.ascii_uppercase + string.digits
HEX = string.digits + "abcdef"
URL_SAFE = ALNUM + "-_"
BASE64 = ALNUM + "+/"
BASE32 = string.ascii_uppercase + "234567"

LOCALES = ("en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "pt_BR", "zh_CN", "ja_JP")

Value = tuple[str, bool]
"""A value, and whether only a nearby word identifies it: nine digits may be anything."""


def pick(rng: random.Random, alphabet: str, count: int) -> str:
    return "".join(rng.choices(alphabet, k=count))


def email(fake: Faker, rng: random.Random) -> Value:
    local, domain = fake.ascii_email().split("@")
    other = rng.choice(
        ("gmail.com", "qq.com", "web.de", "orange.fr", "163.com", "yahoo.co.jp", "uol.com.br", "mail.eu")
    )
    form = rng.randrange(8)
    if form == 0:
        return f"{local}+{rng.choice(('news', 'shop', 'x2'))}@{other}", False
    if form == 1:
        return f"{local.replace('.', '_').upper()}@{domain.upper()}", False
    if form == 2:
        return f"{rng.randrange(10**7, 10**9)}@qq.com", False
    if form == 3:
        return f"{local}@mail-{rng.randrange(9)}.{domain}", False
    return f"{local}@{other if form == 4 else domain}", False


def phone(fake: Faker, rng: random.Random) -> Value:
    value = fake.phone_number()
    digits = "".join(filter(str.isdigit, value))
    groups = len("".join(c if c.isdigit() else " " for c in value).split())
    bare = not value.startswith(("+", "00")) and (
        groups == 1 or (groups == 3 and " " in value and value[0] not in "0(")
    )
    is_japanese = "ja_JP" in fake.locales and value[0] != "0"
    return value, (bare and not (len(digits) == 11 and "zh_CN" in fake.locales)) or is_japanese


def written_phone(fake: Faker, rng: random.Random) -> Value:
    """Forms that `faker` lacks."""
    number = lambda count: pick(rng, string.digits, count)  # noqa: E731
    first = rng.choice("23456789")
    forms = {
        "en_US": [f"({rng.choice(('212', '415', '617', '303'))}) {first}{number(2)}-{number(4)}"],
        "en_GB": [f"020 7{number(3)} {number(4)}", f"0044 20 7{number(3)} {number(4)}", f"+44 7911 {number(6)}"],
        "de_DE": [f"030 {first}{number(6)}", f"0171 {first}{number(6)}", f"089/{first}{number(6)}",
                  f"0049 171 {first}{number(6)}", f"+49 (0)30 {first}{number(6)}", f"0221-{first}{number(6)}"],
        "fr_FR": [f"06 {' '.join(number(2) for _ in range(4))}", f"01.{'.'.join(number(2) for _ in range(4))}",
                  f"0033 6 {' '.join(number(2) for _ in range(4))}"],
        "es_ES": [f"+34 6{number(2)} {number(3)} {number(3)}", f"0034 91 {number(3)} {number(2)} {number(2)}"],
        "pt_BR": [f"{area} 9{rng.choice('6789')}{number(3)}-{number(4)}" for area in ("(11)", "+55 21")],
        "zh_CN": [f"138{number(8)}", f"+86 139 {number(4)} {number(4)}", f"010-{rng.choice('68')}{number(7)}"],
        "ja_JP": [f"03-{rng.choice('3568')}{number(3)}-{number(4)}", f"090-{first}{number(3)}-{number(4)}",
                  f"+81 90-{first}{number(3)}-{number(4)}"],
    }  # fmt: skip
    return rng.choice(forms[fake.locales[0]]), False


def ip(fake: Faker, rng: random.Random) -> Value:
    value = f"2{fake.ipv6()[1:]}" if rng.random() < 0.3 else fake.ipv4_public()
    return value, ":" not in value and sum(int(part) >= 32 for part in value.split(".")) < 2


def card(fake: Faker, rng: random.Random) -> Value:
    kind = rng.choice(("visa16", "visa16", "mastercard", "mastercard", "amex", "discover", "jcb16", "diners", None))
    value = Faker("en_US" if kind else fake.locales[0]).credit_card_number(kind)
    common = kind is not None
    if len(value) == 16 and rng.random() < 0.5:
        value = rng.choice((" ", "-")).join(value[at : at + 4] for at in range(0, 16, 4))
    elif len(value) == 15 and common and rng.random() < 0.5:
        value = f"{value[:4]} {value[4:10]} {value[10:]}"
    return value, not common


def iban(fake: Faker, rng: random.Random) -> Value:
    value = Faker(rng.choice(("de_DE", "fr_FR", "es_ES", "en_GB", "it_IT", "nl_NL"))).iban()
    value = _valid_iban(rng, value[:2], value[4:])
    return (" ".join(value[at : at + 4] for at in range(0, len(value), 4)) if rng.random() < 0.5 else value), False


def _valid_iban(rng: random.Random, country: str, account: str) -> str:
    """The IBAN of a random account that passes the country's own check digits, where `python-stdnum` knows them."""
    from stdnum import iban as stdnum_iban

    for _ in range(2000):
        number = "".join(str(int(char, 36)) for char in account + country + "00")
        value = f"{country}{98 - int(number) % 97:02d}{account}"
        if stdnum_iban.is_valid(value):
            return value
        account = "".join(rng.choice(string.digits) if char.isdigit() else char for char in account)
    return rng.choice(("DE89370400440532013000", "GB29NWBK60161331926819", "FR1420041010050500013M02606"))


def national_id(fake: Faker, rng: random.Random) -> Value:
    locale = fake.locales[0]
    if locale == "en_US":
        value = fake.ssn()
        form = rng.randrange(3)
        return (value, False) if form else (value.replace("-", rng.choice(("", " "))), True)
    if locale == "de_DE":
        if rng.random() < 0.5:
            return fake.rvnr(), False
        value = _german_tax_number(rng)
        return rng.choice((value, f"{value[:2]} {value[2:5]} {value[5:8]} {value[8:]}")), True
    if locale == "fr_FR":
        value = fake.ssn()
        spaced = f"{value[0]} {value[1:3]} {value[3:5]} {value[5:7]} {value[7:10]} {value[10:13]} {value[13:]}"
        return rng.choice((value, spaced)), False
    if locale == "es_ES":
        return rng.choice((fake.nif(), fake.nie())), False
    if locale == "pt_BR":
        return (fake.cpf(), False) if rng.random() < 0.6 else (fake.ssn(), True)
    if locale == "ja_JP":
        value = _my_number(rng)
        return rng.choice(
            (value, f"{value[:4]} {value[4:8]} {value[8:]}", f"{value[:4]}-{value[4:8]}-{value[8:]}")
        ), True
    if locale == "en_GB" and rng.random() < 0.5:
        a, b, c, last = (*(pick(rng, string.digits, 2) for _ in range(3)), rng.choice("ABCD"))
        prefix = rng.choice("ABCEHJLMPRSTWXY") + rng.choice("ABCEHJLMPRSWXY")
        return rng.choice((f"{prefix}{a}{b}{c}{last}", f"{prefix} {a} {b} {c} {last}")), False
    return fake.ssn(), False


def _german_tax_number(rng: random.Random) -> str:
    """Ten digits, one of them twice, and their check digit."""
    digits = rng.sample(string.digits, 9)
    digits.insert(rng.randrange(1, 9), rng.choice(digits[2:]))
    if digits[0] == "0":
        digits.append(digits.pop(0))
    value = "".join(digits)
    return value + mod_11_10.calc_check_digit(value)


def _my_number(rng: random.Random) -> str:
    digits = pick(rng, string.digits, 11)
    total = sum(int(digit) * (n + 1 if n <= 6 else n - 5) for n, digit in enumerate(reversed(digits), 1))
    return digits + str(0 if total % 11 <= 1 else 11 - total % 11)


def credentials(fake: Faker, rng: random.Random) -> Value:
    user, host = fake.user_name(), fake.domain_name()
    password = pick(rng, ALNUM, rng.randrange(6, 16)) + rng.choice(("", "!", "%40", "-_", "$"))
    token = pick(rng, rng.choice((ALNUM, HEX)), rng.randrange(20, 41))
    return rng.choice(
        (
            f"https://[[{user}:{password}]]@{host}/data",
            f"postgres://[[{user}:{password}]]@db.{host}:5432/app",
            f"mongodb+srv://[[{user}:{password}]]@cluster0.{host}/test",
            f"redis://[[:{password}]]@cache.{host}:6379/0",
            f"https://[[{token}]]@{host}/{user}/repo.git",
            f"https://[[{token}]]:@api.{host}/v1",
            f"mysql://[[{user}@{host}:{password}]]@db.{host}/shop",
            f"smtp://[[{user}%40{host}:{password}]]@mail.{host}:587",
            f"ftp://[[{user}:pa@{password}]]@ftp.{host}/pub",
            f"amqp://[[{user}:{password}]]@10.2.3.{rng.randrange(255)}:5672/",
        )
    ), False


def _base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _jwt(r: random.Random) -> str:
    payload = _base64(f'{{"sub":"{pick(r, string.digits, 10)}"}}')
    header = _base64('{"alg":"HS256","typ":"JWT"}')
    return f"{header}.{payload}.{pick(r, URL_SAFE, 43)}"


def _private_key(r: random.Random) -> str:
    kind = r.choice(("RSA ", "EC ", "OPENSSH ", ""))
    body = "\n".join(pick(r, BASE64, 64) for _ in range(6))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


KEYS: Mapping[str, Callable[[random.Random], str]] = {
    "anthropic": lambda r: f"sk-ant-api03-{pick(r, URL_SAFE, 93)}AA",
    "aws id": lambda r: f"{r.choice(('AKIA', 'ASIA'))}{pick(r, BASE32, 16)}",
    "azure entra": lambda r: f"{pick(r, ALNUM, 3)}{r.randrange(10)}Q~{pick(r, ALNUM + '_~.-', 33)}a",
    "azure storage": lambda r: (
        f"DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=[[{pick(r, BASE64, 86)}==]];"
        "EndpointSuffix=core.windows.net"
    ),
    "databricks": lambda r: f"dapi{pick(r, HEX, 32)}",
    "digitalocean": lambda r: f"do{r.choice('opr')}_v1_{pick(r, HEX, 64)}",
    "discord": lambda r: f"{r.choice('MNO')}{pick(r, ALNUM, 23)}.{pick(r, URL_SAFE, 6)}.{pick(r, URL_SAFE, 26)}a",
    "discord webhook": lambda r: (
        f"https://discord.com/api/webhooks/{pick(r, '123456789', 18)}/{pick(r, URL_SAFE, 67)}a"
    ),
    "docker": lambda r: f"dckr_pat_{pick(r, URL_SAFE, 26)}a",
    "github": lambda r: f"gh{r.choice('pousr')}_{pick(r, ALNUM, 36)}",
    "github fine-grained": lambda r: f"github_pat_{pick(r, ALNUM, 22)}_{pick(r, ALNUM, 59)}",
    "gitlab": lambda r: f"glpat-{pick(r, URL_SAFE, 19)}a",
    "google api": lambda r: f"AIza{pick(r, URL_SAFE, 34)}a",
    "google oauth": lambda r: f"GOCSPX-{pick(r, URL_SAFE, 27)}a",
    "grafana": lambda r: f"glsa_{pick(r, ALNUM, 32)}_{pick(r, HEX, 8)}",
    "groq": lambda r: f"gsk_{pick(r, ALNUM, 52)}",
    "heroku": lambda r: f"HRKU-AA{pick(r, URL_SAFE, 57)}a",
    "hugging face": lambda r: f"hf_{pick(r, string.ascii_letters, 34)}",
    "jwt": _jwt,
    "linear": lambda r: f"lin_api_{pick(r, ALNUM, 40)}",
    "mailchimp": lambda r: f"{pick(r, HEX, 32)}-us{r.randrange(1, 22)}",
    "mailgun": lambda r: f"key-{pick(r, HEX, 32)}",
    "new relic": lambda r: f"NRAK-{pick(r, UPPER, 27)}",
    "notion": lambda r: f"ntn_{pick(r, string.digits, 11)}{pick(r, ALNUM, 35)}",
    "npm": lambda r: f"npm_{pick(r, ALNUM, 36)}",
    "openai": lambda r: f"sk-proj-{pick(r, URL_SAFE, 74)}T3BlbkFJ{pick(r, URL_SAFE, 73)}a",
    "openai legacy": lambda r: f"sk-{pick(r, ALNUM, 20)}T3BlbkFJ{pick(r, ALNUM, 20)}",
    "perplexity": lambda r: f"pplx-{pick(r, ALNUM, 48)}",
    "postman": lambda r: f"PMAK-{pick(r, HEX, 24)}-{pick(r, HEX, 34)}",
    "private key": _private_key,
    "pulumi": lambda r: f"pul-{pick(r, HEX, 40)}",
    "pypi": lambda r: f"pypi-AgEIcHlwaS5vcmc{pick(r, URL_SAFE, 79)}a",
    "sendgrid": lambda r: f"SG.{pick(r, URL_SAFE, 22)}.{pick(r, URL_SAFE, 42)}a",
    "shopify": lambda r: f"shp{r.choice(('at', 'ca', 'pa', 'ss'))}_{pick(r, HEX, 32)}",
    "slack bot": lambda r: f"xoxb-{pick(r, '123456789', 11)}-{pick(r, '123456789', 12)}-{pick(r, ALNUM, 24)}",
    "slack webhook": lambda r: (
        f"https://hooks.slack.com/services/T{pick(r, UPPER, 8)}/B{pick(r, UPPER, 10)}/{pick(r, ALNUM, 24)}"
    ),
    "square": lambda r: f"sq0atp-{pick(r, URL_SAFE, 21)}a",
    "stripe": lambda r: f"{r.choice(('sk', 'rk'))}_live_{pick(r, ALNUM, 24)}",
    "telegram": lambda r: f"{pick(r, '123456789', 10)}:AA{pick(r, URL_SAFE, 32)}a",
    "terraform": lambda r: f"{pick(r, ALNUM, 14)}.atlasv1.{pick(r, URL_SAFE, 66)}a",
    "twilio": lambda r: f"SK{pick(r, HEX, 32)}",
    "vault": lambda r: f"hvs.{pick(r, URL_SAFE, 94)}a",
}  # fmt: skip
NAMED_KEYS: Mapping[str, tuple[str, Callable[[random.Random], str]]] = {
    "aws secret": ("aws_secret_access_key", lambda r: pick(r, BASE64, 39) + "a"),
    "azure": ("AZURE_CLIENT_SECRET", lambda r: pick(r, ALNUM, 32)),
    "twilio token": ("TWILIO_AUTH_TOKEN", lambda r: pick(r, HEX, 32)),
    "datadog": ("DATADOG_API_KEY", lambda r: pick(r, HEX, 32)),
    "cloudflare": ("cloudflare_api_token", lambda r: pick(r, URL_SAFE, 39) + "a"),
    "generic hex": ("api_key", lambda r: pick(r, HEX, 40)),
    "generic": ("client_secret", lambda r: pick(r, ALNUM, 24)),
    "session": ("SESSION_SECRET", lambda r: pick(r, ALNUM, 48)),
}
"""Keys that only their name identifies, with that name."""

VALUES: Mapping[str, Callable[[Faker, random.Random], Value]] = {
    "email": email, "phone": lambda f, r: phone(f, r) if r.random() < 0.6 else written_phone(f, r), "ip": ip,
    "card": card, "iban": iban, "national_id": national_id, "credentials": credentials,
}  # fmt: skip
