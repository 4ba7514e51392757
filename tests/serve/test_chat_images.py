"""Images on the chat page in a real browser: by button, by pasting, by dropping, and with the keyboard alone."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource
from modelwright.serve.server import ServerThread
from serve.image_model import png, write_image_model
from serve.test_chat_page import ARGUMENTS, CHROMIUM, PATIENCE_MS, new_page

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")

GIVE = """([kind, data, type]) => {
  const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "picture", {type}));
  const options = {bubbles: true, cancelable: true};
  const event = kind === "paste" ? new ClipboardEvent("paste", {...options, clipboardData: transfer})
    : new DragEvent(kind, {...options, dataTransfer: transfer});
  document.getElementById("question").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        sync_api.expect.set_options(timeout=PATIENCE_MS)
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    config = ServeConfig(port=0)
    source = ModelSource(name="eyes", folder=write_image_model(tmp_path_factory.mktemp("llava")))
    with ServerThread(*load_engines(source, config), config, model_name="eyes", source=source) as running:
        yield running


def give(page, kind: str, data: bytes, media_type: str = "image/png") -> None:
    page.evaluate(GIVE, [kind, base64.b64encode(data).decode(), media_type])


def opened(browser, server: ServerThread, **options):
    page = new_page(browser, **options)
    page.goto(server.url)
    sync_api.expect(page.locator("#state")).to_have_class("up")
    page.locator("#temperature").evaluate("box => box.value = 0")
    page.locator("#max_tokens").evaluate("box => box.value = 6")
    return page


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_images_by_button_paste_and_drop_go_with_the_question(
    reader: ServerThread, browser, width: int, tmp_path: Path
) -> None:
    page = opened(browser, reader, viewport={"width": width, "height": 844})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    bodies: list[dict] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    (tmp_path / "one.png").write_bytes(png(1))
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    chooser.value.set_files(tmp_path / "one.png")
    sync_api.expect(page.locator("#images img")).to_have_count(1)
    give(page, "paste", png(2))
    sync_api.expect(page.locator("#images img")).to_have_count(2)
    give(page, "dragover", png(3))
    sync_api.expect(page.locator("body")).to_have_class("dropping")
    give(page, "drop", png(3))
    sync_api.expect(page.locator("#images img")).to_have_count(3)
    sync_api.expect(page.locator("body")).not_to_have_class("dropping")
    page.get_by_label("Remove image 2").click()
    sync_api.expect(page.locator("#images img")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.fill("#question", "what is this?")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".note")).to_contain_text("tokens/s")
    sync_api.expect(page.locator("#images")).to_be_hidden()
    sync_api.expect(page.locator(".turn.user img")).to_have_count(2)
    assert page.evaluate("[...document.images].every(one => one.complete && one.naturalWidth === 20)")
    parts = bodies[0]["messages"][0]["content"]
    sent = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts[:2]]
    assert sent == [png(1), png(3)]
    assert parts[2] == {"type": "text", "text": "what is this?"}
    page.fill("#question", "and now?")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".note")).to_have_count(2)
    assert [type(one["content"]) for one in bodies[1]["messages"]] == [list, str, str]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert problems == []
    page.close()


def test_the_keyboard_alone_adds_removes_and_sends_an_image(reader: ServerThread, browser, tmp_path: Path) -> None:
    page = opened(browser, reader)
    page.on("filechooser", lambda _: None)  # or the browser would open a chooser of its own before it hears of ours
    (tmp_path / "one.png").write_bytes(png(1))
    sync_api.expect(page.locator("#question")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Shift+Tab")
        sync_api.expect(page.locator("#attach")).to_be_focused()
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter")
        chooser.value.set_files(tmp_path / "one.png")
        sync_api.expect(page.locator("#images img")).to_have_count(1)
        sync_api.expect(page.locator("#question")).to_be_focused()
        if page.locator("#question").input_value() == "":
            page.keyboard.press("Shift+Tab")
            page.keyboard.press("Shift+Tab")
            sync_api.expect(page.get_by_label("Remove image 1")).to_be_focused()
            page.keyboard.press("Enter")
            sync_api.expect(page.locator("#images img")).to_have_count(0)
            sync_api.expect(page.locator("#question")).to_be_focused()
            page.keyboard.type("look")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".turn.user img")).to_have_count(1)
    sync_api.expect(page.locator(".note")).to_contain_text("tokens/s")
    page.close()


def test_a_large_photograph_is_made_smaller_and_what_is_no_image_is_named(reader: ServerThread, browser) -> None:
    page = opened(browser, reader)
    bodies: list[dict] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    give(page, "drop", b"this is no image at all")
    sync_api.expect(page.locator(".note.bad")).to_contain_text("is no image that this browser can read")
    give(page, "drop", png(1, width=1500, height=750))
    sync_api.expect(page.locator("#images img")).to_have_count(1)
    page.click("#send")
    sync_api.expect(page.locator(".note").last).to_contain_text("tokens/s")
    url = bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,")
    assert page.evaluate("[...document.images].map(one => [one.naturalWidth, one.naturalHeight])") == [[1024, 512]]
    page.close()


def test_a_model_that_reads_text_only_has_no_button(server: ServerThread, browser) -> None:
    page = opened(browser, server)
    sync_api.expect(page.locator("#attach")).to_be_hidden()
    give(page, "paste", png(1))
    give(page, "drop", png(1))
    sync_api.expect(page.locator("#images img")).to_have_count(0)
    page.close()
