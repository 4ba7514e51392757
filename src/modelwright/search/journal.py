"""The journal of a search: everything that was measured or trained, one line each, so that a search that was killed
takes from it what it has and does only the rest.

A strategy is a deterministic function of what its trials return. Started again, it proposes the same trials, gets the
results of those that the journal has, and goes on with the first one that it lacks.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelwright.core.errors import ArtifactError, ConfigError
from modelwright.core.event_log import EventLog

FILE = "journal.jsonl"
MAX_LINES = 1_000_000


class Journal:
    """Facts by kind and key. path: of the file; a last line that a kill has cut off is dropped."""

    def __init__(self, path: Path) -> None:
        self._log = EventLog(path, max_events=MAX_LINES, keep_existing=True)
        try:
            self._facts = {(fact["kind"], fact["key"]): fact for fact in self._log.events}
        except (KeyError, TypeError):
            raise ArtifactError(f"{path}: is damaged; remove it, or search again with --restart") from None

    def recall(self, kind: str, key: str) -> Mapping[str, Any] | None:
        """What was recorded, None for nothing."""
        return self._facts.get((kind, key))

    def once(self, kind: str, key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What was recorded, or else what `make` returns, recorded before it is returned."""
        known = self.recall(kind, key)
        if known is None:
            self._log.append(kind=kind, key=key, **make())
            known = self._facts[(kind, key)] = self._log.events[-1]
        return known

    def check_identity(self, identity: Mapping[str, Any], folder: Path) -> None:
        """Raise `ConfigError` if the journal belongs to a search of other things; it names the first of them."""
        known = self.once("search", "", lambda: {"identity": dict(identity)})["identity"]
        for name, value in identity.items():
            if known.get(name) != value:
                raise ConfigError(
                    f"{folder}: holds a search with another {name} ({known.get(name)!r}, now {value!r}); give the same "
                    "one to go on with it, or --restart to throw its trials away"
                )
