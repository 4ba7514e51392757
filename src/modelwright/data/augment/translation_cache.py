"""Translations on disk, so that nothing is translated twice, in this run or a later one."""

import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from modelwright.core.errors import DataError, writing

Translate = Callable[[Sequence[str]], list[str]]
"""Translations of several texts; "" for one that could not be translated."""

_FILE = "translations.sqlite"
_WAIT_S = 60.0
"""How long one process waits for another that writes."""


class TranslationCache:
    """Remembers what a translator returned. name: identifies translator, direction and settings; folder: made if
    absent. Several processes may share a folder. Texts that could not be translated are tried again.
    """

    def __init__(self, translate: Translate, *, name: str, folder: Path) -> None:
        self.translate = translate
        self.name = name
        self.path = folder / _FILE
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._run("CREATE TABLE IF NOT EXISTS translations (key TEXT PRIMARY KEY, text TEXT NOT NULL)", [()])

    def __call__(self, texts: Sequence[str]) -> list[str]:
        keys = [hashlib.sha256(f"{self.name}\0{text}".encode()).hexdigest() for text in texts]
        known = {key: text for key in dict.fromkeys(keys) for text in self._read(key)}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if missing:
            results = dict(zip(missing, self.translate(list(missing.values())), strict=True))
            entries = [(key, text) for key, text in results.items() if text]
            self._run("INSERT OR REPLACE INTO translations VALUES (?, ?)", entries)
            known |= results
        return [known[key] for key in keys]

    def _read(self, key: str) -> list[str]:
        return [row[0] for row in self._run("SELECT text FROM translations WHERE key = ?", [(key,)])]

    def _run(self, statement: str, rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as database, database:
                return [found for row in rows for found in database.execute(statement, row)]
        except sqlite3.Error as error:
            raise DataError(f"{self.path}: cannot be used ({error}); remove the file or name another `cache`") from None
