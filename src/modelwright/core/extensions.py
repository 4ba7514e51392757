"""What other installed packages add to this one: the objects behind their entry points.

Each list of the package (commands, stages, techniques, ...) has one entry-point group, named at the list, and asks
`installed` for what other distributions add to it.
"""

from importlib.metadata import entry_points
from typing import TypeVar

from modelwright.core.errors import ConfigError

T = TypeVar("T")


def installed(group: str, kind: type[T], *, taken: tuple[str, ...] = ()) -> dict[str, T]:
    """Objects of type `kind` that installed distributions offer in an entry-point group, by entry-point name, sorted.

    taken: names of the package's own entries. Raises `ConfigError`, which names the distribution, for an entry point
    that cannot be imported, is of another type, or has a name that is taken.
    """
    added: dict[str, T] = {}
    # `entry_points` takes the first of several distributions of one name, so an installed package and its checkout on
    # the path are one.
    for entry_point in sorted(entry_points(group=group), key=lambda one: (one.name, one.value)):
        distribution = entry_point.dist.name if entry_point.dist else "an unnamed distribution"
        where = f"entry point {entry_point.name} of {group} ({entry_point.value}, from {distribution})"
        try:
            value = entry_point.load()
        except Exception as error:  # the code of the other package runs when it is imported
            raise ConfigError(
                f"{where}: cannot be imported ({type(error).__name__}: {error}); reinstall or remove {distribution}"
            ) from error
        if not isinstance(value, kind):
            raise ConfigError(f"{where}: must be a {kind.__name__}, got {value!r}")
        if entry_point.name in taken or entry_point.name in added:
            raise ConfigError(f"{where}: the name {entry_point.name!r} is taken; the package must choose another one")
        added[entry_point.name] = value
    return added
