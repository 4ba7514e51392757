"""Techniques and strategies of other packages that know nothing of layouts: what they do on two processes is what they
do on one, or is refused with the remedy. Packages are written into a folder of the import path.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refusals import config_error

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import tiny_run

from distributed import run_distributed
from modelwright import recipes
from modelwright.core import compatibility
from modelwright.core.compatibility import (
    ACCELERATOR,
    SEVERAL_REPLICAS,
    SEVERAL_STAGES,
    UNDECLARED,
    WHOLE_GRADIENTS,
    WHOLE_MATRICES,
)
from modelwright.core.config import ConfigError, digest, dump, load_yaml, parse
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.pipeline.run import check_training
from modelwright.pipeline.run_config import parse_run
from modelwright.train.config import SHARED_MEMORY, TrainConfig, check_layout
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder, Update

PACKAGE = '''
"""Noise on gradients that knows nothing of layouts, and a strategy."""
from dataclasses import dataclass
import torch
from modelwright.core.compatibility import WHOLE_MODEL
from modelwright.core.config import ConfigError
from modelwright.parallel.gradient_sync import AllReduceSync
from modelwright.parallel.strategy import AllReduce, StrategySpec
from modelwright.train.outside import TechniqueSpec
from modelwright.train.technique import Technique

@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    scale: float = 0.01

    def __post_init__(self):
        if self.scale < 0:
            raise ConfigError(f"scale: must not be negative, got {self.scale}")

def noise(config, run):
    def on_gradients(update):
        for view in update.gradients:
            view.tensor.add_(torch.randn(view.tensor.shape, dtype=view.tensor.dtype), alpha=config.scale)
    return Technique(name="noise", on_gradients=on_gradients)

NOISE = TechniqueSpec(build=noise, config=NoiseConfig)
QUIET = TechniqueSpec(build=noise, config=NoiseConfig, needs=frozenset())

class Plain(AllReduce):
    needs = frozenset({WHOLE_MODEL})
    def __init__(self, config, replica, world):
        super().__init__(replica, AllReduceSync(replica.mesh.reduce))

PLAIN = StrategySpec(strategy=Plain)
'''
ENTRIES = """
[modelwright.techniques]
noise = noisy_package:NOISE
quiet = noisy_package:QUIET
[modelwright.strategies]
plain = noisy_package:PLAIN
"""


def install(folder: Path) -> Path:
    """A distribution outside of the repository."""
    info = folder / "noisy_package-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "noisy_package.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install(tmp_path / "installed")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "noisy_package", raising=False)
    return folder


def centralized(needs: frozenset[str]) -> TechniqueBuilder:
    """Gradient centralization (Yong et al. 2020): the mean of each row of a matrix's gradient becomes 0."""

    def on_gradients(update: Update) -> None:
        for view in update.gradients:
            if view.tensor.dim() == 2:
                view.tensor.sub_(view.tensor.mean(dim=1, keepdim=True))

    return lambda run: Technique(name="centralized", on_gradients=on_gradients, needs=needs)


def shrunk(needs: frozenset[str]) -> TechniqueBuilder:
    """Takes 1% off every weight after every step."""

    def build(run: Runtime) -> Technique:
        @torch.no_grad()
        def on_step_end(info: StepInfo) -> None:
            for view in run.parameters():
                view.tensor.mul_(0.99)

        return Technique(name="shrunk", on_step_end=on_step_end, needs=needs)

    return build


def noisy(needs: frozenset[str]) -> TechniqueBuilder:
    """Noise on gradients and weights by the shapes of tensors."""

    def build(run: Runtime) -> Technique:
        def on_gradients(update: Update) -> None:
            for view in update.gradients:
                view.tensor.add_(torch.randn(view.tensor.shape, dtype=view.tensor.dtype), alpha=0.01)

        @torch.no_grad()
        def on_step_end(info: StepInfo) -> None:
            for view in run.parameters():
                view.tensor.add_(torch.randn(view.tensor.shape, dtype=view.tensor.dtype), alpha=0.001)

        return Technique(name="noisy", on_gradients=on_gradients, on_step_end=on_step_end, needs=needs)

    return build


SHORT = {"num_steps": 3, "checkpoint_every_steps": 0, "eval_every_steps": 0, "keep_best": False}
Builder = Callable[[frozenset[str]], TechniqueBuilder]


def trained(folder: Path, *techniques: TechniqueBuilder, settings: Any = (), **more: Any) -> dict[str, Tensor]:
    """Final weights in FP64, so that only the techniques could tell layouts apart."""
    torch.set_num_threads(1)
    config = tiny_run.settings(**{**SHORT, **dict(settings)})
    model = tiny_run.run_in_float64(folder, config, techniques=list(techniques), heldout=[], **more)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


@dataclass(frozen=True)
class Outcome:
    weights: Mapping[str, Tensor]
    refusal: str = ""


def attempt(folder: Path, *techniques: TechniqueBuilder, **more: Any) -> Outcome:
    try:
        return Outcome(trained(folder, *techniques, **more))
    except ConfigError as error:
        return Outcome({}, str(error))


def in_layouts(world: World, folder: Path, make: Builder, needs: frozenset[str]) -> dict[str, Outcome]:
    return {
        name: attempt(folder / name, make(needs), world=world, parallel=ParallelConfig(**layout))
        for name, layout in tiny_run.TWO_RANK_LAYOUTS.items()
    }


def check(outcomes: Mapping[str, Outcome], alone: Mapping[str, Tensor], refused: Mapping[str, str]) -> None:
    for layout, outcome in outcomes.items():
        assert refused.get(layout, "") in outcome.refusal, (layout, outcome.refusal)
        assert bool(outcome.refusal) == (layout in refused), (layout, outcome.refusal)
        for name, weight in outcome.weights.items():
            torch.testing.assert_close(
                weight, alone[name], rtol=0, atol=1e-9, msg=lambda text, at=layout: f"{at}: {text}"
            )


DIVIDED = dict.fromkeys(("zero 3", "tensor", "pipeline"), "in one piece on every rank, which parallel.")


@pytest.mark.slow
@pytest.mark.parametrize("make", [centralized, shrunk, noisy])
def test_who_declares_nothing_does_on_two_processes_what_it_does_on_one(make: Builder, tmp_path: Path) -> None:
    alone, plain = trained(tmp_path / "alone", make(UNDECLARED)), trained(tmp_path / "plain")
    assert any(not torch.equal(weight, plain[name]) for name, weight in alone.items())
    for outcomes in run_distributed(in_layouts, 2, tmp_path / "two", make, UNDECLARED):
        check(outcomes, alone, DIVIDED)
    assert Technique(name="any").needs == UNDECLARED


def test_whole_matrices_are_whole_under_the_default_of_two_processes(tmp_path: Path) -> None:
    needs, what = frozenset({WHOLE_MATRICES}), "whole weight matrices on every rank, which parallel."
    alone = trained(tmp_path / "alone", centralized(needs))
    for outcomes in run_distributed(in_layouts, 2, tmp_path / "two", centralized, needs):
        outcomes.pop("pipeline")  # whose ranks have whole matrices, of their layers
        check(outcomes, alone, {"zero 3": what, "tensor": what})


@pytest.mark.slow
def test_who_declares_to_need_nothing_and_acts_by_shapes_is_refused(tmp_path: Path) -> None:
    draws = "noisy: draws random numbers from PyTorch's default generator"
    alone = trained(tmp_path / "alone", noisy(frozenset()))
    for outcomes in run_distributed(in_layouts, 2, tmp_path / "two", noisy, frozenset[str]()):
        check(outcomes, alone, {**dict.fromkeys(DIVIDED, draws), "one copy": draws})
        assert "view.random_like(seed, step)" in outcomes["one copy"].refusal
    shared = {"one copy": "shrunk: changes weights that several processes share"}
    alone = trained(tmp_path / "alone-2", shrunk(frozenset()))
    for outcomes in run_distributed(in_layouts, 2, tmp_path / "two-2", shrunk, frozenset[str]()):
        check(outcomes, alone, shared)


def named(world: World, folder: Path, package: Path, settings: Mapping[str, Any]) -> list[Outcome]:
    sys.path.insert(0, str(package))
    layouts: list[dict[str, Any]] = [{}, {"tensor": 2}]
    return [
        attempt(folder / str(number), world=world, settings=settings, parallel=ParallelConfig(**layout))
        for number, layout in enumerate(layouts)
    ]


@pytest.mark.slow
def test_settings_name_a_technique_and_a_strategy(package: Path, tmp_path: Path) -> None:
    settings = {"techniques": {"noise": {"scale": 0.02}}, "gradient_sync": {"strategy": {"plain": {}}}}
    alone, plain = trained(tmp_path / "alone", settings=settings), trained(tmp_path / "plain")
    assert any(not torch.equal(weight, plain[name]) for name, weight in alone.items())
    for default, tensor in run_distributed(named, 2, tmp_path / "two", package, settings):
        check({"default": default}, alone, {})
        assert "gradient_sync.strategy: plain needs a whole model on every rank" in tensor.refusal


def test_their_settings_are_checked_shown_and_part_of_the_run(package: Path, tmp_path: Path) -> None:
    config = parse(TrainConfig, {"techniques": {"noise": {}}}, "pretrain")
    assert dump(config)["techniques"] == {"noise": {"scale": 0.01}}
    assert parse(TrainConfig, dump(config)) == config
    digests = [
        digest(parse(TrainConfig, {"techniques": {"noise": one}}).identity())
        for one in ({}, {"scale": 0.01}, {"scale": 1})
    ]
    assert digests[0] == digests[1] != digests[2]
    orders = [
        parse(TrainConfig, {"techniques": {name: {} for name in names}})
        for names in (("noise", "quiet"), ("quiet", "noise"))
    ]
    assert digest(orders[0].identity()) != digest(orders[1].identity())
    assert not {"techniques"} & TrainConfig().identity().keys()
    assert "strategy" not in TrainConfig().identity()["gradient_sync"]
    for techniques, text in (
        ({"nois": {}}, r"pretrain\.techniques\.nois: no installed package adds it .*did you mean 'noise'"),
        ({"noise": {"scal": 1}}, r"pretrain\.techniques\.noise\.scal: unknown setting; did you mean 'scale'"),
        ({"noise": {"scale": -1}}, r"pretrain\.techniques\.noise\.scale: must not be negative"),
        ({"noise": None}, r"pretrain\.techniques\.noise: expected a mapping"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse(TrainConfig, {"techniques": techniques}, "pretrain")
    with config_error(
        "techniques.noise", match=r"techniques\.noise: needs every .*, which parallel\.tensor 2 takes away.*declare"
    ):
        check_layout(config, ParallelConfig(tensor=2), num_processes=2)
    with config_error("techniques.quiet"):
        trained(tmp_path / "quiet", settings={"techniques": {"quiet": {}}})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kind": "int8"}, "gradient_sync.kind: int8 needs gradients that are summed"),
        ({"local_sgd": {"sync_every_steps": 2}}, "which gradient_sync.strategy plain takes away"),
        ({"strategy": {"plain": {}, "plane": {}}}, "a training has one strategy"),
        ({"strategy": {"plane": {}}}, r"strategy\.plane: no installed package adds it .*did you mean 'plain'"),
    ],
)
def test_a_strategy_leaves_no_setting_without_effect(settings: dict[str, Any], text: str, package: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(TrainConfig, {"gradient_sync": {"strategy": {"plain": {}}, **settings}, "eval_every_steps": 0})


def test_gradients_that_are_updated_in_backward_are_refused(package: Path) -> None:
    for settings in ({"techniques": {"noise": {}}}, {"gradient_sync": {"strategy": {"plain": {}}}}):
        with pytest.raises(ConfigError, match=f"needs .*{WHOLE_GRADIENTS[:5]}|in one piece"):
            parse(TrainConfig, {"optimizer_in_backward": True, **settings})


def test_the_page_lists_all_needs() -> None:
    """docs/extending.md"""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    texts = {value: name for name, value in vars(compatibility).items() if name.isupper() and isinstance(value, str)}
    layouts = [ParallelConfig(**{axis: 2}) for axis in ("pipeline", "context", "tensor")]
    features = [one for layout in layouts for one in layout.features(2)]
    offered = {SEVERAL_REPLICAS, SEVERAL_STAGES, ACCELERATOR}
    rows = {
        row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `") and row.split("`")[1].isupper()
    }
    assert rows.keys() == {name for text, name in texts.items() if text not in offered}
    for feature in [*features, SHARED_MEMORY]:
        word = {"shared_memory": "one copy"}.get(feature.key.removeprefix("parallel."), feature.key).replace(
            "_parallel", ""
        )
        for text in feature.breaks:
            assert word in rows[texts[text]].rpartition("|")[0].rpartition("|")[2], (feature.key, texts[text])
    assert set(re.findall(r"`([A-Z_]+)`", page[page.rindex("`UNDECLARED` is") + 15 :])) == {
        texts[one] for one in UNDECLARED
    }


@pytest.mark.parametrize(
    ("stage", "layout", "what"),
    [
        ("dpo", {"context": 2}, "dpo: needs whole rows on every rank, which parallel.context 2"),
        ("kto", {"context": 2}, "kto: needs whole rows on every rank, which parallel.context 2"),
        ("reward", {"context": 2}, "reward: needs whole rows on every rank, which parallel.context 2"),
        ("qat", {"tensor": 2}, "qat: needs all layers, undivided, on every rank, which parallel.tensor 2"),
    ],
)
def test_what_a_stage_of_the_package_cannot_bear_is_known_before_the_first_stage(
    stage: str, layout: dict[str, int], what: str
) -> None:
    stages = ["clean", "tokenize", "pack", "pretrain", "sft", stage]
    config = parse_run({**load_yaml(Path(recipes.__file__).parent / "tiny.yaml"), "stages": stages})
    check_training(config, ParallelConfig(), num_processes=2, stages=stages)
    with pytest.raises(ConfigError, match=f"^{what}"):
        check_training(config, ParallelConfig(**layout), num_processes=2, stages=stages)
