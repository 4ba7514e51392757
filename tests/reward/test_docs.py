"""The examples of docs/rewards.md give the rewards that the page says."""

import json
import re
from pathlib import Path

import pytest
import yaml

from modelwright.core.extensions import installed
from modelwright.reward.build import GROUP, REWARDS, build_reward
from reward_samples import sample

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```\n\n```json\n(.*?)```\n", PAGE, flags=re.DOTALL)


def test_every_kind_has_an_example_and_every_option_a_row() -> None:
    shown = {name for settings, _ in EXAMPLES for name in yaml.safe_load(settings)}
    kinds = {**REWARDS, **installed(GROUP, type)}
    assert "code" in kinds
    assert shown >= kinds.keys()
    for kind, config in kinds.items():
        section = PAGE.partition(f"### `{kind}`\n")[2].partition("\n### ")[0]
        missing = [name for name in config.__annotations__ if f"`{name}" not in section and f"{name}:" not in section]
        assert missing == [], kind


@pytest.mark.parametrize(("settings", "samples"), EXAMPLES)
def test_an_example(settings: str, samples: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(def .*?)```\n", PAGE, flags=re.DOTALL)
    Path("rewards.py").write_text(code)
    cases = json.loads(samples)
    scores = build_reward(yaml.safe_load(settings)).score(
        [sample(case["answer"], **case.get("fields", {})) for case in cases]
    )
    assert [score.value for score in scores] == [case["reward"] for case in cases]
