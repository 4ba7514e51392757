"""What documentation names exists: every file, setting, command, option and identifier in backticks.

A word of code may be defined anywhere in the project, since a docstring may name what a neighbor defines; so this finds
what was renamed or removed, and what never existed.
"""

import ast
import builtins
import keyword
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import modelwright
from modelwright.cli.main import COMMANDS, DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(modelwright.__file__).parent
ELSEWHERE = ("config.md", "claims.md", "claims/", "log/")
"""Pages that are made from the code, and those about the past."""
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{page}" for path in sorted((ROOT / "docs").rglob("*.md"))
      if not (page := path.relative_to(ROOT / "docs").as_posix()).startswith(ELSEWHERE)),
)  # fmt: skip
SUFFIXES = "py|h|cpp|md|yaml|json|jsonl|toml|txt|html|jinja|css|js|csv|tsv|zst|gz|safetensors|parquet|xml"
FILE = re.compile(rf"[\w.*<>/-]+\.(?:{SUFFIXES})|(?:[\w.-]+/)+")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
NOTATION = re.compile(r"[A-Z]+|[a-z]")
"""Names of dimensions and variables of a formula."""

OF_OTHERS = {
    "datasets": "a package of Hugging Face",
    "torchrun": "a command of PyTorch",
    "kvSplitSize": "a variable in PyTorch's source",
    "tcpi_segs_out": "a field of Linux's tcp_info",
    "tcpi_bytes_sent": "a field of Linux's tcp_info",
    "gw_hp": "a recipe of torchao",
    "reduce_range": "an argument of PyTorch's observers",
    "normalize_answer": "a function of SQuAD's evaluation script",
    "reliability_guard": "a function of HumanEval",
    "BPEDecoder": "a class of tokenizers",
    "mslk": "a package that torchao may ask for",
    "find_executable_batch_size": "a function of accelerate",
    "traceparent": "a header of W3C's trace context",
    "OTEL_SERVICE_NAME": "a variable of OpenTelemetry",
    "OTEL_TRACES_SAMPLER": "a variable of OpenTelemetry",
    "Dockerfile": "a file that Docker reads",
    "NaN": "a word of JSON as Python writes it",
    "Infinity": "a word of JSON as Python writes it",
    "MoEAuxLossAutoScaler": "a class of Megatron-LM",
    **dict.fromkeys(
        ("_io", "café", "copy_tree", "CopyTree", "YOUR_API_KEY_HERE", "TokenId2", "mov", "rum"), "an example"
    ),
}
"""Names that the project does not define, and what they are."""


@cache
def words_of_code() -> frozenset[str]:
    """Every identifier and every word of a string in the Python code, docstrings left out, and every word of the
    other files.
    """
    words: set[str] = {*dir(builtins), *keyword.kwlist}
    for folder in ("src", "claims", "packages", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            words |= {word for node in nodes if id(node) not in docstrings for word in _words_of(node)}
    others = [PACKAGE.rglob(f"*.{suffix}") for suffix in ("yaml", "cpp", "h", "js", "css", "html", "jinja", "json")]
    for path in [*(path for found in others for path in found), ROOT / "pyproject.toml", ROOT / "Makefile"]:
        words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(words)


def _words_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            yield from name.split(".")
        case ast.Constant(value=str(text)):
            yield from re.findall(r"\w+", text)


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of every page and of every docstring in the package, the documentation of fields included."""
    for name in PAGES:
        yield name, (ROOT / name).read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value.value


def in_backticks(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def exists(reference: str) -> bool:
    """Whether a file or identifier is there. Anything else, such as a formula or a command line, counts as existing."""
    if NAME.fullmatch(reference) and not FILE.fullmatch(reference):
        parts = reference.removesuffix("()").split(".")
        return all(_is_known(part) for part in parts) or reference in OF_OTHERS or _can_be_imported(reference)
    if FILE.fullmatch(reference) and "<" not in reference and "/" in reference:
        places = (
            ROOT,
            PACKAGE,
            ROOT / "claims",
            *PACKAGE.iterdir(),
            *ROOT.glob("packages/*"),
            *ROOT.glob("packages/*/*"),
        )
        return any(any(place.glob(reference.strip("/"))) for place in places if place.is_dir()) or _is_output(reference)
    return True


def _is_known(name: str) -> bool:
    stem, _, suffix = name.rpartition("_")
    is_suffix = name.startswith("_") and any(word.endswith(name) for word in words_of_code())
    is_shaped = suffix.isupper() and stem in words_of_code()
    is_counter = suffix == "total" and stem in words_of_code()  # a suffix that prometheus_client adds
    return name in words_of_code() or bool(NOTATION.fullmatch(name)) or is_suffix or is_shaped or is_counter


def _can_be_imported(name: str) -> bool:
    """Whether an installed package defines the dotted name."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return "." in name


def _is_output(path: str) -> bool:
    """Whether it is something that a run writes: its last part is named in the code."""
    return all(part in words_of_code() or not part.isidentifier() for part in re.split(r"[/.]", path.strip("/")))


@pytest.mark.slow
def test_a_reference_to_nothing_is_found() -> None:
    assert not exists("max_start_loss_of_nobody")
    assert not exists("train/no_such_file.py")
    assert not exists("TrainStep.no_such_method")
    assert exists("TrainStep.forward_backward")
    assert exists("train/step.py")
    assert exists("hidden_BTD")


def test_what_documentation_names_exists() -> None:
    missing = [
        f"{place}: `{reference}`"
        for place, text in documents()
        for reference in in_backticks(text)
        if not exists(reference)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_targets_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^\s*)make ([a-z][\w-]*)", text, flags=re.MULTILINE)) <= targets
    named = set(re.findall(r"(?:`|^)modelwright ([a-z][\w-]*)", text, flags=re.MULTILINE))
    assert named <= COMMANDS.keys() | DISTRIBUTIONS.keys(), f"{page} names commands that do not exist"
