"""Formats that change in THE loop, one process: what a format does to a part is seen also while it is in force."""

import json
from pathlib import Path

import pytest

from modelwright.train.precision.apply import ModelPrecision

SECONDS = {"fp32": 4.0, "int8": 1.0}
RULES = {
    "kind": "rules",
    "decide_every_steps": 5,
    "measure_steps": 2,
    "cooldown_decisions": 0,
    "candidates": ["int8"],
    "tolerance": 0.05,
    "revert_on_loss_rise": 9.0,
}
BROKEN = "blocks.1.ffn"


@pytest.fixture
def int8_spoils_a_product(monkeypatch):
    """Not from the first: rules have let the part in before it does harm."""
    usual, made = ModelPrecision.product, []

    def product(self, name, chosen):
        found = usual(self, name, chosen)
        if name != f"{BROKEN}.down_proj" or chosen != "int8":
            return found
        made.append(name)
        return found if len(made) < 3 else lambda x, weight: -20 * found(x, weight)

    monkeypatch.setattr(ModelPrecision, "product", product)


def changes(tiny, folder: Path, *, num_steps: int) -> tuple[list[dict], dict]:
    known = {f"{kind}/{name}": value for kind in ("attention", "ffn") for name, value in SECONDS.items()}
    folder.mkdir()
    (folder / "formats.json").write_text(json.dumps({**known, "memory": 0.1}))
    precision = {"policy": "fp32", "adaptive": RULES}
    settings = tiny.settings(num_steps=num_steps, learning_rate=1e-3, precision=precision, eval_every_steps=0)
    tiny.run(folder, settings, heldout=[])
    last = max((folder / "checkpoints").glob("step-*/state.json"))
    state = json.loads(last.read_text())["state"]["techniques"]["adaptive_precision"]
    lines = (folder / "formats.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], {part: rise for part, _, rise in state["sensitivity"]}


@pytest.mark.usefixtures("int8_spoils_a_product")
def test_a_part_that_its_format_harms_goes_back_for_that_reason(tiny, tmp_path):
    found, rises = changes(tiny, tmp_path / "run", num_steps=10)
    ours = [(change["from"], change["to"], change["reason"]) for change in found if change["part"] == BROKEN]
    assert ours[0][:2] == ("fp32", "int8")
    assert ours[1][:2] == ("int8", "fp32")
    assert ours[1][2].startswith("damage of int8")
    assert rises[BROKEN] > 10 * max(abs(rise) for part, rise in rises.items() if part != BROKEN)


def test_parts_in_a_narrow_format_are_tried_against_fp32(tiny, tmp_path):
    _, rises = changes(tiny, tmp_path / "run", num_steps=40)
    assert len(rises) == 4
    assert all(0.0 < abs(rise) < 0.02 for rise in rises.values())
