"""Times and memory of the board over 500 made runs of 20,000 steps, and of a run of 100,000 steps.

`python benchmarks/board_scale.py [--runs 500] [--steps 20000]` makes the runs in a temporary folder (5 GB; hard links
share the metrics of all but eight), starts a board in a process of its own and prints a line for each figure.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "board" / "tests"))

import httpx

from board_runs import BoardProcess, make_run, running_board  # pyright: ignore[reportMissingImports]

NUM_WRITTEN = 8
"""Runs whose metrics are written; the others have the files of one of these."""


def timed(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def make_runs(root: Path, num_runs: int, num_steps: int) -> None:
    written = [make_run(root, f"run-{number:03d}", num_steps=num_steps, seed=number) for number in range(NUM_WRITTEN)]
    for number in range(NUM_WRITTEN, num_runs):
        run = make_run(root, f"run-{number:03d}", num_steps=0, seed=number)
        (run / "pretrain" / "metrics.jsonl").unlink()
        os.link(written[number % NUM_WRITTEN] / "pretrain" / "metrics.jsonl", run / "pretrain" / "metrics.jsonl")
    make_run(root, "long", num_steps=100_000)


def first_curves(board: BoardProcess, query: str) -> tuple[float, float]:
    """Returns the seconds until the first points of a page and until all of them have come."""
    begin = time.perf_counter()
    first = 0.0
    with board.client() as client, client.stream("GET", f"/events/run?{query}") as reply:
        for line in reply.iter_lines():
            if line.startswith('data: {"charts"'):
                first = first or time.perf_counter() - begin
                if json.loads(line.removeprefix("data: "))["share"] == 1.0:
                    return first, time.perf_counter() - begin
    raise RuntimeError("the stream ended")


def drawn(board: BoardProcess) -> float | None:
    """Returns the seconds from opening the page of the long run in Chromium until its charts are drawn whole."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        return None
    from playwright.sync_api import sync_playwright

    whole = (
        "document.querySelectorAll('[data-charts] .main-svg').length > 5 "
        "&& !document.querySelector('#notice').textContent"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(board.url)
        page.goto(f"{board.base}/run?run=run-000")  # Plotly's script is in the browser's cache from here on
        page.wait_for_selector("[data-charts] .main-svg")
        begin = time.perf_counter()
        page.goto(f"{board.base}/run?run=long")
        while not page.evaluate(whole):
            time.sleep(0.01)
        took_s = time.perf_counter() - begin
        browser.close()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        make_runs(root, options.runs, options.steps)
        with running_board(root) as board, board.client() as client:  # which opens the first page
            pass
        with running_board(root) as board, httpx.Client(timeout=60, follow_redirects=True) as client:
            cold = timed(lambda: client.get(board.url))
            client.base_url = board.base
            warm = statistics.median(timed(lambda: client.get("/")) for _ in range(5))
            print(f"first page of {options.runs + 1} runs: {cold:.2f} s, again {warm:.2f} s")
            pages = [timed(lambda name=name: client.get(f"/run?run=run-{name:03d}")) for name in range(40, 50)]
            print(f"page of a run: median {statistics.median(pages):.3f} s, slowest {max(pages):.3f} s")
            curves = [first_curves(board, f"run=run-{name:03d}") for name in range(40, 45)]
            print(f"curves of {options.steps:,} steps: median {statistics.median(one for _, one in curves):.2f} s")
            first, last = first_curves(board, "run=long")
            print(f"curves of 100,000 steps: first points {first:.2f} s, all of them {last:.2f} s")
            again, _ = first_curves(board, "run=long")
            print(f"curves of 100,000 steps, again: {again:.2f} s")
            eight = "&".join(f"run=run-{name:03d}" for name in range(8))
            print(f"eight runs compared: {first_curves(board, eight)[1]:.2f} s")
            if (took_s := drawn(board)) is not None:
                print(f"100,000 steps drawn in Chromium, whole page: {took_s:.2f} s")
            print(f"resident memory: {board.memory_bytes() / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
