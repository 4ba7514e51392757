"""The commands of README and guides, run unchanged, with the small recipe in place of the demo's."""

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_files import write_examples
from modelwright.cli.run import _read, parser
from modelwright.core.config import read_overrides
from modelwright.data.sources.forms import RECORD_TYPES
from modelwright.pipeline.run import check_request
from modelwright.pipeline.run_config import run_schema
from modelwright.recipes.load import load
from rank_processes import start_process

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNS, PROCESSES, FORMATS = (
    (ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8") for name in ("runs", "processes", "formats")
)
PAGES = "\n".join([README, RUNS, PROCESSES, FORMATS])
NAMED = ("README.md", *(f"docs/guides/{name}.md" for name in ("runs", "processes", "formats")))
MOST_LINES = 120
RECIPE = "quickstart"
SHORT = (
    "--data.stdlib_fraction=0.03", "--pretrain.num_steps=6", "--sft.num_steps=6",
    "--evaluate.max_bytes_per_domain=2000",
    "--evaluate.multiple_choice.num_questions=5",
)  # fmt: skip
"""Settings for a short run."""


def commands() -> list[list[str]]:
    """The commands of every code block marked to be run, words as a shell would see them, each once."""
    blocks = re.findall(r"<!-- run -->\n```sh\n(.*?)```", PAGES, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [list(words) for words in dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines)]


def is_the_run(words: list[str]) -> bool:
    return words[1] == "run" and "--dry-run" not in words


def run_small(words: list[str], folder: Path, *more: str) -> None:
    """A command with the small recipe in place of the demo's; it has to succeed."""
    small = [word.replace(RECIPE, "tiny") for word in words[1:]]
    source = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'claims'}"}
    started = start_process("modelwright.cli.main", *small, *more, environment=source, cwd=folder)
    code, output, errors = started.end()
    assert code == 0, output[-2000:] + errors[-2000:]


def weights(run: Path) -> dict[str, bytes]:
    return {path.parts[-3]: path.read_bytes() for path in run.glob("*/artifact/model.safetensors")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files that the commands name, the demo, and the run that the README's own command made after
    it.
    """
    place = tmp_path_factory.mktemp("readme")
    for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(ROOT / name)
    run_small(["modelwright", "run", RECIPE], place, *SHORT)
    demo = weights(place / "runs/tiny")
    (command,) = filter(is_the_run, commands())
    run_small(command, place, *SHORT)
    assert weights(place / "runs/tiny") == demo
    return place


def test_some_commands_are_marked():
    assert len(commands()) >= 6
    assert all(words[0] == "modelwright" for words in commands())


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_command_works(words, folder):
    if is_the_run(words):
        assert (folder / "runs" / words[words.index("--name") + 1] / "report.html").is_file()
    else:
        run_small(words, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_python_of_the_readme_works(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code.splitlines()) <= 10
    for name, count in (("examples.jsonl", 60), ("heldout.jsonl", 10)):
        lines = write_examples(tmp_path / name).read_text().splitlines()[:count]  # the others have tools
        (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "readme.py").write_text(code)
    status, output, errors = start_process(tmp_path / "readme.py", cwd=tmp_path).end()
    assert status == 0, errors
    assert re.search(r"^http://\S+:\d+$", output, flags=re.MULTILINE)
    assert (tmp_path / "runs/mine/report.html").is_file()


def other_runs() -> list[list[str]]:
    """Runs of the demo's recipe in blocks that are not marked; of several hosts, what most of them together run."""
    text = PAGES.replace("\\\n", " ")
    found = []
    shown = r"^(?:modelwright|DEEPSEEK_\S+ modelwright) .*\brun quickstart\b.*$"
    for line in re.findall(shown, text, flags=re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[1] == "launch":
            hosts, _, most = words[words.index("--nnodes") + 1].partition(":")
            words = ["modelwright", "run", *words[words.index("run") + 1 :], "--nproc", most or hosts]
        if "PATH" not in words and words not in commands():
            found.append(words)
    return found


@pytest.mark.parametrize("words", other_runs(), ids=" ".join)
def test_every_run_that_is_shown_could_begin(words, tmp_path, monkeypatch):
    """The README passes all that is checked before anything is prepared; the text of the run is this README."""
    place = words.index("modelwright")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)
    for given in words[:place]:
        monkeypatch.setenv(*given.split("="))
    options, overrides = _read(words[place + 2 :])
    request = load(options.target, read_overrides(run_schema(), overrides), options.run_dir)
    assert request.run.path.name != RECIPE, "would replace stages of the demo"
    check_request(request.config, request.run, (), num_processes=options.nproc, elastic=False)


def make(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "-n", "--no-print-directory", "-C", str(ROOT), *words], capture_output=True, text=True
    )


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_demo_runs_the_demo():
    """`make demo` itself, with an installed environment taken as given."""
    environment = sys.prefix
    assumed = [f"--assume-old={environment}/{stamp}" for stamp in (".installed", ".torch")]
    dry = make(*assumed, f"VENV={environment}", "demo")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.strip().splitlines()[-1] == f"{environment}/bin/modelwright run quickstart"


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_test_runs_the_tests():
    dry = make("test")
    last_command = dry.stdout.replace("\\\n", " ").strip().splitlines()[-1]
    assert re.search(r"/bin/python -m pytest\b", last_command), dry.stdout


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize(
    ("command", "fails"),
    [
        ("sh -c 'echo pass; exit 1'", True),
        ("sh -c 'echo pass; test -n \"$$MODELWRIGHT_ISA\"'", True),  # the first pass alone fails
        ("sh -c 'echo pass; test -z \"$$MODELWRIGHT_ISA\"'", True),
        ("sh -c 'echo pass'", False),
    ],
)
def test_the_pass_without_avx512_runs_and_counts_whatever_the_first_one_found(command, fails, monkeypatch):
    monkeypatch.delenv("MODELWRIGHT_ISA", raising=False)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    environment = sys.prefix
    assumed = [f"--assume-old={environment}/{stamp}" for stamp in (".installed-dev", ".torch")]
    words = [*assumed, f"VENV={environment}", f"PYTEST={command}", "ARGS=", "HAS_AVX512=yes", "test-slow"]
    done = subprocess.run(["make", "-C", str(ROOT), *words], capture_output=True, text=True)
    assert done.stdout.splitlines().count("pass") == 2, done.stdout + done.stderr
    assert (done.returncode != 0) == fails


@pytest.mark.parametrize("page", NAMED)
def test_every_file_that_is_named_exists(page):
    named = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    paths = [os.path.normpath((ROOT / page).parent / path) for path in named if not path.startswith("http")]
    made = str(ROOT / "docs" / "claims")  # the pages of the ledger, which `make docs` makes
    assert [path for path in paths if not path.startswith(made) and not Path(path).exists()] == []


def test_the_readme_is_short_and_names_results_early():
    lines = README.splitlines()
    assert len(lines) <= MOST_LINES
    assert lines.index("## Results") < 20
    assert "do not expect the model\nto answer questions" in README


def test_the_architecture_names_every_package():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src/modelwright").glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}`" not in page} == set()
    outer = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert {name for name in outer if name not in README.rpartition("## ")[2]} == set()


def test_all_forms_of_pairs_are_described_wherever_they_are_listed():
    numbers = dict(enumerate(["Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten"]))
    assert f"{numbers[len(RECORD_TYPES)]} forms of pairs are read" in RUNS
    data = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    table = data.partition("| form | record |")[2].partition("\n\n")[0]
    assert table.count("\n| ") - 1 == len(RECORD_TYPES)  # the line below the header
    for text in (RUNS, parser().format_help(), table):
        assert all(field in text for fields in RECORD_TYPES.values() for field in fields)


def test_bf16_is_compared_with_the_faster_fp32_that_was_measured():
    record = ROOT / "benchmarks/results/adaptive_precision-amd-epyc-2c-avx512.json"
    samples = json.loads(record.read_text(encoding="utf-8"))["samples"]
    arms = (samples[f"tokens per second, {arm}"] for arm in ("all BF16", "fp32 by oneDNN"))
    ratio = statistics.mean(fast / slow for fast, slow in zip(*arms, strict=True))
    assert f"| BF16 | {ratio:.1f} times the speed of the faster FP32" in (ROOT / "docs/results.md").read_text("utf-8")
