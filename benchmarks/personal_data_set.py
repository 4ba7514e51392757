"""A labeled set of personal data: sentences in eight languages around made-up values, and texts that only look like it.

Sentences and hard negatives are split by their templates, so that the test half has none that the development half has.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from faker import Faker
from personal_data_values import ALNUM, HEX, KEYS, LOCALES, NAMED_KEYS, VALUES, pick

SENTENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "": (
            "Yesterday {v} came up again in the meeting.", "Please note {v} and forget the old entry.",
            "She wrote {v} on the back of the envelope.", "The form says {v}; nothing else is filled in.",
            "* {v}\n* see above", "Is {v} still correct?", "My details: {v}, as before.", "({v})", '"{v}" was all he said.',
            "name;value\nMiller;{v}\n", "We found {v} in the old records, and removed it.", "{v}",
        ),
        "email": ("Write to {v} today.", "Contact: {v}", "Send the draft to {v}, please.", "<a href=\"mailto:{v}\">mail</a>",
                  "From: Ann <{v}>\nTo: Bob", "You can reach me under {v}."),
        "phone": ("Call me at {v} after six.", "Phone: {v}", "Tel. {v}", "My cell is {v}, text me.", "Mobile {v} (mornings only)",
                  "Dial {v} for the front desk."),
        "ip": ("The host {v} answered.", "Connection from {v} refused.", "Client IP: {v}", "ping {v} failed twice.",
               "Block the address {v} in the firewall.", "Accepted password for root from {v} port 22"),
        "card": ("Paid with card {v}, thanks.", "Card number: {v}", "My Visa is {v}.", "Charge {v} please.",
                 "The credit card {v} has expired.", "Mastercard or Maestro {v} accepted."),
        "iban": ("IBAN {v}", "Transfer the sum to {v} by Friday.", "Account: {v}", "Bank details {v} BIC COBADEFF"),
        "national_id": ("His SSN is {v}.", "Social security number {v}", "National Insurance number: {v}", "Tax ID {v} on file.",
                        "Her national ID number is {v}.", "Identification: {v}"),
    },
    "de": {
        "": ("Gestern kam {v} wieder zur Sprache.", "Bitte {v} vermerken, der alte Eintrag ist falsch.", "Im Formular steht {v}, sonst nichts.",
             "Stimmt {v} noch?", "Meine Angaben: {v}, wie gehabt.", "Sie schrieb {v} auf den Umschlag."),
        "email": ("Schreiben Sie an {v}.", "Kontakt: {v}", "Die Mail von {v} kam nie an."),
        "phone": ("Rufen Sie an: {v}", "Telefon {v}", "Mobil: {v}", "Tel.: {v} (werktags)", "Meine Handynummer ist {v}."),
        "ip": ("Der Server {v} antwortet nicht.", "Anmeldung von der IP-Adresse {v}", "Die Adresse {v} wurde gesperrt."),
        "card": ("Bezahlt mit der Karte {v}.", "Kreditkarte: {v}", "Die Kartennummer lautet {v}."),
        "iban": ("IBAN: {v}", "Bitte überweisen Sie auf {v}.", "Konto {v} bei der Sparkasse"),
        "national_id": ("Steuer-ID: {v}", "Meine Steueridentifikationsnummer ist {v}.", "Rentenversicherung und Steuernummer: {v}", "IdNr. {v}"),
    },
    "fr": {
        "": ("Hier, {v} est revenu dans la discussion.", "Veuillez noter {v}.", "Le formulaire indique {v}, rien d'autre.",
             "Est-ce que {v} est correct ?", "Elle a écrit {v} sur l'enveloppe."),
        "email": ("Écrivez à {v}.", "Courriel : {v}", "Le message de {v} n'est jamais arrivé."),
        "phone": ("Appelez-moi au {v}.", "Téléphone : {v}", "Tél. {v}", "Mon portable : {v}"),
        "ip": ("Le serveur {v} ne répond pas.", "Connexion depuis l'adresse {v}", "IP : {v}"),
        "card": ("Payé avec la carte {v}.", "Numéro de carte bancaire : {v}", "Ma carte {v} a expiré."),
        "iban": ("IBAN : {v}", "Virement sur le compte {v}.", "RIB {v}"),
        "national_id": ("Numéro de sécurité sociale : {v}", "Son NIR est {v}.", "Assuré {v}", "N° de sécu {v}"),
    },
    "es": {
        "": ("Ayer {v} volvió a salir en la reunión.", "Por favor, anote {v}.", "El formulario dice {v}, nada más.",
             "¿Sigue siendo correcto {v}?", "Escribió {v} en el sobre."),
        "email": ("Escriba a {v}.", "Correo: {v}", "El mensaje de {v} nunca llegó."),
        "phone": ("Llámame al {v}.", "Teléfono: {v}", "Tel. {v}", "Mi móvil es {v}."),
        "ip": ("El servidor {v} no responde.", "Conexión desde la dirección {v}", "IP: {v}"),
        "card": ("Pagado con la tarjeta {v}.", "Número de tarjeta: {v}", "Mi tarjeta {v} ha caducado."),
        "iban": ("IBAN: {v}", "Haga la transferencia a {v}.", "Cuenta {v}"),
        "national_id": ("DNI {v}", "Su NIF es {v}.", "Documento de identidad: {v}", "NIE: {v}"),
    },
    "pt": {
        "": ("Ontem {v} voltou à conversa.", "Por favor, anote {v}.", "O formulário diz {v}, nada mais.",
             "Ainda está correto {v}?", "Ela escreveu {v} no envelope."),
        "email": ("Escreva para {v}.", "E-mail: {v}", "A mensagem de {v} não chegou."),
        "phone": ("Ligue para {v}.", "Telefone: {v}", "Tel. {v}", "Meu celular é {v}."),
        "ip": ("O servidor {v} não responde.", "Conexão do endereço {v}", "IP: {v}"),
        "card": ("Pago com o cartão {v}.", "Número do cartão: {v}", "Meu cartão {v} venceu."),
        "iban": ("IBAN: {v}", "Transfira para {v}.", "Conta {v}"),
        "national_id": ("CPF {v}", "O CPF dele é {v}.", "Contribuinte {v}", "CPF nº {v}, Rio de Janeiro"),
    },
    "zh": {
        "": ("昨天会上又提到了{v}。", "请记下{v}，谢谢。", "表格上写着{v}，没有别的。", "{v}还正确吗？", "她把{v}写在信封上了"),
        "email": ("请发邮件到{v}。", "邮箱：{v}", "联系{v}即可", "我的邮箱是{v}，欢迎来信"),
        "phone": ("请致电{v}。", "电话：{v}", "手机号码{v}", "联系电话{v}转张先生", "他的手机是{v}"),
        "ip": ("服务器{v}没有响应。", "来自地址{v}的登录", "IP地址：{v}"),
        "card": ("用信用卡{v}付款。", "卡号：{v}", "银行卡{v}已过期"),
        "iban": ("请汇款至{v}。", "IBAN账号{v}", "收款账户：{v}"),
        "national_id": ("身份证号{v}。", "他的身份证号码是{v}，请核对", "证件号码：{v}", "公民{v}已登记"),
    },
    "ja": {
        "": ("昨日また{v}の話が出ました。", "{v}を控えてください。", "書類には{v}とだけあります。", "{v}は正しいですか。", "封筒に{v}と書いてあった"),
        "email": ("{v}までご連絡ください。", "メール：{v}", "お問い合わせは{v}へ", "私のアドレスは{v}です"),
        "phone": ("電話番号は{v}です。", "電話：{v}", "携帯{v}まで", "TEL {v}", "連絡先{v}（平日のみ）"),
        "ip": ("サーバ{v}が応答しません。", "アドレス{v}から接続", "IPアドレス：{v}"),
        "card": ("カード{v}で支払いました。", "カード番号：{v}", "クレジットカード{v}は期限切れです"),
        "iban": ("{v}へ送金してください。", "IBANは{v}です", "口座：{v}"),
        "national_id": ("マイナンバーは{v}です。", "マイナンバー：{v}", "個人番号{v}を記入", "個人番号（{v}）"),
    },
}  # fmt: skip
"""By language and kind; those of "" name no kind."""
_LANGUAGE = {"zh_CN": "zh", "ja_JP": "ja"}

URLS = ("DATABASE_URL={v}", "Use {v} for the staging system.", "git clone {v}", "url: '{v}'", "curl -s {v}", "连接{v}失败",
        "{v}に接続します", "Der Dienst läuft unter {v}.", "conn = connect(\"{v}\")", "broker={v};retry=3", "The old URL was {v}.",
        "wget {v} -O out")  # fmt: skip
KEY_TEMPLATES = ("export KEY={v}", "key: {v}", "token = '{v}'", 'The key is "{v}".', "I pasted {v} into the chat.", "密钥{v}已泄露。",
                 "トークンは{v}です", '{{"value": "{v}"}}', "curl -H 'X-Key: {v}' https://api.example.org", "# {v}", "Mein Schlüssel: {v}",
                 "const k = `{v}`;")  # fmt: skip
NAMED_TEMPLATES = ("{n}={v}", '{n} = "{v}"', "{n}: {v}", '"{n}": "{v}",', "export {n}='{v}'", "os.environ['{n}'] = '{v}'", "{n} := `{v}`",
                   "set {n}={v}")  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A text, whether it is code, and the values in it: kind, start and end."""

    text: str
    is_code: bool
    values: tuple[tuple[str, int, int], ...]
    locale: str = ""


def labeled(half: str, *, per_kind: int, seed: int = 0) -> list[Example]:
    """Examples with values of all kinds, from the templates of one half ("development" or "test")."""
    rng = random.Random(f"{seed} {half} values")
    Faker.seed(rng.randrange(2**32))
    result: list[Example] = []
    for locale in LOCALES:
        fake = Faker(locale)
        sentences = SENTENCES[_LANGUAGE.get(locale, locale[:2])]
        for kind, make in VALUES.items():
            for _ in range(per_kind // len(LOCALES)):
                value, needs_name = make(fake, rng)
                templates = halved(URLS if kind == "credentials" else sentences[kind], half)
                if kind not in ("credentials", "ip") and not needs_name and rng.random() < 0.4:
                    templates = halved(sentences[""], half)
                result.append(_example(kind, rng.choice(templates), value, False, locale))
    for number in range(per_kind):
        name = list(KEYS)[number % len(KEYS)]
        result.append(_example("secret", rng.choice(halved(KEY_TEMPLATES, half)), KEYS[name](rng), rng.random() < 0.5))
    for number in range(per_kind // 2):
        name, make_key = list(NAMED_KEYS.values())[number % len(NAMED_KEYS)]
        template = rng.choice(halved(NAMED_TEMPLATES, half)).replace("{n}", name)
        result.append(_example("secret", template, make_key(rng), True))
    return result


def halved(templates: tuple[str, ...], half: str) -> list[str]:
    """Half of the templates, by a shuffle with a fixed seed."""
    shuffled = sorted(templates, key=lambda template: random.Random(f"half {template}").random())
    return shuffled[::2] if half == "development" else shuffled[1::2] or shuffled


def _example(kind: str, template: str, value: str, is_code: bool, locale: str = "") -> Example:
    """The value in its template; of a value with `[[brackets]]` only what they enclose is labeled."""
    start = template.replace("{{", "{").index("{v}")
    text = template.replace("{{", "{").replace("}}", "}").replace("{v}", value)
    end = start + len(value)
    if "[[" in value:
        start, end = text.index("[["), text.index("]]") - 2
        text = text.replace("[[", "").replace("]]", "")
    return Example(text, is_code, ((kind, start, end),), locale)


NEGATIVES = (
    "mode change 100644 100644 {w}.py", "100644 blob {hex40}\t{w}.c", "100755 blob {hex40}    {d5}\t{w}.sh",
    "-rw-r--r-- root/root {d5} 20{d2}-0{d1}-1{d1} 12:3{d1} ./usr/{w}", "drwxr-xr-x 0/0 0 20{d2}-1{e1}-2{e1} 0{d1}:0{d1} usr/",
    "0000644 0001750 0001750 0000000{d4} 1{d10}", "see section {s}.{s}.{s}.{s} of the manual", "{s}.{s}.{s}.{s} Scope of this clause",
    "According to §{s}.{s}.{s}.{s}, the tenant pays.", "Abschnitt {s}.{s}.{s}.{s} regelt das.", "第{s}.{s}.{s}.{s}节说明如下",
    "version {s}.{s}.{d3}.{s} was released", "{w}-{s}.{s}.{s}.{d3}.tar.gz", "Upgrade to v{s}.{s}.{s}.{s} now.", "バージョン{s}.{s}.{s}.{s}以降",
    "{w} ({s}.{s}.{s}.{s}) unstable; urgency=low", "driver release {s}{s}.{s}.{d2}.{d2}", "Chrome/9{d1}.0.{d4}.{d2} Safari/537.36",
    "OID 1.3.6.1.4.1.{d4}.{s}", "OID 1.3.6.1", "Figure {s}.{s}.{s}.{s}: the engine", "== {s}.{s}.{s}.{s} {w} ==", "up to {d3},{d3},{d3} people",
    "ISBN 978-3-16-{d6}-{d1}", "ISBN-10: 0-{d3}-{d5}-{d1}", "ISBN: 978{d10}", "ISSN {d4}-{d4}", "ISBN 0{d9}", "ISBN 978-0-{d3}-{d5}-{d1} (hardcover)",
    "pages {d3}-{d3}, {d4}-{d4}", "pp. 1{d3}–1{d3}", "J. {w} 12(3), {d3}-{d3}, 1987-1999", "vol. 2{d1} (200{d1}) 1{d3}-1{d3}",
    "U+0{d3}-0{d3} and U+1F{d3}", "U+{d4}..U+{d4}", "Unicode range {d4}-{d4}, {d4}-{d4}", "\\u{d4}\\u{d4}\\u{d4}", "code points 0{d3}–0{d3} {w}",
    "api_key = YOUR_API_KEY_HERE", "OPENAI_API_KEY=sk-xxxxxxxxxxxxxxxxxxxxxxxx", "token: <your-access-token-here>", "password = 'changeme123'",
    "export AWS_SECRET_ACCESS_KEY=YOUR_SECRET_ACCESS_KEY_GOES_HERE01", "Authorization: Bearer YOUR_ACCESS_TOKEN_12345", "sk-your-key-goes-here-1234567890",
    "aws_access_key_id = AKIAIOSFODNN7EXAMPLE", "secret_key = '{{{{ lookup_secret_key_from_vault1 }}}}'", "api_key=${{API_KEY_FROM_ENV_1}}",
    "ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "token = get_access_token_for_user1(session)", "password: '********************'",
    "api_key: 0000000000000000000000000000", "https://user:password@host/path", "ftp://username:password@ftp.example.com/",
    "postgres://USER:PASSWORD@HOST:5432/NAME", "https://<token>@github.com/{w}/{w}.git", "http://user@host.example/{w}", "ssh://git@github.com/{w}/{w}.git",
    "secret_name = 'projects/{w}/secrets/{w}-v2-2020'", "key = self.{w}_key_2_index_for_table_3[{d1}]", "token = tokenizer.{w}_token_id_2_string_v3",
    "logo@2x.png", "icon-{w}@3x.jpg", "getty@tty{d1}.service", "user@{d4}.service", "{w}@.timer unit", "git@github.com:{w}/{w}.git", "git@HOST:{w}/{w}",
    "git@gitlab.{w}.org:{w}/{w}.git", "Item@1b6d{d4}.toString", "com.{w}.Item@{hex8}.hashCode()", "npm install {w}@{s}.{s}.{s}", "@{w}/core@^{s}.{s}.0",
    "user@host", "root@localhost:~#", "{w}@{w}.local", "q @ k.T and a@b.mean()", "@media (max-width: {d3}px)", "uses: actions/checkout@v4.{s}.{s}",
    "dbus-:1.2-org.{w}@{d1}.service", "{w}.{w}@{hex8}.so.{d1}", "sha256:{hex64}", "commit {hex40}", "md5 {hex32}  {w}.iso", "etag: \"{hex32}\"",
    "{hex8}-{hex4}-4{hex3}-a{hex3}-{hex12}", "uuid = {hex8}-{hex4}-4{hex3}-b{hex3}-{hex12}", "request token {hex8}-{hex4}-4{hex3}-b{hex3}-{hex12}",
    "integrity: sha512-{b64}==", "index {hex7}..{hex7} 100644", "data:image/png;base64,{b64}", "1{d9}", "1{d12}", "timestamp 1{d9}.{d6}",
    "20{d2}-0{e1}-1{d1}T0{d1}:2{d1}:3{d1}Z", "20{d2}0{e1}1{d1}12{d2}30", "{d2}/0{e1}/20{d2} 10:2{d1}", "1{d1}.0{e1}.19{d2}, 2{e1}.1{e1}.20{d2}",
    "from 19{d2}-20{d2} and 1{d1}-1{d1}", "[{d2}:{d2}:{d2}.{d6}]", "$1,{d3},{d3}.{d2}", "price {d2} {d3} {d3} EUR", "€{d3}.{d3}.{d3},{d2}", "12 {d3} {d3} inhabitants",
    "order number {d10}", "Order #{d3}-{d7}-{d7}", "tracking 1Z{d10}", "invoice no. {d8}", "订单号{d15}", "Auftragsnummer {d10}", "注文番号{d12}", "part number {d4}-{d4}-{d4}",
    "52.{d6}, 13.{d6}", "lat={d2}.{d8}&lon=-{d2}.{d8}", "-{d2}.{d4} {d3}.{d4}", "N 48° 51.{d4} E 2° 21.{d4}", "coordinates 4{d1}{d6} 1{d1}{d6}",
    "0x{hex8} 0x{hex8}", "{hex2}:{hex2}:{hex2}:{hex2}:{hex2}:{hex2}", "00000{d3}  7f 45 4c 46 02 01 01 00", "std::vector<int>::iterator a::b::c", "127.0.0.1:{d4}",
    "192.168.{d2}.{d2}/24", "10.0.{d1}.{d2}", "224.0.0.{d3}", "0.0.0.0/0", "::1 localhost", "fe80::1%lo0", "2001:db8::{hex4}", "12:34:56 up {d2} days",
    "0 1 1 2 3 5 8 13 21 34 55 89 144 233 377 610 987", "{d4} {d4} {d4} {d4} {d4} {d4}", "3.14159265358979 2.{d15}", "{d3} {d3} {d3} {d3} {d3}", "1{d3} 2{d3} 3{d3}",
    "RFC {d4}, RFC {d4}", "CVE-20{d2}-{d5}", "bug #{d7}", "arXiv:20{d2}.{d5}", "doi:10.{d4}/{w}.20{d2}.{d6}", "{d5}-{d4} ZIP", "PMID: {d8}", "{d4}-{d4}-{d4}-{w}",
    "line {d4}: {d8} bytes in {d5} blocks", "==12345== {d9} bytes", "[{d5}.{d6}] usb 1-1: new device", "{d8}K .......... .......... {d2}%", "PID {d6} UID {d4}",
    "array([{d1}.{d8}, {d1}.{d8}])", "seed={d9}, n={d6}", "const x = {d10};", "id: {d9}", "http://{w}.org/?id={d10}&v={d6}", "EAN 40{d10}{d1}", "SKU {d8}{u1}", "part AB-{d6}-{u1}",
    "model {u2}{d6}", "flight LH{d4}, seat {d2}{u1}", "room {d3}-{d2}-{d2}", "score 21-{d2}-20{d2}", "tel quel", "mobile first design, 1024-2048 px", "call stack depth 100-200",
    "phone screens of {d4} x {d4} pixels", "port {d5}", "DE{d9} VAT", "FR{d2}", "GB{d2} is a region", "CardLayout 4x4 1111", "SE{d2} ABCD {d4}", "人口{d8}人", "第{d3}页至第{d3}页",
    "2020年1{e1}月2{d1}日 1{d1}:3{d1}", "〒{d3}-{d4} 東京都", "￥{d3},{d3}", "编号{d8}", "{d4}/{d4}/{d4} {w}", "ratio {d3}:{d3}:{d3}", "({d4}, {d4}, {d4})", "x = {d3}-{d3}-{d4}+y;",
)  # fmt: skip
"""Texts without personal data; `{d4}` are four digits, `{hex8}` eight hexadecimal ones, `{s}` a small number, `{w}` a
word."""
_WORDS = ("alpha", "engine", "parser", "report", "widget", "delta", "core", "render", "station", "module", "harbor")


def negatives(half: str, *, count: int, seed: int = 0) -> list[Example]:
    """Examples without values, from the templates of one half."""
    rng = random.Random(f"{seed} {half} negatives")
    templates = halved(NEGATIVES, half)
    return [Example(_fill(templates[n % len(templates)], rng), rng.random() < 0.3, ()) for n in range(count)]


def _fill(template: str, rng: random.Random) -> str:
    return "".join(_filled(template.replace("{{", "\x01").replace("}}", "\x02"), rng)).translate({1: "{", 2: "}"})


def _filled(template: str, rng: random.Random) -> Iterator[str]:
    for part in template.split("{"):
        if "}" not in part:
            yield part
            continue
        field, _, rest = part.partition("}")
        name, size = field.rstrip("0123456789"), int("0" + field.lstrip("abcdefghijklmnopqrstuvwxyz")[-2:])
        if field == "b64":
            yield pick(rng, ALNUM, 86) + rest
        elif name == "w":
            yield rng.choice(_WORDS) + rest
        elif name == "s":
            yield str(rng.choice((rng.randrange(1, 10), rng.randrange(1, 50)))) + rest
        else:
            alphabet = {"d": "0123456789", "e": "012", "hex": HEX, "u": "ABCDEFGHJKLMNPRSTVWXYZ"}[name]
            yield pick(rng, alphabet, size) + rest
