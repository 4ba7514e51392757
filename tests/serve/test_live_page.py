"""The live page in a real browser: figures of the server, keyboard, phone width, a key, and a server that is gone."""

import re

import httpx
import pytest

from serve.test_chat_page import browser, new_page, pytestmark, sync_api  # noqa: F401
from serve.test_keys import write_keys

BODY = {"model": "tiny", "prompt": "the quick", "max_tokens": 12, "temperature": 0}


def row(page, card: str, name: str):
    """The figure beside a name."""
    return page.locator(f"#{card} dt", has_text=re.compile(f"^{re.escape(name)}$")).locator(
        "xpath=following-sibling::dd[1]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_follow_the_server(slow_server, browser, scheme: str):  # noqa: F811
    server = slow_server()
    page = new_page(browser, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{server.url}/live")
    sync_api.expect(page.locator("#state")).to_have_text("tiny: ok")
    sync_api.expect(row(page, "first", "median")).to_have_text("–")
    for _ in range(3):
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 200
    sync_api.expect(row(page, "requests", "200")).not_to_have_text("–")
    for card in ("first", "next", "answer"):
        sync_api.expect(row(page, card, "99 %")).to_have_text(re.compile(r"^[\d.]+ (ms|s)$"))
    sync_api.expect(row(page, "load", "engines")).to_have_text("1")
    sync_api.expect(row(page, "version", "version")).to_have_text(server.service.model.fingerprint)
    assert page.locator("#load polyline").first.get_attribute("points")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert problems == []
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#pause")).to_have_text("Continue")
    page.keyboard.press("Space")
    sync_api.expect(page.locator("#pause")).to_have_attribute("aria-pressed", "false")
    server.stop()
    sync_api.expect(page.locator("#state")).to_have_text("The server does not answer.")
    page.close()


def test_a_server_with_keys_asks_for_one(slow_server, browser, tmp_path):  # noqa: F811
    keys = write_keys(tmp_path / "keys.yaml", scrape={"scopes": ["metrics"]}, user={})
    server = slow_server(keys_file=keys)
    page = new_page(browser)
    page.goto(f"{server.url}/live")
    sync_api.expect(page.locator("#ask")).to_be_visible()
    for key, is_refused in (("user", True), ("scrape", False)):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#state")).to_have_text(re.compile("to keys" if is_refused else "tiny: ok"))
    sync_api.expect(page.locator("#ask")).to_be_hidden()
    sync_api.expect(row(page, "load", "engines")).to_have_text("1")
    page.close()
