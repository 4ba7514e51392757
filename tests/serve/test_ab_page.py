"""The page of A/B tests in a real browser: what it says of a running, a worse, a broken and no test."""

import re
from pathlib import Path

import pytest

from modelwright.serve.ab.experiment import (
    CONTROL,
    TREATMENT,
    Experiment,
    ExperimentRequest,
    ExperimentState,
    RequestEvent,
    create_tables,
    end,
    insert,
)
from modelwright.serve.account.database import SqliteDatabase
from modelwright.serve.config import RequestsConfig
from serve.test_chat_page import browser, new_page, pytestmark, sync_api  # noqa: F401
from serve.test_keys import write_keys


def counted(num_each: int, *, errors_in_b: int = 0, only: str = "") -> ExperimentState:
    """A state of units in both arms, or in one only."""
    state = ExperimentState()
    for number in range(2 * num_each):
        arm = only or (CONTROL, TREATMENT)[number % 2]
        is_error = arm == TREATMENT and number < 2 * errors_in_b
        event = RequestEvent(arm=arm, share=0.5, is_error=is_error, latency_s=number / 100)
        state.take_request(event, 0)
        state.take_score(arm, (-1.0) ** (number // 2), 0)
    return state


def write_test(database: SqliteDatabase, name: str, state: ExperimentState, number: int, status: str, reason: str = ""):
    request = ExperimentRequest(name=name, path="runs/next")
    insert(
        database,
        Experiment(
            name=name, request=request, share=0.5, control_version="fp_a", treatment_version="fp_b", state=state,
            started_at=float(number),
        ),
    )  # fmt: skip
    assert end(database, name, status, reason)
    assert not end(database, name, "promoted"), "what a guard has ended nobody promotes"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_says_what_is_known_and_no_more(slow_server, browser, tmp_path: Path, scheme: str):  # noqa: F811
    database = SqliteDatabase(tmp_path / "ab.sqlite")
    create_tables(database)
    write_test(database, "good", counted(200), 1, "ended")
    write_test(database, "worse", counted(200, errors_in_b=30), 2, "rolled_back", "errors")
    write_test(database, "broken", counted(200, only=CONTROL), 3, "rolled_back", "sample_ratio")
    database.close()
    server = slow_server(requests=RequestsConfig(ab_state=str(tmp_path / "ab.sqlite")))
    page = new_page(browser, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{server.url}/ab")
    sync_api.expect(page.locator("#state")).to_have_text("No test is running.")
    headings = ["broken: rolled back", "worse: rolled back", "good: ended, A stays"]
    sync_api.expect(page.locator("h2")).to_have_text(headings)

    good = page.locator("#test-good")
    sync_api.expect(good.locator("[data-measure=failed]")).to_contain_text("No difference shown so far.")
    sync_api.expect(good.locator("[data-measure=slow] h3")).to_have_text("Slow answers (over 1.88 s)")
    score = good.locator("[data-measure=score]")
    sync_api.expect(score).to_contain_text("0 (200 sessions)")
    sync_api.expect(score.locator("svg")).to_have_attribute("aria-label", re.compile(r"interval -0\.\d+ to 0\.\d+;"))
    worse = page.locator("#test-worse")
    sync_api.expect(worse).to_contain_text("Why: B had more errors than A.")
    sync_api.expect(worse.locator("[data-measure=failed]")).to_contain_text("More often in B.")
    sync_api.expect(worse).to_contain_text("fixed beforehand")
    broken = page.locator("#test-broken")
    sync_api.expect(broken).to_contain_text("Nothing else of this test can be trusted.")
    assert broken.locator("[data-measure]").count() == 0
    assert "p =" not in broken.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert problems == []
    server.stop()
    sync_api.expect(page.locator("#state")).to_have_text("The server does not answer.")
    page.close()


def test_no_tests_and_a_server_that_asks_for_a_key(slow_server, browser, tmp_path: Path):  # noqa: F811
    keys = write_keys(tmp_path / "keys.yaml", scrape={"scopes": ["metrics"]}, user={})
    server = slow_server(keys_file=keys)
    page = new_page(browser)
    page.goto(f"{server.url}/ab")
    sync_api.expect(page.locator("#ask")).to_be_visible()
    for key, words in (("user", "to keys with the scope"), ("scrape", "--requests.ab_state FILE")):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#state")).to_contain_text(words)
    sync_api.expect(page.locator("#ask")).to_be_hidden()
    page.close()
