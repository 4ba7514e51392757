"""Builds the documentation site into build/site: `make docs`.

The pages of docs/ are copied to build/docs, with those at the root of the repository (README, CONTRIBUTING and others),
and what follows from the code is added: the reference of commands, of the Python interface and of settings, and the
ledger of claims. Links to other files of the repository lead to copies of them. Zensical then builds the site, with
warnings as errors; a link that leads nowhere, a missing anchor and a page outside the navigation end the build.

    python docs/build.py [--no-site]     # --no-site: only write and check build/docs
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES, STAGE = ROOT / "docs", ROOT / "build" / "docs"
ROOT_PAGES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md", "CODE_OF_CONDUCT.md": "code-of-conduct.md", "examples/README.md": "examples.md",
}  # fmt: skip
"""Pages outside of docs/ and their names on the site."""
COPIES = "repository"
"""Folder of the site with the files that pages link to and that are no pages: records, source files."""
MEASURED = re.compile(r"^<!-- measured: ([\w ]+) -->$", re.MULTILINE)
"""In a page: the figures of these claims come here."""
GPU_RECORDS = "<!-- gpu records -->"
"""In a page: the figures of `make gpu-check` come here."""
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FROM_CODE = "Written from the code by `make docs`."
API = {
    "Runs": ("run", "finetune", "align", "Run", "TrainingStep"),
    "Models": ("load", "Model", "compare", "ComparedModels", "evaluate", "export", "serve"),
    "Data": ("clean", "show"),
    "Errors": ("ModelwrightError", "ConfigError"),
    "Training a model of your own": ("TrainJob", "train_model"),
}
"""Sections of the page on the Python interface; together they are `modelwright.__all__`."""


def commands_page() -> str:
    """Returns the reference of commands: the help text of each."""
    from modelwright.cli.main import DISTRIBUTIONS, usable_commands

    os.environ["COLUMNS"] = "100"  # argparse would take the width of the terminal
    commands = usable_commands()
    missing = sorted(DISTRIBUTIONS.keys() - commands.keys())
    if missing:
        raise SystemExit(f"docs: the commands {', '.join(missing)} are of packages that are not installed; make docs")
    lines = [
        "# Commands",
        "",
        "Written from the code by `make docs`. `modelwright COMMAND --help` prints the same.",
        "",
    ]
    lines += [
        "| command | |",
        "| --- | --- |",
        *(f"| [{name}](#{name}) | {commands[name].summary} |" for name in commands),
    ]
    for name, command in commands.items():
        lines += ["", f"## {name}", "", "```text", command.parser().format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Returns the reference of the Python interface, for mkdocstrings to fill in."""
    import modelwright

    named = [name for names in API.values() for name in names]
    if {*named, "__version__"} != set(modelwright.__all__):
        raise SystemExit(
            f"docs: API in docs/build.py and modelwright.__all__ differ: {set(named) ^ set(modelwright.__all__)}"
        )
    lines = [
        "# Python interface",
        "",
        "Written from the code by `make docs`. `import modelwright as mw` offers all of it.",
        "",
    ]
    for title, names in API.items():
        lines += [f"## {title}", ""]
        for name in names:
            defined = modelwright.__getattr__(name)  # `modelwright.evaluate` is the package once it is imported
            lines += [f"### `modelwright.{name}` {{#{name}}}", "", f"::: {defined.__module__}.{defined.__name__}", ""]
    return "\n".join(lines)


def settings_page() -> str:
    """Returns the reference of settings; docs/config.md has to be the same."""
    from modelwright.cli.config import markdown

    text = markdown()
    if (SOURCES / "config.md").read_text(encoding="utf-8") != text:
        raise SystemExit("docs/config.md is old; renew it with: python -m modelwright.cli.config > docs/config.md")
    return text


def ledger_pages() -> dict[str, str]:
    """Returns the pages of the ledger, judged by the present rules, by their path in docs/."""
    from modelwright_claims.ledger import pages

    written = pages(ROOT / "benchmarks" / "results", SOURCES / "claims.md")
    return {str(path.relative_to(SOURCES)): text for path, text in written.items()}


def measured(match: re.Match[str]) -> str:
    """Returns a table of the headline figures of the claims that a page names."""
    from modelwright_claims import published

    rows = {row.name: row for row in published.read()}
    lines = ["| claim | figure | measured | verdict |", "| --- | --- | --- | --- |"]
    for name in match[1].split():
        if name not in rows:
            raise SystemExit(f"docs: a page asks for the figures of {name}, which is no claim")
        figures = rows[name].figures or {"": "not measured yet"}
        lines += [f"| {name} | {figure} | {value} | {rows[name].verdict} |" for figure, value in figures.items()]
    return "\n".join(lines)


def gpu_records() -> str:
    """Returns the figures of each card that `make gpu-check` has measured, as tables."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_check_record import Record, table

    cards = sorted((ROOT / "benchmarks" / "results").glob("gpu-check-*.json"))
    texts = [f"### {path.stem.removeprefix('gpu-check-')}\n\n{table(Record(path=path, around={}))}" for path in cards]
    return "\n\n".join(texts) or "There is no record of a card yet."


def performance_page() -> str:
    """Returns the table of speed and memory next to others."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from performance import page

    return page()


GENERATED: Mapping[str, Callable[[], str]] = {
    "performance.md": performance_page,
    "reference/commands.md": commands_page,
    "reference/api.md": api_page,
    "config.md": settings_page,
}
"""Pages that follow from the code. Those of the ledger come from `ledger_pages`."""


def stage() -> list[str]:
    """Writes build/docs; returns what is wrong with links."""
    shutil.rmtree(STAGE, ignore_errors=True)
    sources = [path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.md")]
    pages = {f"docs/{name}": (SOURCES / name).read_text("utf-8") for name in sources if not name.startswith("claims")}
    pages |= {f"docs/{name}": make() for name, make in GENERATED.items()}
    pages |= {f"docs/{name}": text for name, text in ledger_pages().items()}
    pages |= {name: (ROOT / name).read_text("utf-8") for name in ROOT_PAGES}
    places = {name: ROOT_PAGES.get(name) or name.removeprefix("docs/") for name in pages}
    faults: list[str] = []
    for name, text in pages.items():
        path = STAGE / places[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = MEASURED.sub(measured, text)
        if GPU_RECORDS in text:
            text = text.replace(GPU_RECORDS, gpu_records())
        path.write_text("".join(_relinked(name, part, places, faults) for part in _blocks(text)), "utf-8")
    for path in SOURCES.rglob("*"):  # pictures and other files that pages show
        if path.is_file() and path.suffix in {".png", ".svg", ".css"}:
            target = STAGE / path.relative_to(SOURCES)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    unreached = {*places.values()} - {*_navigation()} - {f"claims/{path.name}" for path in (STAGE / "claims").iterdir()}
    faults += [f"{name}: not in the navigation of zensical.toml" for name in sorted(unreached)]
    faults += [f"zensical.toml: {name} does not exist" for name in sorted({*_navigation()} - {*places.values()})]
    return faults


def _blocks(text: str) -> Iterator[str]:
    """Yields the text in pieces, each fenced block of code a piece of its own."""
    yield from re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)


def _relinked(name: str, text: str, places: Mapping[str, str], faults: list[str]) -> str:
    """Returns a piece of the page `name` with its links as they are on the site. faults: what is wrong is added."""
    if text.startswith("```"):
        return text
    here = Path(places[name]).parent

    def relinked(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[1]
        file = os.path.normpath(Path(name).parent / target)
        if file in places:
            place = places[file]
        elif file.startswith("docs/") and Path(file).suffix in {".png", ".svg"} and (ROOT / file).is_file():
            place = file.removeprefix("docs/")
        elif (ROOT / file).is_file():
            place = f"{COPIES}/{file}"
            (STAGE / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, STAGE / place)
        else:
            faults.append(f"{name}: the link to {match[1]} leads nowhere")
            return match[1]
        return os.path.relpath(place, here) + (f"#{anchor}" if anchor else "")

    return LINK.sub(relinked, text)


def _navigation() -> Iterator[str]:
    """Yields the pages that the navigation names."""

    def pages(entry: object) -> Iterator[str]:
        match entry:
            case str():
                yield entry
            case dict():
                for value in entry.values():
                    yield from pages(value)
            case list():
                for value in entry:
                    yield from pages(value)
            case _:
                raise SystemExit(f"zensical.toml: {entry!r} is no page")

    yield from pages(tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site into build/site.")
    parser.add_argument("--no-site", action="store_true", help="only write and check the pages in build/docs")
    options = parser.parse_args()
    faults = stage()
    for fault in faults:
        print(f"docs: {fault}", file=sys.stderr)
    if faults:
        return 1
    if options.no_site:
        return 0
    zensical = Path(sys.executable).parent / "zensical"
    return subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
