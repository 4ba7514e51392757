"""API keys, tokens, private keys and passwords, and credentials in URLs.

The formats are those that the providers publish; the rule sets of gitleaks (config/gitleaks.toml) and detect-secrets
(detect_secrets/plugins) list them too.
"""

import re

from modelwright.data.clean.patterns import Candidate, Match, Pattern, ascii_regex, whole, words

_BEGIN, _END = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
# Limits for random values: their letters and digits alternate; those of identifiers such as `TokenId2` do not.
_FEWEST_DISTINCT_CHARS = 8
_FEWEST_DIGIT_RUNS = 3
_FEWEST_CASE_CHANGES = 3

_CASE_CHANGE = re.compile("[a-z][A-Z]")
_PLACEHOLDER = words(
    r"your|example|placeholder|change.?me|replace|redacted|dummy|sample|insert|xxxx|\*\*\*|\.\.\.|0000000|"
    r"abcdefghijklmnopqrstuvwxyz|1234567890|<|\{|\$|_here\b"
)
# User name and password as documentation writes them.
_PLACEHOLDER_USERINFO = words(
    r"^(?:user(?:name)?|login|name|admin|root|me|foo|u)?:(?:p|pw|pass(?:word|wd)?|pwd|secret|token|bar)$|"
    r"[<>{}\[\]]|(?:^|:)\$(?:[A-Z_]{2,}$|\()|%[sd(]|\.\.\.|:[x*]+$|\byour|placeholder|:[^:@]*(?:example|password)|my_?pass"
)
# Lower-case words joined by `_`, `-`, `.` or `/`, with at most a short number after each.
_IDENTIFIER = re.compile(r"(?=.{25})[a-z]+(?:[_\-./][a-z]*[0-9]{0,4})+")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")


def is_placeholder(value: str) -> bool:
    """True for placeholders of documentation in place of a secret: `YOUR_API_KEY_HERE`, `sk-xxxx`."""
    return bool(_PLACEHOLDER.search(value)) or len(set(value)) < _FEWEST_DISTINCT_CHARS


def _key(candidate: Candidate) -> Match | None:
    # The format alone identifies the key.
    return None if is_placeholder(candidate.value) else whole(candidate)


def _random_key(candidate: Candidate) -> Match | None:
    """Checks a value that only its name makes a key: it must be random, not a word, an identifier, a path or a UUID."""
    value = candidate.value
    num_digit_runs = len(re.findall(r"[0-9]+", value))
    is_mixed = len(_CASE_CHANGE.findall(value)) >= _FEWEST_CASE_CHANGES
    is_random = num_digit_runs >= _FEWEST_DIGIT_RUNS or (num_digit_runs and is_mixed)
    is_word = not re.search(r"[A-Za-z]", value) or _IDENTIFIER.fullmatch(value) or _UUID.fullmatch(value)
    return whole(candidate) if is_random and not is_word and not is_placeholder(value) else None


def _named_key(candidate: Candidate) -> Match | None:
    """Checks a random value that a name assigns, such as `api_key = `, or a provider, such as `twilio sid: `."""
    match = _random_key(candidate)
    is_other = re.match(r"/|\./|0x|000102", candidate.value) or candidate.follows(_RESOURCE_NAME)
    return match if match is not None and not is_other and candidate.follows(_NAME_OF_KEY) else None


def _password(candidate: Candidate) -> Match | None:
    """Checks a password in quotes: it has three of the four classes of characters."""
    value = candidate.value
    classes = sum(bool(re.search(pattern, value)) for pattern in ("[a-z]", "[A-Z]", "[0-9]", "[^A-Za-z0-9]"))
    if classes < 3 or _PLACEHOLDER.search(value) or re.search(r"(?i)passw|secret|[()\[\];,\\]", value):
        return None
    return whole(candidate)


def _credentials(candidate: Candidate) -> Match | None:
    """Checks a user name with a password, or a token in the place of both; a user name alone does not count."""
    value = candidate.value
    if _PLACEHOLDER_USERINFO.search(value):
        return None
    if ":" in value and not value.endswith(":"):
        return whole(candidate)
    token = value.rstrip(":")
    has_digits = re.search(r"[0-9]", token) and re.search(r"[A-Za-z]", token)
    is_random = has_digits or len(_CASE_CHANGE.findall(token)) >= _FEWEST_CASE_CHANGES
    return whole(candidate) if len(token) >= 16 and is_random and not is_placeholder(token) else None


# Provider, anchors and format of keys that their prefix or structure identifies.
_KEYS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("1password", ("ops_eyj",), r"ops_eyJ[A-Za-z0-9+/]{200,2000}={0,3}"),
    ("age", ("age-secret-key-1",), r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    ("airtable", (), r"pat[A-Za-z0-9]{14}\.[a-f0-9]{64}"),
    ("alibaba", ("ltai",), r"LTAI[A-Za-z0-9]{12,20}"),
    ("anthropic, openai, openrouter", ("sk-",), r"sk-(?:ant-|proj-|svcacct-|admin-|or-v1-)?[A-Za-z0-9_\-]{20,250}"),
    ("artifactory", ("akcp",), r"AKCp[A-Za-z0-9]{69}"),
    ("atlassian", ("atatt3",), r"ATATT3[A-Za-z0-9_\-=]{80,250}"),
    ("aws", ("akia", "asia", "abia", "acca", "agpa", "aida", "aroa", "a3t"),
     r"(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|A3T[A-Z0-9])[A-Z0-9]{16}"),
    ("aws bedrock", ("absk",), r"ABSK[A-Za-z0-9+/]{109,269}={0,2}"),
    ("azure entra", ("q~",), r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.\-]{31,34}"),
    ("clickhouse", ("4b1d",), r"4b1d[A-Za-z0-9]{38}"),
    ("clojars", ("clojars_",), r"(?i:CLOJARS_[a-z0-9]{60})"),
    ("databricks", ("dapi",), r"dapi[a-f0-9]{32}(?:-\d)?"),
    ("digitalocean", ("_v1_",), r"do[opr]_v1_[a-f0-9]{64}"),
    ("discord", (), r"[MNO][A-Za-z0-9_\-]{23,27}\.[A-Za-z0-9_\-]{6}\.[A-Za-z0-9_\-]{27,40}"),
    ("discord webhook", ("/api/webhooks/",),
     r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/\d{17,20}/[A-Za-z0-9_\-]{60,80}"),
    ("docker", ("dckr_",), r"dckr_(?:pat|oat)_[A-Za-z0-9_\-]{27,40}"),
    ("doppler", ("dp.",), r"dp\.(?:pt|st|ct|sa)\.(?:[a-z0-9_\-]{2,35}\.)?[A-Za-z0-9]{40,44}"),
    ("dynatrace", ("dt0c01",), r"dt0c01\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{64}"),
    ("facebook", ("eaa",), r"EAA[MC][A-Za-z0-9]{100,300}"),
    ("fly.io", ("fo1_", "fm1", "fm2_"), r"(?:fo1_[\w\-]{43}|fm(?:1[ar]|2)_[A-Za-z0-9+/]{100,500}={0,3})"),
    ("github", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_[A-Za-z0-9]{36,255}"),
    ("github fine-grained", ("github_pat_",), r"github_pat_[A-Za-z0-9_]{50,255}"),
    ("gitlab", ("glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "glcbt-", "glimt-", "glptt-", "glagent-", "gloas-",
                "glffct-"),
     r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct)-[A-Za-z0-9_\-.]{20,300}"),
    ("gitlab runner", ("gr1348941",), r"GR1348941[A-Za-z0-9_\-]{20,50}"),
    ("google api", ("aiza",), r"AIza[A-Za-z0-9_\-]{35}"),
    ("google oauth", ("ya29.", "gocspx-"), r"(?:ya29\.[A-Za-z0-9_\-]{20,500}|GOCSPX-[A-Za-z0-9_\-]{28})"),
    ("grafana", ("glc_", "glsa_"), r"(?:glc_[A-Za-z0-9+/]{32,400}={0,3}|glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8})"),
    ("groq", ("gsk_",), r"gsk_[A-Za-z0-9]{48,56}"),
    ("heroku", ("hrku-",), r"HRKU-[A-Za-z0-9_\-]{36,70}"),
    ("hugging face", ("hf_", "api_org_"), r"(?:hf|api_org)_[A-Za-z0-9]{30,64}"),
    ("jwt", ("eyj",), r"eyJ[A-Za-z0-9_\-]{10,2000}\.eyJ[A-Za-z0-9_\-]{10,4000}\.[A-Za-z0-9_\-]{10,2000}"),
    ("linear", ("lin_",), r"lin_(?:api|oauth)_[A-Za-z0-9]{40,64}"),
    ("mailchimp", ("-us",), r"[0-9a-f]{32}-us\d{1,2}"),
    ("mailgun", ("key-",), r"(?:pub)?key-[0-9a-f]{32}"),
    ("mailgun signing", (), r"[0-9a-f]{32}-[0-9a-f]{8}-[0-9a-f]{8}"),
    ("mapbox", ("pk.", "sk."), r"[ps]k\.eyJ[A-Za-z0-9_\-]{40,100}\.[A-Za-z0-9_\-]{20,30}"),
    ("microsoft teams webhook", ("/webhookb2/",), r"https://[a-z0-9]+\.webhook\.office\.com/webhookb2/[\w@/\-]{80,200}"),
    ("netlify", ("nfp_",), r"nfp_[A-Za-z0-9]{36}"),
    ("new relic", ("nrak-", "nrii-", "nrjs-"), r"NR(?:AK|II|JS)-[A-Za-z0-9\-]{19,32}"),
    ("notion", ("ntn_", "secret_"), r"(?:ntn_\d{11}[A-Za-z0-9]{35}|secret_[A-Za-z0-9]{43})"),
    ("npm", ("npm_",), r"npm_[A-Za-z0-9]{36}"),
    ("nvidia", ("nvapi-",), r"nvapi-[A-Za-z0-9_\-]{60,70}"),
    ("octopus deploy", ("api-",), r"API-[A-Z0-9]{26}"),
    ("openshift", ("sha256~",), r"sha256~[\w\-]{43}"),
    ("perplexity", ("pplx-",), r"pplx-[A-Za-z0-9]{48}"),
    ("planetscale", ("pscale_",), r"pscale_(?:tkn|oauth|pw)_[\w=.\-]{32,64}"),
    ("postman", ("pmak-",), r"PMAK-[a-f0-9]{24}-[a-f0-9]{34}"),
    ("pulumi", ("pul-",), r"pul-[a-f0-9]{40}"),
    ("pypi", ("pypi-",), r"pypi-[A-Za-z0-9_\-]{40,1000}"),
    ("replicate", ("r8_",), r"r8_[A-Za-z0-9]{37}"),
    ("rubygems", ("rubygems_",), r"rubygems_[a-f0-9]{48}"),
    ("sendgrid", ("sg.",), r"SG\.[A-Za-z0-9_\-]{16,64}\.[A-Za-z0-9_\-]{16,64}"),
    ("sendinblue", ("xkeysib-",), r"xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}"),
    ("sentry", ("sntry",), r"sntry[su]_[A-Za-z0-9+/=_]{40,400}"),
    ("shippo", ("shippo_",), r"shippo_(?:live|test)_[a-fA-F0-9]{40}"),
    ("shopify", ("shp",), r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"),
    ("slack", ("xox", "xapp-"),
     r"(?:xox[abeoprs][.\-](?:xox[bp]-)?[A-Za-z0-9\-]{10,250}|xapp-\d-[A-Za-z0-9\-]{20,250})"),
    ("slack webhook", ("hooks.slack.com",),
     r"(?:https?://)?hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{35,70}"),
    ("square", ("sq0", "eaaa"), r"(?:sq0[a-z]{3}-[\w\-]{22,60}|EAAA[\w\-]{56,64})"),
    ("stripe", ("_live_", "_test_", "_prod_", "whsec_"),
     r"(?:(?:sk|rk|pk)_(?:live|test|prod)_[A-Za-z0-9]{16,247}|whsec_[A-Za-z0-9]{32,64})"),
    ("supabase", ("sbp_", "sb_secret_"), r"(?:sbp_[a-f0-9]{40}|sb_secret_[A-Za-z0-9_\-]{31})"),
    ("telegram", (":a",), r"\d{8,10}:A[A-Za-z0-9_\-]{34}"),
    ("terraform", (".atlasv1.",), r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_\-=]{60,70}"),
    ("twilio", (), r"(?:AC|SK)[0-9a-f]{32}"),
    ("vault", ("hvs.", "hvb.", "hvr."), r"hv[sbr]\.[\w\-]{24,300}"),
    ("xai", ("xai-",), r"xai-[A-Za-z0-9]{70,90}"),
)  # fmt: skip

_KEY_NAMES = (
    r"(?<!next)(?<!change)(?<!change-)(?<!page)(?<!continuation)(?:(?:api|app|auth|access|account|client|consumer|encryption|license|master|private|secret|service|session|shared|"
    r"signing|storage|subscription|webhook)[_\- ]?(?:access[_\- ]?)?(?:key|secret|token|password)|apikey|secret|token|"
    r"password|passwd|passphrase|pwd|bearer|credentials?|schlüssel|kennwort|passwort|geheimnis|clé|jeton|"
    r"mot de passe|clave|contraseña|chave|senha|密钥|密码|令牌|口令|パスワード|キー|トークン|シークレット)"
)
_PROVIDERS = (
    r"adafruit|airtable|algolia|alibaba|asana|aws|amazon|azure|bitbucket|cloudflare|codecov|cohere|coinbase|confluent|"
    r"contentful|datadog|discord|dropbox|facebook|fastly|finnhub|gitter|heroku|hubspot|intercom|jfrog|kraken|kucoin|"
    r"launchdarkly|linkedin|looker|mailchimp|mailgun|mattermost|messagebird|mistral|netlify|nytimes|okta|plaid|"
    r"rapidapi|sendbird|sentry|snyk|sonar|squarespace|sumologic|telegram|travis|twilio|twitch|twitter|typeform|"
    r"yandex|zendesk"
)
_ASSIGNED = r"[\"'`\])]{0,2}[ \t]{0,3}(?::=|=>|=|:|：|\bis\b|\bist\b|\best\b|\bes\b|\bé\b|是|为|は)[ \t]{0,3}[\"'`“「]?"

_NAME_OF_KEY = words(rf"(?:{_KEY_NAMES}|(?:{_PROVIDERS})[\w .\-]{{0,40}}){_ASSIGNED}(?:bearer |basic |token )?$")
_RESOURCE_NAME = words(r"\barn:[\w:\-]*$|::[\w]+[\"']?[ =:\"']*$")
# Fourteen characters of a key; every key has a match.
_LONG_RUN = ascii_regex(r"[A-Za-z0-9+/_\-.~]{14}")
# Every key without an anchor has a match; most texts have names of fourteen characters but not of 32.
_LONGER_RUN = ascii_regex(r"[A-Za-z0-9+/_\-.~]{32}")
# Every random value has a match.
_RUN_WITH_DIGIT = ascii_regex(r"(?=[A-Za-z0-9+/_\-.~]{14})[A-Za-z+/_\-.~]*[0-9]")
_AWS_SECRET = words(r"aws|amazon|secret|akia|geheim|密钥|シークレット")


SECRETS: tuple[Pattern, ...] = (
    Pattern(
        kind="secret",
        name="private key",
        anchors=("-----begin",),
        regex=ascii_regex(
            r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]{20,8000}?"
            r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
        ),
        check=whole,
    ),
    *(
        Pattern(
            kind="secret",
            name=provider,
            anchors=anchors,
            shape=_LONG_RUN if anchors else _LONGER_RUN,
            regex=ascii_regex(f"{_BEGIN}{regex}{_END}"),
            check=_key,
        )
        for provider, anchors, regex in _KEYS
    ),
    Pattern(
        kind="secret",
        name="azure storage",
        anchors=("accountkey", "sharedaccesskey"),
        regex=ascii_regex(r"(?:AccountKey|SharedAccessKey)=(?P<value>[A-Za-z0-9+/]{40,90}={0,2})"),
        check=_key,
    ),
    Pattern(
        kind="secret",
        name="aws secret",
        shape=_LONGER_RUN,
        regex=ascii_regex(r"(?<![A-Za-z0-9+/=_.\-])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=_\-])"),
        context=_AWS_SECRET,
        needs_context="always",
        check=_random_key,
    ),
    Pattern(
        kind="secret",
        name="named key",
        shape=_RUN_WITH_DIGIT,
        # Finds the value and looks back for its name: names that are searched for at every position of a text took
        # two thirds of the time of all patterns.
        regex=ascii_regex(
            r"(?<![A-Za-z0-9+/_\-.~])(?P<value>[A-Za-z0-9+/_\-.~]{16,200}={0,2})(?![A-Za-z0-9_+/(\[@\-.~])"
        ),
        check=_named_key,
    ),
    Pattern(
        kind="secret",
        name="bearer token",
        anchors=("bearer ", "basic ", "token "),
        regex=ascii_regex(r"(?i:\b(?:bearer|basic|token)) (?P<value>[A-Za-z0-9+/_\-.~]{20,400}={0,2})(?![\w(])"),
        check=_random_key,
    ),
    Pattern(
        kind="secret",
        name="password",
        anchors=("passw", "pwd", "passphrase", "kennwort", "contraseña", "senha", "mot de passe", "密码", "パスワード"),
        regex=re.compile(
            r"(?i)(?:password|passwd|passphrase|pwd|passwort|kennwort|contraseña|senha|mot de passe|密码|パスワード)"
            r"[\"'\]]{0,2}[ \t]{0,3}(?::=|=>|=|:)[ \t]{0,3}(?P<quote>[\"'`])(?P<value>[^\s\"'`]{8,64})(?P=quote)"
        ),
        check=_password,
    ),
    Pattern(
        kind="credentials",
        name="url",
        anchors=("://",),
        regex=ascii_regex(
            r"\b[A-Za-z][A-Za-z0-9+.\-]{1,20}://(?P<value>[^\s/?#'\"<>`\u3000-\u303f\u4e00-\u9fff]{1,300})@"
            r"(?=[A-Za-z0-9\[][A-Za-z0-9.\-:\]]{0,100})"
        ),
        check=_credentials,
    ),
)
"""All patterns of secrets and credentials, the most specific first."""
