"""Claim: the seconds from `pip install` to the first answer in text, next to other tools that run models on a CPU.

How each tool is installed and asked is in `first_answer_tools`, the clocks are in `tool_environment`.
"""

import ensurepip
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path

from modelwright.core.config import ModelwrightError
from modelwright.core.resources import num_usable_cores
from modelwright.recipes.load import recipe
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described, untestable
from modelwright_claims.first_answer_tools import COMPILED, FOLDER, NUM_TOKENS, OURS, RIVALS, TOOLS, write_model
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import ratios
from modelwright_claims.tool_environment import Environment, run

ROOT = Path(__file__).parents[3]
ROUNDS = 3
TOTAL, INSTALL = "install to first answer, ", "install, "
FIRST, AGAIN, SERVER = (
    "first start to first token, ",
    "second start to first token, ",
    "start of a server to first answer, ",
)
DISK, DOWNLOAD = "on disk, ", "download, "
NOT_MEASURED = "not measured: "


def measure(setting: Setting) -> Measurement:
    """The tools are installed, asked and removed in turn; what is downloaded before is not timed."""
    if not (ROOT / "pyproject.toml").is_file():
        return untestable("the product's wheel is built from a checkout, and this package is installed without one")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        bench = Bench(setting, Path(name))
        for side in [OURS] if setting.quick else TOOLS:
            bench.attempt(side, partial(bench.download, side))
            if side == COMPILED:  # once; the wheel that pip keeps of it is that of READY
                bench.attempt(side, partial(bench.measure_side, side))
        sides = [OURS] if setting.quick else [side for side in TOOLS if side != COMPILED]
        for turn in range(1 if setting.quick else ROUNDS):
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                setting.progress.note(f"first_answer: round {turn + 1}, {side}")
                bench.attempt(side, partial(bench.measure_side, side))
    facts = {
        **described(__name__, num_tokens=NUM_TOKENS),
        **bench.facts,
        "Python": f"{platform.python_version()}, whose environments have pip {ensurepip.version()}",
        "cores": num_usable_cores(),
        **{f"answer, {side}": answer[:60] for side, answer in bench.answers.items()},
        "seconds": time.perf_counter() - started,
    }
    return Measurement(samples=bench.samples, conditions=facts)


class Bench:
    """The files of a measurement in `folder`, and what was measured. facts: conditions, failures included."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder, self.models = setting, folder, folder / "models"
        self.samples: dict[str, list[float]] = {}
        self.facts: dict[str, str | int] = {"parameters": recipe("quickstart").model.num_parameters}
        self.answers: dict[str, str] = {}

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Work for a side or its server, unless it has failed: its last words are then a condition, and its samples
        are dropped. Raises `ModelwrightError` if that is our side.
        """
        if NOT_MEASURED + name in self.facts:
            return
        try:
            work()
        except ModelwrightError as error:
            if name == OURS:
                raise
            self.facts[NOT_MEASURED + name] = str(error)
            self.samples = {key: of for key, of in self.samples.items() if not key.endswith(f", {name}")}

    def download(self, side: str) -> None:
        """Fetch what pip will install, and write the model in the format that the tool opens."""
        tool, wheels = TOOLS[side], self.folder / "wheels" / side.replace(" ", "-")
        if side == OURS:
            leftovers = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(ROOT / "src", self.folder / "source" / "src", ignore=leftovers)
            for file in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copy(ROOT / file, self.folder / "source")
            self.pip("wheel", "--no-deps", f"--wheel-dir={self.folder / 'built'}", str(self.folder / "source"))
        if not self.setting.quick:
            self.pip("download", f"--dest={wheels}", *tool.downloads, *self.words(tool.packages))
            self.samples[DOWNLOAD + side] = [num_bytes(wheels) / 1e6]
            if tool.server:
                self.pip("download", f"--dest={wheels / 'server'}", *self.words(tool.server_packages))
        write_model(self.models, tool.model)

    def pip(self, *words: str) -> None:
        """Work with the index that the pip of this environment is set up for."""
        run([sys.executable, "-m", "pip", words[0], "--quiet", *words[1:]])

    def words(self, packages: Sequence[str]) -> list[str]:
        """The packages of a tool as words for pip."""
        built = {path.name.partition("-")[0]: str(path) for path in (self.folder / "built").glob("*.whl")}
        try:
            return [one.format_map({**built, "torch": f"torch=={version('torch')}"}) for one in packages]
        except KeyError as missing:
            raise ModelwrightError(f"no wheel of {missing} was built") from None

    def measure_side(self, side: str) -> None:
        """Install a tool and ask it twice, then its server; every figure is a sample."""
        tool, wheels = TOOLS[side], self.folder / "wheels" / side.replace(" ", "-")
        tried = Environment(place := self.folder / "environment", self.models)
        try:
            forget(wheels)
            forget(self.folder / "built")
            install = tried.install(self.words(tool.packages), [wheels], *(["--no-deps"] if self.setting.quick else []))
            (packages,) = place.glob("lib/python*/site-packages")
            if self.setting.quick:
                (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
            forget(self.models)
            first, self.answers[side] = tried.first_answer(tool.command, tool.before)
            again, _ = tried.first_answer(tool.command, tool.before)
            figures = {TOTAL: install + first, INSTALL: install, FIRST: first, AGAIN: again}
            figures |= {DISK: num_bytes(place) / 2**20}
            (main,) = distributions(name=tool.packages[0].strip("{}"), path=[str(packages)])
            self.facts[f"version, {side}"] = main.version
            self.facts[f"packages, {side}"] = len(list(distributions(path=[str(packages)])))
            if side == COMPILED:
                shutil.copy(next((self.folder / "pip").rglob("*.whl")), self.folder / "built")

            def ask_server() -> None:
                tried.install(self.words(tool.server_packages), [wheels, wheels / "server"])
                figures[SERVER] = tried.first_reply(tool.server, FOLDER)

            if tool.server and not self.setting.quick:
                self.attempt(f"server of {side}", ask_server)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        for name, value in figures.items():
            self.samples.setdefault(name + side, []).append(value)


def forget(folder: Path) -> None:
    """Write what the disk lacks, and drop the files of a folder from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    ours = samples[TOTAL + OURS]
    for rival in RIVALS:
        with judgment.part():
            theirs, one = samples[TOTAL + rival], ""
            if len(theirs) == 1 < len(ours):
                theirs, one = [theirs[0]] * len(ours), ", its one repeat"
            what, say = f"time to that of {rival}{one}", f"{{0.mean:.2f}} times the seconds of {rival}{one}"
            judgment.ask(f"time to that of {rival}", ratios(ours, theirs), "x", "<", 1.0, what=what, say=say)
    for what in (TOTAL, INSTALL, FIRST, AGAIN, SERVER, DISK, DOWNLOAD):
        judgment.show(samples, [what + side for side in TOOLS], {DISK: "MiB", DOWNLOAD: "MB"}.get(what, "s"))
    judgment.said += [f"{name} gave no answer here" for name in conditions if name.startswith(NOT_MEASURED)]
    return judgment.verdict()


CLAIM = declared(__name__)
