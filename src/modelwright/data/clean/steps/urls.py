"""URLs: drops documents whose page is on a list of blocked domains.

The page is the record's own field `url`. A list is a text file with a domain or a URL prefix a line, as the published
lists have them (https://dsi.ut-capitole.fr/blacklists/); a domain stands for all of its subdomains, too.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from modelwright.core.config import ConfigError
from modelwright.data.clean.steps.step import Drop, StepSpec
from modelwright.data.document import Document


@dataclass(frozen=True, kw_only=True)
class UrlsConfig:
    """Domains that no document may come from."""

    blocked: tuple[str, ...] = ()
    """Files with a domain (`example.org`) or the beginning of a URL (`example.org/ads`) on each line; documents whose
    record has a `url` there are dropped. Empty switches the step off."""


@dataclass(frozen=True)
class Urls:
    config: UrlsConfig
    name: str = "urls"

    def __post_init__(self) -> None:
        _blocked(self.config.blocked)  # reports unreadable lists before anything is read

    def __call__(self, document: Document) -> Document | Drop:
        url = document.meta.get("url")
        if not isinstance(url, str):
            return document
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            host = (parts.hostname or "").rstrip(".")
        except ValueError:  # brackets that are not an IPv6 address
            return document
        # A URL is blocked by its host or a domain above, alone or with a beginning of its path.
        blocked = _blocked(self.config.blocked)
        labels, folders = host.split("."), [part for part in parts.path.split("/") if part]
        for first in range(len(labels)):
            for depth in range(len(folders) + 1):
                place = "/".join([".".join(labels[first:]), *folders[:depth]])
                if place in blocked:
                    return Drop("blocked URL", place)
        return document


URLS = StepSpec(
    name="urls",
    build=lambda config, seed: Urls(config) if config.blocked else None,
    remedies={"blocked URL": "--clean.urls.blocked []"},
    files=("blocked",),
)


@cache
def _blocked(paths: tuple[str, ...]) -> frozenset[str]:
    """The entries of the lists, read once in each process. Raises `ConfigError` for a list that cannot be read."""
    entries: set[str] = set()
    for path in paths:
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"urls.blocked: {path}: cannot be read ({reason}); give a text file") from None
        for line in lines:
            entry = line.partition("#")[0].strip()
            host, slash, path_begin = entry.rpartition("//")[2].strip("/").partition("/")
            if host:
                entries.add(f"{host.lower()}{slash}{path_begin}")
    return frozenset(entries)
