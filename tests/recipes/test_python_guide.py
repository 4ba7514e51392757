"""docs/python.md as a reader follows it: the notebook is the same page, and its cells run in an empty folder."""

import json
import runpy
from pathlib import Path

import pytest

from doc_pages import blocks
from rank_processes import start_process

DOCS = Path(__file__).parents[2] / "docs"
RUNNER = """
import json
from pathlib import Path

cells = [cell for cell in json.loads(Path("python.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
codes = [code for cell in cells if not (code := "".join(cell["source"])).startswith("%pip")]
try:
    from IPython.core.interactiveshell import InteractiveShell
except ImportError:
    names = {"__name__": "__main__"}
    for code in codes:
        exec(compile(code, "cell", "exec"), names)
else:
    shell = InteractiveShell.instance(history_manager=None)
    for code in codes:
        shell.run_cell(code).raise_error()
    names = shell.user_ns
losses = [step["loss"] for step in names["run"].metrics()["pretrain"] if "loss" in step]
scores = [names[name].bits_per_byte for name in ("likely", "unlikely")]
print()
print(json.dumps({
    "improved": losses[-1] < losses[0],
    "trained_again": [outcome.stage for outcome in names["same"].result.outcomes if outcome.ran],
    "finished": [names["stopped"].is_finished, names["whole"].is_finished],
    "seen": [step.step for step in names["seen"]],
    "likely_is_cheaper": scores[0] < scores[1],
    "dpo": len(names["aligned"].metrics()["dpo"]),
}))
"""


def made() -> dict:
    module = runpy.run_path(str(DOCS / "notebook.py"))
    return json.loads(module["notebook"]((DOCS / "python.md").read_text(encoding="utf-8")))


def test_the_notebook_is_current() -> None:
    """Otherwise: python docs/notebook.py."""
    assert json.loads((DOCS / "python.ipynb").read_text(encoding="utf-8")) == made()


def test_the_notebook_has_every_block_of_the_page_in_order() -> None:
    cells = made()["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    pieces = [block.text.strip() for block in blocks(DOCS / "python.md") if block.language == "python"]
    assert codes[1:] == pieces
    assert len(pieces) >= 10
    assert "".join(cells[0]["source"]).startswith("# ")
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_notebook_is_valid() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(DOCS / "python.ipynb", 4))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cells_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    (tmp_path / "python.ipynb").write_bytes((DOCS / "python.ipynb").read_bytes())
    (tmp_path / "cells.py").write_text(RUNNER)
    code, output, errors = start_process(tmp_path / "cells.py", cwd=tmp_path).end()
    assert code == 0, output[-3000:] + errors[-3000:]
    told = json.loads(output.splitlines()[-1])
    assert told == {
        "improved": True,
        "trained_again": [],
        "finished": [False, True],
        "seen": list(range(1, 9)),
        "likely_is_cheaper": True,
        "dpo": told["dpo"],
    }
    assert told["dpo"] >= 4
    assert "sft.num_stepz\nunknown\n" in output
    assert (tmp_path / "runs/first/report.html").is_file()
    assert (tmp_path / "boxes-model/model.safetensors").is_file()
