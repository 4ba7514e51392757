"""The verdict on the first answer from given seconds, the clocks with programs that answer late or fail, and one quick
measurement.
"""

import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from modelwright.core.config import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright_claims import first_answer as claim
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.first_answer_tools import COMPILED, OPENVINO, OURS, TOOLS, TRANSFORMERS
from modelwright_claims.judging import judge
from modelwright_claims.tool_environment import QUESTION, Environment

DELAY_S = 0.3


def judged(ours: Sequence[float] = (50.0, 51.0, 50.5), others: Mapping[str, Sequence[float]] | None = None) -> Verdict:
    """Seconds of the sides. Rivals take 60 of them, and the compiled one 500 in its only repeat."""
    seconds = dict.fromkeys(TOOLS, (60.0, 61.0, 60.5)) | {COMPILED: (500.0,), OURS: ours, **(others or {})}
    samples = {claim.TOTAL + side: of for side, of in seconds.items() if of}
    samples |= {what + OURS: [1.0, 1.1, 1.2] for what in (claim.INSTALL, claim.FIRST, claim.AGAIN, claim.SERVER)}
    failed = {claim.NOT_MEASURED + side: "ended with 1" for side, of in seconds.items() if not of}
    return judge(claim.CLAIM, Measurement(samples=samples, conditions=failed))


def test_met_only_below_the_bound_of_each_rival():
    met = judged()
    assert met.kind == "met"
    assert met.figures[f"time to that of {TRANSFORMERS}"].value == pytest.approx(5 / 6, rel=0.01)
    assert set(claim.CLAIM.headline) <= set(met.figures)
    short = judged(others={OPENVINO: (20.0, 21.0, 20.5)})
    assert short.kind == "short"
    assert f"time to that of {OPENVINO} 2.46x" in short.reason
    assert judged(ours=(50.0, 70.0, 58.0)).kind == "short", "the mean is below, its bound is not"


def test_a_single_repeat_is_compared_with_every_round_and_named():
    assert f"{COMPILED}, its one repeat" in judged().reason
    short = judged(others={COMPILED: (50.6,)})
    assert short.kind == "short"
    assert f"time to that of {COMPILED}, its one repeat" in short.reason


def test_a_rival_that_failed_is_named_and_leaves_the_claim_open():
    verdict = judged(others={OPENVINO: ()})
    assert verdict.kind == "not judged"
    assert f"{claim.NOT_MEASURED}{OPENVINO}" in verdict.reason


def tool(folder: Path, script: str) -> Environment:
    """An environment with a program `tool`, which has `time` and `sys` imported and runs the script."""
    path = folder / "bin" / "tool"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable} -IS\nimport sys, time\n{textwrap.dedent(script)}")
    path.chmod(0o755)
    return Environment(folder, folder)


def test_the_clock_stops_at_the_first_text_after_the_mark(tmp_path: Path):
    late = tool(
        tmp_path,
        f"""
        print("Help. > is no mark", flush=True)
        print("\\n> ", end="", flush=True)
        question = input()
        time.sleep({DELAY_S})
        print(question.upper(), end="", flush=True)
        time.sleep({DELAY_S})
        print(" and more\\n\\n> ", flush=True)
        """,
    )
    started = time.perf_counter()
    seconds, answer = late.first_answer(["tool"], "\n> ")
    assert DELAY_S <= seconds <= time.perf_counter() - started - DELAY_S
    assert answer == f"{QUESTION.upper()} and more"
    assert late.first_answer(["tool"])[0] < seconds, "without a mark the help is the answer"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "print('an answer', flush=True)\nsys.exit('no such\\nmodel')",
            "ended with 1 and no answer: .*no such / model",
        ),
        ("print('Loading', file=sys.stderr)", "ended with 0 and no answer: Loading"),
    ],
)
def test_a_tool_that_fails_gives_no_time(tmp_path: Path, script: str, said: str):
    with pytest.raises(ModelwrightError, match=said):
        tool(tmp_path, script).first_answer(["tool"])


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_POST(self):
        Handler.asked += 1
        self.send_response({status} if Handler.asked > 1 else 503)
        self.end_headers()
        self.wfile.write(b'{{"choices": [{{"message": "so"}}]}}')
time.sleep({delay})
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_asked_until_it_answers(tmp_path: Path):
    late = tool(tmp_path, SERVER.format(status=200, delay=DELAY_S))
    assert late.first_reply(["tool", "{port}"], "model") >= DELAY_S


@pytest.mark.parametrize(
    ("script", "said"),
    [(SERVER.format(status=400, delay=0), "ended with 400"), ("sys.exit('no port')", "ended with 1 .*: no port")],
)
def test_a_server_that_fails_gives_no_time(tmp_path: Path, script: str, said: str):
    with pytest.raises(ModelwrightError, match=said):
        tool(tmp_path, script).first_reply(["tool", "{port}"], "model")


def test_a_tool_gets_nothing_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("PYTHONPATH", "PIP_FIND_LINKS", "XDG_CACHE_HOME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:/usr/bin")
    variables = Environment(tmp_path, tmp_path).variables
    assert not {"PYTHONPATH", "PIP_FIND_LINKS", "XDG_CACHE_HOME", "OMP_NUM_THREADS"} & variables.keys()
    assert (variables["PATH"], variables["HOME"]) == ("/usr/bin", str(tmp_path / "home"))


def test_of_a_side_that_fails_no_sample_is_kept(tmp_path: Path):
    bench = claim.Bench(Setting(quick=False, folder=tmp_path, progress=SilentProgress()), tmp_path)
    bench.samples = {claim.TOTAL + side: [1.0] for side in (OURS, OPENVINO)}
    tries = list[str]()

    def fail() -> None:
        tries.append("tried")
        raise ModelwrightError("the last words")

    for _ in range(2):
        bench.attempt(OPENVINO, fail)
    bench.attempt(f"server of {OURS}", fail)
    assert tries == ["tried"] * 2, "what failed is not tried again"
    assert bench.samples == {claim.TOTAL + OURS: [1.0]}
    assert bench.facts[claim.NOT_MEASURED + OPENVINO] == "the last words"
    with pytest.raises(ModelwrightError, match="the last words"):
        bench.attempt(OURS, fail)


def test_a_wheel_that_was_not_built_is_named(tmp_path: Path):
    bench = claim.Bench(Setting(quick=False, folder=tmp_path, progress=SilentProgress()), tmp_path)
    with pytest.raises(ModelwrightError, match="no wheel of 'modelwright'"):
        bench.words(TOOLS[OURS].packages)
    (tmp_path / "built").mkdir()
    wheel = tmp_path / "built" / "modelwright-0.2.0-py3-none-any.whl"
    wheel.touch()
    assert bench.words(TOOLS[OURS].server_packages) == [f"{wheel}[serve]"]


@pytest.mark.slow
def test_a_quick_measurement(tmp_path: Path):
    """Our wheel is built, installed and asked in a new environment, which is removed."""
    found = claim.CLAIM.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    verdict = judge(claim.CLAIM, found)
    assert verdict.kind == "not judged"
    install, first = (verdict.figures[what + OURS].value for what in (claim.INSTALL, claim.FIRST))
    assert verdict.figures[claim.TOTAL + OURS].value == pytest.approx(install + first)
    assert found.conditions[f"version, {OURS}"]
    assert not list(tmp_path.iterdir())
