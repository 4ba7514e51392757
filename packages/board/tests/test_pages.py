"""The pages in Chromium: from a dropped file to a served model, a board that is killed meanwhile, and accessibility."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from board_runs import make_run, running_board, wait_for
from modelwright_board.screens import SCREENS

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
PATIENCE_MS = 120_000
pytestmark = [pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine"), pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        sync_api.expect.set_options(timeout=PATIENCE_MS)
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


def new_page(browser, problems: list[str], **options):
    page = browser.new_page(**options)
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    return page


def weights(run: Path) -> str:
    return sha256((run / "sft" / "artifact" / "model.safetensors").read_bytes()).hexdigest()


def points(page) -> int:
    return int(page.locator("[data-charts]").get_attribute("data-points") or 0)


@pytest.mark.timeout(900)
def test_from_a_dropped_file_to_a_served_model(browser, tmp_path: Path) -> None:
    problems: list[str] = []
    texts = tmp_path / "pairs.jsonl"
    texts.write_text(
        "".join(
            json.dumps({"question": f"What is {n} plus {n + 1}?", "answer": f"It is {2 * n + 1}.", "weather": "fine"})
            + "\n"
            for n in range(40)
        )
    )
    place = tmp_path / "work"
    runs = place / "runs"
    runs.mkdir(parents=True)
    settings = "--pretrain.num_steps 120 --sft.num_steps 20 --stages clean,tokenize,pack,pretrain,sft"
    with running_board(runs, cwd=place) as board:
        page = new_page(browser, problems)
        page.goto(board.url)
        # A dropped file: its records, and the field that is not used.
        page.goto(f"{board.base}/data")
        page.set_input_files("#file", texts)
        sync_api.expect(page.locator("h2", has_text="First records of pairs.jsonl")).to_be_visible()
        sync_api.expect(page.locator("#data-look .command code")).to_have_text(
            re.compile(r"modelwright clean runs/\.board/data/pairs\.jsonl --dry-run")
        )
        page.click("#data-look button.primary")
        sync_api.expect(page.locator(".job .state").first).to_have_text("done")
        output = page.locator(".job pre").first
        sync_api.expect(output).to_contain_text(re.compile(r"fields used: question, answer; not used in 40.*: weather"))
        # A run from the page; its curve grows.
        page.goto(f"{board.base}/plan")
        page.select_option("#plan-recipe-recipe", "tiny")
        page.fill("#plan-recipe-name", "first")
        page.fill("#plan-recipe-settings", settings)
        code = page.locator("#plan-recipe .command code")
        sync_api.expect(code).to_have_text(re.compile(r"--run-dir runs/first --pretrain\.num_steps 120"))
        line = code.inner_text()
        page.click("#plan-recipe button.primary")
        wait_for(lambda: (runs / "first" / "run.json").exists())
        page.goto(f"{board.base}/run?run=first")
        wait_for(lambda: (runs / "first" / "pretrain" / "metrics.jsonl").exists(), 120)
        page.reload()
        wait_for(lambda: points(page) > 20, 120)
        before = points(page)
        wait_for(lambda: points(page) > before)
        # The board is killed; the run goes on, and the page comes back with it.
        port = int(board.base.rpartition(":")[2])
        board.process.send_signal(signal.SIGKILL)
        board.process.wait()
        sync_api.expect(page.locator("#notice")).to_contain_text("does not answer")
    problems.clear()  # refused connections while there is no board
    with running_board(runs, port=port, cwd=place) as board:
        sync_api.expect(page.locator("#notice")).to_have_text("")
        problems.clear()
        # Stopped and resumed, until it is done.
        page.reload()
        sync_api.expect(page.locator("#live-head .state").first).to_have_text("running")
        page.click("#live-head button.danger")
        sync_api.expect(page.locator("#live-head .state").first).to_have_text("stopped")
        page.click("#live-head button.primary")
        sync_api.expect(page.locator("#live-head .state").first).to_have_text("done", timeout=240_000)
        # The command line, pasted into a shell, gives the same weights.
        words = shlex.split(line.replace("runs/first", "runs/second"))
        subprocess.run(
            [sys.executable, "-m", "modelwright.cli.entry", *words[1:]], cwd=place, check=True, capture_output=True
        )
        assert weights(runs / "first") == weights(runs / "second")
        # What was started in the shell is on the page, and both are compared.
        page.goto(f"{board.base}/")
        for name in ("first", "second"):
            page.check(f"input[value={name}]")
        page.click("text=Compare the chosen runs")
        sync_api.expect(page.locator("h1")).to_have_text(re.compile("second and first|first and second"))
        wait_for(lambda: points(page) > 0)
        assert page.locator("[data-charts] .legend .traces").count() >= 2
        page.select_option("#x", "tokens")
        page.wait_for_url(re.compile("x=tokens"))
        # Exported.
        page.goto(f"{board.base}/smaller?run=first&target=runs/first")
        page.click("#smaller-export button.primary")
        sync_api.expect(page.locator("#live-exports code")).to_be_visible()
        # Served and talked to.
        page.goto(f"{board.base}/serve?target=runs/first&port=0")
        free = free_port()
        page.fill("#serve-serve-port", str(free))
        sync_api.expect(page.locator("#serve-serve .command code")).to_contain_text(f"--port {free}")
        page.click("#serve-serve button.primary")
        sync_api.expect(page.locator("#live-servers .state").first).to_have_text("running")
        page.goto(f"{board.base}/talk")
        page.fill("#question", "What is 2 plus 3?")
        page.fill("#max_tokens", "12")
        page.click("text=Ask both")
        sync_api.expect(page.locator("#answer-a")).not_to_have_text("")
        sync_api.expect(page.locator("#notice")).to_contain_text("same")  # one model, one seed
        page.goto(f"{board.base}/serve")
        wait_for(lambda: points(page) > 3)
        sync_api.expect(page.locator("[data-charts] figure h3", has_text="Time to first token")).to_be_visible()
        page.click("#live-servers button.danger")
        sync_api.expect(page.locator("#live-servers")).to_contain_text("No server")
        page.close()
    assert problems == []


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator:
    runs = tmp_path_factory.mktemp("pages") / "runs"
    for number in range(3):
        make_run(runs, f"run-{number}", seed=number)
    make_run(runs, "long", num_steps=100_000)
    with running_board(runs) as board:
        yield board


@pytest.mark.parametrize("width", [1280, 390])
def test_no_serious_violation_on_any_screen(browser, made, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    problems: list[str] = []
    page = new_page(
        browser, problems, viewport={"width": width, "height": 844}, color_scheme="light",
        reduced_motion="reduce", bypass_csp=True,
    )  # fmt: skip
    page.goto(made.url)
    for query in ("", *(f"{screen.name}?run=run-0" for screen in SCREENS), "run?run=run-0&run=run-1&run=run-2"):
        page.goto(f"{made.base}/{query}")
        if query.startswith("run?"):
            wait_for(lambda: page.locator("[data-charts] .main-svg").count() > 3)
        violations = axe.run(page).response["violations"]
        page.emulate_media(color_scheme="dark")  # which changes nothing but colors
        violations += axe.run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
        page.emulate_media(color_scheme="light")
        found = [
            (query, one["id"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]
        assert found == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), query
    page.close()
    assert problems == []


def test_the_keyboard_is_enough(browser, made) -> None:
    page = new_page(browser, [])
    page.goto(made.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    names: list[str] = []
    for _ in range(12):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.innerText.split('\\n')[0]"))
    assert names[:3] == ["Runs", "Data", "Cleaning"]
    page.close()


def test_a_long_run_is_drawn_soon(browser, made) -> None:
    """Shows all of 100,000 steps with few points; benchmarks/board_scale.py has the times."""
    page = new_page(browser, [])
    page.goto(made.url)
    page.goto(f"{made.base}/run?run=long")
    wait_for(lambda: page.locator("[data-charts] .main-svg").count() > 3 and page.locator("#notice").inner_text() == "")
    assert 2000 < points(page) < 15_000
    last = page.locator("figure", has_text="Loss").locator(".plot").first.get_attribute("aria-label")
    assert last is not None
    assert re.search(r"loss [\d.]+", last)
    page.close()
