"""Labeled texts from sources that no limit of the step quality was tuned on; `quality_sets.py --set foreign` measures.

Good text: code in JavaScript, Perl and C of this machine, manual pages in fifteen languages that the first set does not
have, LaTeX as sympy writes it around sentences of mimesis, chats in six layouts, tables of pandas, and poems in
the public domain. Bad text is made of the manual pages: cut out of the middle, read by a bad scanner (other confusions
than in `quality_sets.py`), lists of words in any order, and the error pages of nine servers.
"""

# ruff: noqa: E501 - tables of made-up texts

import gzip
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pandas as pd
import sympy
from faker import Faker
from mimesis import Generic, Locale  # pyright: ignore[reportMissingImports]

_LANGUAGES = ("cs", "da", "hu", "id", "it", "ko", "nl", "pl", "pt_BR", "ro", "ru", "sl", "sr", "sv", "tr")
_SPEECH = ("en", "pl", "ru", "it", "sv", "cs", "nl", "tr")
_CODE = ("*.js", "*.pl", "*.pm", "*.c")
POEMS = (
    "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\nCould frame thy fearful "
    "symmetry?\n\nIn what distant deeps or skies,\nBurnt the fire of thine eyes?\nOn what wings dare he aspire?\nWhat "
    "the hand, dare seize the fire?",
    "Because I could not stop for Death –\nHe kindly stopped for me –\nThe Carriage held but just Ourselves –\nAnd "
    "Immortality.\n\nWe slowly drove – He knew no haste\nAnd I had put away\nMy labor and my leisure too,\nFor His Civility –",
    "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake the darling "
    "buds of May,\nAnd summer's lease hath all too short a date:",
    "Über allen Gipfeln\nIst Ruh,\nIn allen Wipfeln\nSpürest du\nKaum einen Hauch;\nDie Vögelein schweigen im Walde.\n"
    "Warte nur, balde\nRuhest du auch.",
    "Ich weiß nicht, was soll es bedeuten,\nDaß ich so traurig bin;\nEin Märchen aus alten Zeiten,\nDas kommt mir nicht "
    "aus dem Sinn.",
    "Les sanglots longs\nDes violons\nDe l'automne\nBlessent mon cœur\nD'une langueur\nMonotone.",
    "Demain, dès l'aube, à l'heure où blanchit la campagne,\nJe partirai. Vois-tu, je sais que tu m'attends.\nJ'irai par "
    "la forêt, j'irai par la montagne.\nJe ne puis demeurer loin de toi plus longtemps.",
    "Nel mezzo del cammin di nostra vita\nmi ritrovai per una selva oscura,\nché la diritta via era smarrita.\n\nAhi quanto "
    "a dir qual era è cosa dura\nesta selva selvaggia e aspra e forte\nche nel pensier rinova la paura!",
    "Я помню чудное мгновенье:\nПередо мной явилась ты,\nКак мимолетное виденье,\nКак гений чистой красоты.",
    "Verde que te quiero verde.\nVerde viento. Verdes ramas.\nEl barco sobre la mar\ny el caballo en la montaña.",
    "The fog comes\non little cat feet.\n\nIt sits looking\nover harbor and city\non silent haunches\nand then moves on.",
    "O Captain! my Captain! our fearful trip is done,\nThe ship has weather'd every rack, the prize we sought is won,\n"
    "The port is near, the bells I hear, the people all exulting,\nWhile follow eyes the steady keel, the vessel grim and daring;",
)  # fmt: skip
_PAGES = (
    "Error response\n\nError code: {code}\n\nMessage: {what}.\n\nError code explanation: {code} - Nothing matches the given URI.",
    "{code} {what}\n\nnginx/1.{n}.{m}",
    "{what}\n\nThe requested URL was not found on the server. If you entered the URL manually please check your spelling and try again.",
    "Oops! That page can't be found.\n\nIt looks like nothing was found at this location. Maybe try a search?",
    "This site can't be reached\n\n{host} took too long to respond.\n\nTry:\nChecking the connection\nChecking the proxy and the firewall\n\nERR_CONNECTION_TIMED_OUT",
    "Error 1020 Ray ID: {ray}\n\nAccess denied\n\nWhat happened?\nThis website is using a security service to protect itself from online attacks.\n\nPerformance & security by Cloudflare",
    "HTTP Status {code} – {what}\n\nType Status Report\n\nMessage /{host}\n\nDescription The origin server did not find a current representation for the target resource.\n\nApache Tomcat/9.0.{n}",
    "Seite nicht gefunden\n\nDie angeforderte Seite konnte leider nicht gefunden werden (Fehler {code}).\n\nZur Startseite",
    "Service Unavailable\n\nThe server is temporarily unable to service your request due to maintenance downtime or capacity problems. Please try again later.",
)  # fmt: skip
_STATUS = {
    404: "Not Found",
    403: "Forbidden",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
}


def pages(folder: Path, *languages: str) -> Iterator[str]:
    """Plain text of manual pages: requests of roff and definitions are left out, fonts and escapes are resolved."""
    for language in languages:
        for path in sorted((folder / language).rglob("*.gz")):
            raw = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
            raw = re.sub(
                r"(?ms)^\.\s*(?:de|ig)\b.*?^\.\.$|^[.'].?\\\".*?$|^\.\s*(?:if|ie|el|ds|nr|tr|TH|so|rr)\b.*?$", "", raw
            )
            text = re.sub(r"(?m)^[.']\s*(?:\w+ ?)?\"?|\"$", "", raw)
            text = re.sub(r"\\f(?:\(..|\[\w*\]|.)|\\[&|^/,:%]|\\[*(](?:\(?..)?", "", text).replace("\\-", "-")
            text = re.sub(r"\n{3,}", "\n\n", re.sub(r"\\(?=\s|e|\.)|\\s[-+]?\d", "", text)).strip()
            if len(text) > 400 and text.count("\\") < 0.002 * len(text):
                yield text[:5000]


def good(count: int, man: Path, roots: tuple[Path, ...], rng: random.Random) -> dict[str, list[str]]:
    """Texts by kind."""
    made = {name: Generic(Locale(name), seed=rng.randrange(2**32)) for name in _SPEECH}
    files = [path for root in roots for pattern in _CODE for path in islice(root.rglob(pattern), 4000)]
    files = [path for path in files if not {"unicore", "Locale", "CJK"} & {*path.parts}]  # tables of Unicode
    rng.shuffle(files)
    code: list[str] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")[:3000]
        # Minified files are data.
        if len(text) > 400 and max(map(len, text.split("\n"))) < 200 and len(code) < count:
            code.append(text)
    manuals = {name: [*islice(pages(man, name), count)] for name in _LANGUAGES}
    foreign = [page for name in manuals for page in manuals[name][: max(3, count // 8)]]
    return {
        "code of other languages": code, "manual, other languages": foreign,
        "LaTeX": [_latex(rng, made) for _ in range(count)], "chat logs": [_chat(rng, made) for _ in range(count)],
        "tables of pandas": [_table(rng) for _ in range(count)], "poems": [*POEMS],
        "sentences": [made[name].text.text(quantity=6) for name in _SPEECH for _ in range(count // 8)],
    }  # fmt: skip


def _latex(rng: random.Random, made: dict[str, Generic]) -> str:
    x, y, n = sympy.symbols("x y n")
    terms = (
        sympy.Integral(sympy.sin(rng.randrange(2, 9) * x) / (x**2 + rng.randrange(1, 9)), (x, 0, sympy.oo)),
        sympy.Sum(1 / n ** rng.randrange(2, 6), (n, 1, sympy.oo)), sympy.Matrix(2, 2, [x, y, rng.randrange(9), x * y]),
        sympy.Derivative(sympy.exp(x * y) * sympy.sqrt(x + rng.randrange(9)), x), sympy.Eq(x**2 + y**2, rng.randrange(99)),
    )  # fmt: skip
    parts = [rf"\section{{{made['en'].text.title()}}}\label{{sec:{rng.randrange(99)}}}"]
    for term in rng.sample(terms, 4):
        sentence = made[rng.choice(("en", "it", "sv"))].text.sentence()
        parts.append(f"{sentence} \\begin{{equation}}\n  {sympy.latex(term)}\n\\end{{equation}}")
    return "\n\n".join(
        [*parts, rf"Hence ${sympy.latex(terms[4].args[0])} \le {rng.randrange(9)}$ by \cite{{k{rng.randrange(99)}}}."]
    )


def _chat(rng: random.Random, made: dict[str, Generic]) -> str:
    voice = made[rng.choice(_SPEECH)]
    people, layout, lines = [voice.person.first_name() for _ in range(3)], rng.randrange(6), list[str]()
    for turn in range(rng.randrange(8, 25)):
        who, time = rng.choice(people), f"{rng.randrange(24):02}:{turn:02}"
        said = rng.choice((voice.text.sentence(), voice.text.sentence()[:60], "ok", "lol", voice.text.quote(), ":)"))
        forms = (
            f"<{who}> {said}",
            f"[{time}] {who}: {said}",
            f"{who} ({time})\n{said}",
            f"{time} - {who}: {said}",
            f"**{who}**: {said}",
            f"{who}> {said}",
        )
        lines.append(forms[layout])
    return "\n".join(lines)


def _table(rng: random.Random) -> str:
    Faker.seed(rng.randrange(2**32))
    fake = Faker(rng.choice(("en_US", "pl_PL", "it_IT")))
    frame = pd.DataFrame(
        [{"name": fake.name(), "city": fake.city(), "born": fake.year(), "job": fake.job()} for _ in range(12)]
    )
    return (
        frame.to_string()
        if rng.random() < 0.5
        else frame.to_html(index=False)
        if rng.random() < 0.3
        else frame.to_csv(sep="\t")
    )


def truncated(text: str, rng: random.Random) -> str:
    words = " ".join(text.split())
    start, size = rng.randrange(max(1, len(words) - 400)), rng.randrange(30, 250)
    return words[start : start + size]


def scanned(text: str, rng: random.Random) -> str:
    """Confusions of letters, blanks inside of words, and words that run together."""
    pairs = {
        "rn": "m",
        "m": "rn",
        "cl": "d",
        "h": "b",
        "e": "c",
        "l": "1",
        "i": "l",
        "o": "0",
        "u": "ii",
        "w": "vv",
        "S": "5",
        "B": "8",
        "g": "9",
    }
    result, at, share = list[str](), 0, rng.uniform(0.15, 0.35)
    text = text[:1500]
    while at < len(text):
        part = next((one for one in pairs if text.startswith(one, at)), text[at])
        made = pairs[part] if part in pairs and rng.random() < share else part
        if part == " " and rng.random() < 0.1:
            made = ""
        elif part.isalpha() and rng.random() < 0.08:
            made += rng.choice((" ", "'", "~", "."))
        result.append(made)
        at += len(part)
    return "".join(result)


def word_list(text: str, rng: random.Random) -> str:
    words = list(dict.fromkeys(re.findall(r"\w{3,}", text.lower())))
    order = rng.randrange(3)
    words = sorted(words) if order == 0 else sorted(words, key=len) if order == 1 else rng.sample(words, len(words))
    return rng.choice(("\n", ", ", " ", " | ", "\n- ")).join(words[:400])


def error_page(text: str, rng: random.Random) -> str:
    code = rng.choice(list(_STATUS))
    host, ray = f"www.site{rng.randrange(999)}.example", f"{rng.randrange(16**12):x}"
    return rng.choice(_PAGES).format(
        code=code, what=_STATUS[code], n=rng.randrange(30), m=rng.randrange(9), host=host, ray=ray
    )


BAD: dict[str, Callable[[str, random.Random], str]] = {
    "truncated in the middle": truncated, "other bad scans": scanned, "lists of words": word_list, "error pages": error_page,
}  # fmt: skip
