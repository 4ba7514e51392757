"""The chat page in a real browser: ask, watch the answer come in, stop it, at desktop and phone width."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from added_package import add_agent_routes
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.load import ServedTokenizer
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_tokenizer
from serve.patience import held
from serve.test_agents import TEMPLATE

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
PATIENCE_MS = 90_000
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")]


def wait_for_answer(page) -> None:
    """Wait for the first words. The page forbids `eval`, with which Playwright's own `wait_for_function` polls."""
    words = re.compile(r".{6,}", re.DOTALL)
    sync_api.expect(page.locator(".turn.assistant").first).to_have_text(words, timeout=PATIENCE_MS)


def wait_until_idle(page) -> None:
    """Wait until the server computes no answer any more."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while page.request.get(f"{page.url.rstrip('/')}/health").json()["open_answers"]:
        assert time.monotonic() < deadline, "the answer goes on"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        sync_api.expect.set_options(timeout=PATIENCE_MS)
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


def new_page(browser, **options):
    page = browser.new_page(**options)
    page.set_default_timeout(PATIENCE_MS)
    return page


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_a_question_gets_a_streamed_answer(server: ServerThread, browser, tmp_path: Path, width: int, height: int):
    page = new_page(browser, viewport={"width": width, "height": height})
    problems: list[str] = []
    outside: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    page.goto(server.url)
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    page.locator("#temperature").evaluate("box => box.value = 0")
    page.fill("#question", "what does <b>this</b> do?")
    with held(server, after=10):
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#send")).to_have_text("Stop")
        sync_api.expect(page.locator(".turn.assistant")).not_to_be_empty()
    sync_api.expect(page.locator(".note")).to_contain_text("tokens/s")
    assert page.locator(".turn.user").inner_text() == "what does <b>this</b> do?"
    assert len(page.locator(".turn.assistant").inner_text()) > 20
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=str(tmp_path / "chat.png"))
    assert [url for url in outside if not url.startswith("data:")] == []
    assert problems == []
    page.close()


def test_an_answer_can_be_stopped_and_the_chat_go_on(slow_server, browser):
    server = slow_server()
    page = new_page(browser, bypass_csp=True)
    page.goto(server.url)
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    page.locator("#temperature").evaluate("box => box.value = 0")
    page.fill("#question", "the quick")
    with held(server, after=20):
        page.click("#send")
        wait_for_answer(page)
        page.click("#send")
        sync_api.expect(page.locator(".note")).to_have_text("stopped")
    wait_until_idle(page)
    page.locator("#max_tokens").evaluate("box => box.value = 3")
    page.fill("#question", "and the dog")
    page.click("#send")
    sync_api.expect(page.locator(".note").nth(1)).to_contain_text("cut at the limit")
    page.fill("#question", "the dog " * 2000)
    page.click("#send")
    sync_api.expect(page.locator(".note.bad")).to_contain_text("context is 2048 tokens")
    page.click("#new")
    sync_api.expect(page.locator("#empty")).to_be_visible()
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("asks", [False, True], ids=["idle", "asking"])
def test_a_server_that_is_down_is_shown(slow_server, browser, asks: bool):
    server = slow_server()
    page = new_page(browser, viewport={"width": 390, "height": 844})
    page.goto(server.url)
    sync_api.expect(page.locator("#state")).to_have_class("up")
    sync_api.expect(page.locator("#down")).to_be_hidden()
    up = page.locator("#state").evaluate("dot => getComputedStyle(dot).backgroundColor")
    server.stop()
    if asks:
        page.fill("#question", "is anybody there?")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".note.bad")).to_contain_text("connection to the server was lost")
    sync_api.expect(page.locator("#down")).to_contain_text("The server does not answer")
    sync_api.expect(page.locator("#down")).to_be_visible()
    sync_api.expect(page.locator("#state")).to_have_class("down")
    red, green, blue = (
        int(part)
        for part in re.findall(r"\d+", page.locator("#state").evaluate("dot => getComputedStyle(dot).backgroundColor"))
    )
    assert red > 1.5 * max(green, blue), f"{(red, green, blue)} is not red (up: {up})"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    slow_server(port=int(server.url.rsplit(":", 1)[1]))
    sync_api.expect(page.locator("#state")).to_have_class("up")
    sync_api.expect(page.locator("#down")).to_be_hidden()
    page.close()


def test_a_server_that_shuts_down_is_shown(slow_server, browser):
    server = slow_server(drain_timeout_s=200)
    page = new_page(browser)
    page.goto(server.url)
    sync_api.expect(page.locator("#state")).to_have_class("up")
    page.fill("#question", "the quick")
    with held(server, after=20):
        page.keyboard.press("Enter")
        wait_for_answer(page)
        server.stop_soon()
        # It drains for a moment in which it still answers; then it has closed its socket.
        sync_api.expect(page.locator("#down")).to_contain_text(re.compile("shutting down|does not answer"))
        sync_api.expect(page.locator("#state")).to_have_class("down")
        server.stop_soon(at_once=True)
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_settings_cover_nothing_and_close_when_a_question_is_asked(server: ServerThread, browser, width: int):
    page = new_page(browser, viewport={"width": width, "height": 844})
    page.goto(server.url)
    sync_api.expect(page.locator("#about")).to_contain_text("million parameters: it has learned what answers look like")
    page.fill("#question", "the quick")
    page.click("#settings")
    panel = page.locator("#panel").bounding_box()
    conversation = page.locator("#scroll").bounding_box()
    assert panel["y"] + panel["height"] <= conversation["y"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill("#max_tokens", "3")
    page.locator("#question").focus()
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#panel")).to_be_hidden()
    sync_api.expect(page.locator(".note")).to_contain_text("cut at the limit")
    page.close()


def test_a_wrong_setting_is_marked_and_nothing_is_sent(server: ServerThread, browser):
    page = new_page(browser, viewport={"width": 390, "height": 844})
    page.goto(server.url)
    sync_api.expect(page.locator("#model")).to_have_text("tiny")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    page.click("#settings")
    page.fill("#temperature", "9")
    sync_api.expect(page.locator("#temperature + small")).not_to_be_empty()
    assert page.locator("#temperature").get_attribute("aria-invalid") == "true"
    page.fill("#question", "the quick")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#panel")).to_be_visible()
    sync_api.expect(page.locator("#temperature")).to_be_focused()
    assert page.locator("#question").input_value() == "the quick"
    assert asked == []
    page.keyboard.press("Escape")
    page.fill("#temperature", "0.75")
    sync_api.expect(page.locator("#temperature + small")).to_be_empty()
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#panel")).to_be_hidden()
    page.close()


def test_calls_need_consent_and_the_conversation_survives_a_reload(
    browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add_agent_routes(tmp_path, monkeypatch)
    pytest.importorskip("mcp")
    pytest.importorskip("llguidance")
    make_tokenizer().save(tmp_path)
    # the prompt opens the thought, so that every answer has one
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    tides = {"command": sys.executable, "args": [str(Path(__file__).with_name("tool_program.py"))]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"tides": tides}}))
    config = ServeConfig(port=0, mcp=str(tmp_path / "mcp.json"))
    client = engine_in_thread(make_model(2048), config)
    requests = RequestsConfig(log=str(tmp_path / "log.sqlite"))
    bodies: list[dict] = []

    def force(route) -> None:
        """The model is random: its first answer has to be a call, all thoughts are short, and answers end."""
        body = json.loads(route.request.post_data)
        bodies.append(body)
        named = {"type": "function", "function": {"name": "tide"}}
        body |= {"thinking_token_budget": 3, "max_tokens": 300}
        if body["messages"][-1]["role"] == "tool":
            body |= {"tool_choice": "none", "max_tokens": 12}
        else:
            body |= {"tool_choice": named, "parallel_tool_calls": False}
            parameters = body["tools"][0]["function"]["parameters"]
            parameters["properties"]["town"]["maxLength"], parameters["additionalProperties"] = 4, False
        route.continue_(post_data=json.dumps(body))

    tokenizer = ServedTokenizer.load(tmp_path)
    with ServerThread(client, tokenizer, config, model_name="tiny", requests=requests) as server:
        page = new_page(browser)
        page.route("**/v1/chat/completions", force)
        page.goto(server.url)
        sync_api.expect(page.locator("#tools input")).to_have_count(3)
        for decision in ("Run", "Refuse"):
            page.fill("#question", "How high is the water?")
            page.keyboard.press("Enter")
            words = page.locator(".call textarea")
            sync_api.expect(words).to_be_visible()
            assert page.locator(".thought").last.get_attribute("open") is None
            sync_api.expect(page.locator(".turn.tool")).to_have_count(0 if decision == "Run" else 1)
            if decision == "Run":
                page.reload()  # the call still waits for its decision
                sync_api.expect(page.locator("#tools input")).to_have_count(3)
                words.fill('{"town": ')
                page.click("text=Run")
                assert words.evaluate("box => box.validity.customError")
                words.fill('{"town": "Bar"}')
            page.get_by_role("button", name=decision, exact=True).click()
            # a note ends each answer: the one with the call, and the one after its result
            sync_api.expect(page.locator(".note")).to_have_count(2 if decision == "Run" else 4)
            sync_api.expect(words).to_have_count(0)
        results = [turn["content"] for turn in bodies[-1]["messages"] if turn["role"] == "tool"]
        assert results[0].endswith("high in Bar")
        assert results[1] == "error: the user refused this call"
        calls = [turn["tool_calls"][0]["function"] for turn in bodies[-1]["messages"] if turn.get("tool_calls")]
        assert json.loads(calls[0]["arguments"]) == {"town": "Bar"}
        shown = page.locator(".turn.tool").first
        assert "<img src=x" in shown.text_content()
        assert shown.locator("img").count() == 0
        before = page.locator(".turn").all_text_contents()
        page.reload()
        sync_api.expect(page.locator(".turn")).to_have_count(len(before))
        assert page.locator(".turn").all_text_contents() == before
        assert page.title() == "Modelwright chat"
        thumb = page.get_by_label("Good answer").last
        with page.expect_response("**/v1/feedback") as sent:
            thumb.click()
        assert (sent.value.status, sent.value.json()["status"]) == (200, "recorded")
        assert sent.value.request.post_data_json["score"] == 1
        sync_api.expect(thumb).to_have_attribute("aria-pressed", "true")
        page.click("#new")
        page.reload()
        sync_api.expect(page.locator("#empty")).to_be_visible()
        page.close()


def test_a_missing_or_wrong_key_is_asked_for(slow_server, browser, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGE_KEY", "right")
    page = new_page(browser)
    page.goto(slow_server(api_key_env="PAGE_KEY").url)
    sync_api.expect(page.locator("#down")).to_contain_text("asks for an API key")
    sync_api.expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Tab")
    sync_api.expect(page.locator("#down")).to_contain_text("does not know this API key")
    page.fill("#key", "right")
    page.keyboard.press("Tab")
    sync_api.expect(page.locator("#state")).to_have_class("up")
    sync_api.expect(page.locator("#down")).to_be_hidden()
    page.locator("#max_tokens").evaluate("box => box.value = 3")
    page.fill("#question", "the quick")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".note")).to_contain_text("cut at the limit")
    page.get_by_label("Bad answer").click()
    sync_api.expect(page.locator(".note.bad")).to_contain_text("requests.log")
    page.close()
