"""Extensions from other installed packages: the objects behind their entry points.

Each list of the package (commands, stages, techniques, ...) has one entry-point group, named at the list, and asks
`installed` for what other distributions add to it, or `offered` where one broken package must not disturb the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from modelwright.core.config import ConfigError, did_you_mean, parse

T = TypeVar("T")


@dataclass(frozen=True)
class NoSettings:
    """Settings of an extension without any."""


class Configurable(Protocol):
    """An extension with settings. config: their dataclass."""

    @property
    def config(self) -> type: ...


S = TypeVar("S", bound=Configurable)


def installed(group: str, kind: type[T], *, taken: tuple[str, ...] = ()) -> dict[str, T]:
    """Objects of type `kind` that installed distributions offer in an entry-point group, by entry-point name, sorted.
    taken: names of the package's own entries. Raises `ConfigError`, which names the distribution, for an entry point
    that cannot be imported, is of another type, or has a name that is taken.
    """
    return {name: load() for name, load in offered(group, kind, taken=taken).items()}


def offered(group: str, kind: type[T], *, taken: tuple[str, ...] = ()) -> dict[str, Callable[[], T]]:
    """Functions that load what `installed` returns, by the same names; each raises its own entry point's error. Nothing
    of another distribution is imported before its function is called.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    # `entry_points` takes the first of several distributions of one name, so an installed package and its checkout on
    # the path are one.
    for entry_point in sorted(entry_points(group=group), key=lambda one: (one.name, one.value)):
        by_name.setdefault(entry_point.name, []).append(entry_point)
    return {name: partial(_load, group, kind, found, name in taken) for name, found in by_name.items()}


def _load(group: str, kind: type[T], found: list[EntryPoint], is_taken: bool) -> T:
    # Several entry points of one name are several packages that offer it, of which none may win silently.
    entry_point = found[-1]
    distribution = entry_point.dist.name if entry_point.dist else "an unnamed distribution"
    where = f"entry point {entry_point.name} of {group} ({entry_point.value}, from {distribution})"
    if is_taken or len(found) > 1:
        raise ConfigError(f"{where}: the name {entry_point.name!r} is taken; the package must choose another one")
    try:
        value = entry_point.load()
    except Exception as error:  # the code of the other package runs when it is imported
        raise ConfigError(
            f"{where}: cannot be imported ({type(error).__name__}: {error}); reinstall or remove {distribution}"
        ) from error
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: must be a {kind.__name__}, got {value!r}")
    return value


def configured(group: str, kind: type[S], settings: Mapping[str, Any], path: str) -> dict[str, tuple[S, Any]]:
    """The entry points of a group that settings name, each with its settings, in the order of `settings`. settings:
    plain mappings, or their dataclasses, by entry-point name. path: place of `settings` in the configuration, for
    errors. Raises `ConfigError` for a name that no installed package adds, and for wrong settings.
    """
    if not settings:  # the metadata of all installed packages take milliseconds to read
        return {}
    known = offered(group, kind)
    for name in settings:
        if name not in known:
            added = f"they add {', '.join(known)}" if known else "none adds any"
            raise ConfigError(
                f"{path}.{name}: no installed package adds it to {group}{did_you_mean(name, known)}; {added}"
            )
    specs = {name: known[name]() for name in settings}
    return {name: (spec, parse(spec.config, settings[name], f"{path}.{name}")) for name, spec in specs.items()}
