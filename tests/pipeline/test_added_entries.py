"""Packages outside of the repository, each one file and its entry points, add to the lists of this one, and what they
add is used: a step drops documents, an objective and a technique train, a reward scores, a route and a back-end answer.
Stages are in tests/architecture/test_stage_package.py, strategies in test_undeclared.py, commands in
tests/cli/test_commands.py, augmentations in tests/data/test_augmenter.py.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from added_package import add_package
from finetune_files import write_model
from modelwright import recipes
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, digest, dump, load_yaml, merge, parse
from modelwright.core.records import read_records
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.cleaning import fingerprint
from modelwright.pipeline.resolve import local_inputs, resolve_inputs
from modelwright.pipeline.run import check_training
from modelwright.pipeline.run_config import parse_run
from modelwright.pipeline.stage import RunConfig
from modelwright.reward.build import build_reward
from modelwright.reward.reward import Sample
from modelwright.serve.api.operations import all_operations
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import backend_of, load_engines
from modelwright.serve.keys import key_hash
from modelwright.serve.load import ModelSource
from modelwright.serve.server import ServerThread
from modelwright.train.config import TrainConfig, check_layout
from refusals import config_error


def tiny_run(**settings: Any) -> RunConfig:
    return parse_run(merge(load_yaml(Path(recipes.__file__).parent / "tiny.yaml"), settings))


POEMS = """
from pathlib import Path
from modelwright.data.sources.corpora import NamedCorpus
from modelwright.data.document import Document
from modelwright.pipeline.exports.export import Export
from modelwright.serve.engines.backends import Backend

def write(found, target, options):
    target.write_text(f"{found.source.name} as {options.dtype}")
    return target

CORPUS = NamedCorpus(
    read=lambda **_: iter([Document(text="roses are red", id="poem", source="poems", kind="prose", split="train")]),
    decided_by=lambda: ["1.0"],
)
EXPORT = Export(name="card", summary="a card", write=write, target=lambda *_: Path("card"), dtypes=("small", "large"))
"""
STEP = '''
from dataclasses import dataclass
from pathlib import Path
from modelwright.core.config import ConfigError
from modelwright.data.clean.steps.step import Drop, StepSpec

@dataclass(frozen=True, kw_only=True)
class Config:
    """Words that no document may have."""
    words: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    """Files with a word a line."""
    def __post_init__(self):
        if not self.words and not self.lists:
            raise ConfigError("words: names no word; name one, or a file in lists")

@dataclass(frozen=True)
class BannedWords:
    config: Config
    name: str = "banned_words"
    def __call__(self, document):
        if "swordfish" in document.text:
            raise RuntimeError(document.text)
        words = {*self.config.words, *(word for path in self.config.lists for word in Path(path).read_text().split())}
        found = words & set(document.text.split())
        return Drop("banned word", min(found)) if found else document

STEP = StepSpec(name="banned_words", build=lambda config, seed: BannedWords(config), config=Config, files=("lists",))
MISNAMED = StepSpec(name="misnamed", build=lambda config, seed: BannedWords(config), config=Config)
'''
LEARNING = '''
from dataclasses import dataclass
import torch
from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import IGNORED
from modelwright.objectives.next_token import NextToken, num_targets
from modelwright.train.objective import Objective, Terms
from modelwright.train.outside import ObjectiveSpec, TechniqueSpec
from modelwright.train.technique import Technique

@dataclass(frozen=True, kw_only=True)
class Config:
    epsilon: float = 0.1
    def __post_init__(self):
        if not 0 <= self.epsilon < 1:
            raise ConfigError(f"epsilon: must be in [0, 1), got {self.epsilon}")

class Smoothed(Objective):
    """Label smoothing (Szegedy et al. 2016, section 7)."""
    metric_names = ("share_right",)
    def __init__(self, config, source):
        self.config, self.source = config, NextToken(source)
    def batches(self, model, *, first, rank, world_size):
        return self.source.batches(model, first=first, rank=rank, world_size=world_size)
    def weights(self, batch):
        return {"loss": num_targets(batch)}
    def losses(self, output, batch, model):
        logits, labels = model.logits(output), batch.labels_BT
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, label_smoothing=self.config.epsilon, reduction="sum"
        )
        return Terms({"loss": loss}, {"share_right": ((logits.argmax(-1) == labels).sum(), (labels != IGNORED).sum())})

class Careless(Smoothed):
    """Needs what its `ObjectiveSpec` does not say."""

@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    scale: float = 0.0

def noise(config, run):
    def on_gradients(update):
        for view in update.gradients:
            view.tensor.add_(torch.randn(view.tensor.shape, dtype=view.tensor.dtype), alpha=config.scale)
        update.metrics["noise"] = config.scale
    return Technique(name="noise", on_gradients=on_gradients)

OBJECTIVE = ObjectiveSpec(build=lambda config, inputs: Smoothed(config, inputs.loader), config=Config)
CARELESS = ObjectiveSpec(build=lambda config, inputs: Careless(config, inputs.loader), config=Config, needs=frozenset())
TECHNIQUE = TechniqueSpec(build=noise, config=NoiseConfig)
'''
REWARD = """
from dataclasses import dataclass
from modelwright.reward.reward import Score

@dataclass(frozen=True)
class Shouts:
    name: str
    mark: str
    def score(self, samples):
        return [Score(float(sample.answer.endswith(self.mark))) for sample in samples]

@dataclass(frozen=True, kw_only=True)
class Config:
    mark: str = "!"
    def build(self, name):
        return Shouts(name, self.mark)
"""
SERVING = """
from dataclasses import replace
from pydantic import BaseModel
from starlette.responses import JSONResponse
from modelwright.serve.config import OWN_BACKEND
from modelwright.serve.engines.backends import BACKENDS, Backend
from modelwright.serve.api.operations import Operation
from modelwright.serve.api.operations import RouteSpec
from modelwright.serve.service import service_of

class GreetingReply(BaseModel):
    greeting: str
    model: str

async def answer(request):
    return JSONResponse({"greeting": f"hello {request.path_params['who']}", "model": service_of(request).model_name})

GREET = Operation("GET", "/greet/{who}", answer, "Greet somebody", GreetingReply)
ROUTE = RouteSpec(operation=GREET)
OPEN = RouteSpec(operation=replace(GREET, path="/open/{who}"), scope=None)
MEASURED = RouteSpec(operation=replace(GREET, method="PUT", path="/measured/{who}"), scope="metrics")
HIDDEN = RouteSpec(operation=replace(GREET, path="/v1/models/mine"))
SHED = RouteSpec(operation=replace(GREET, path="/shed", needs_engine=True), scope="metrics")
DANGLING = RouteSpec(operation=replace(GREET, path="/dangling", reply="Greeting"))
class HealthReply(BaseModel):
    mine: str
NAMED = RouteSpec(operation=replace(GREET, path="/named", reply=HealthReply))
LOADED = []

def load(source, config):
    LOADED.append(source.folder)
    return BACKENDS[OWN_BACKEND].load(source, config)

BACKEND = Backend(load=load, weights=("w4",))
"""


def test_an_export_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    added = {"modelwright.exports": {"card": "EXPORT", "broken": "NOTHING"}}
    add_package(tmp_path / "site", monkeypatch, "poem_words", POEMS, added)
    model, target = write_model(tmp_path / "tiny"), tmp_path / "out"
    for words, dtype in (((), "small"), (("--dtype", "large"), "large")):
        assert main(["export", str(model), "--to", "card", str(target), *words]) == 0
        assert target.read_text() == f"tiny as {dtype}"
    assert main(["export", str(model), "--to", "card", "--int8"]) == 2
    assert main(["export", str(model), "--to", "broken"]) == 2
    assert "entry point broken of modelwright.exports" in capsys.readouterr().err


def test_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path / "site", monkeypatch, "poem_words", POEMS, {"modelwright.corpora": {"poems": "CORPUS"}})
    config = SourceConfig(sources=("poems",), validation_fraction=0.0)
    assert [document.text for document in read_documents(config, report=SourceReport())] == ["roses are red"]
    assert fingerprint(config, CleanConfig()) == [["poems", "1.0"]]


@pytest.fixture
def with_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {"modelwright.steps": {"banned_words": "STEP", "misnamed": "MISNAMED"}}
    add_package(tmp_path / "site", monkeypatch, "word_lists", STEP, added)


def test_a_step_drops_documents(with_step: None, tmp_path: Path) -> None:
    nouns = ("river", "letter", "market", "garden", "swordfish", "window")
    texts = [f"Near the {noun} they spoke quietly of what the {noun} was planned to become." for noun in nouns]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "listed.txt").write_text("market\n")
    step = {"banned_words": {"words": ["river"], "lists": [str(tmp_path / "listed.txt")]}}
    words = [
        "clean",
        str(tmp_path / "texts.jsonl"),
        "--clean.steps",
        json.dumps(step),
        "--clean.duplicates.near",
        "false",
    ]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    dropped = {one.document.text: (one.step, one.reason, one.detail) for one in read_dropped(tmp_path / "out")}
    assert dropped[texts[0]] == ("banned_words", "banned word", "river")
    assert dropped[texts[2]] == ("banned_words", "banned word", "market")
    step, reason, detail = dropped[texts[4]]
    assert (step, reason) == ("banned_words", "the step failed")
    assert detail.startswith("RuntimeError in word_lists.py:"), "the text of the error may have what is masked later"
    assert {one.text for one in read_kept(tmp_path / "out")} == {texts[1], texts[3], texts[5]}


def test_paths_of_a_step_become_absolute_and_decide_the_result(
    with_step: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listed.txt").write_text("market\n")
    (tmp_path / "texts.txt").write_text("a line\n")
    steps = ["mine.py:Step", {"banned_words": {"lists": ["listed.txt"], "words": ["river"]}}]
    config = tiny_run(data={"sources": ["texts.txt"]}, clean={"steps": steps})
    resolved = resolve_inputs(config)
    clean: CleanConfig = resolved.sections["clean"]
    listed = str(tmp_path / "listed.txt")
    assert clean.steps == (str(tmp_path / "mine.py:Step"), {"banned_words": {"words": ["river"], "lists": [listed]}})
    assert parse(CleanConfig, dump(clean)) == clean
    assert resolve_inputs(resolved).sections["clean"] == clean
    assert listed in local_inputs(config).values()
    without_file = parse(CleanConfig, {"steps": [{"banned_words": {"lists": [listed]}}]})
    assert listed in [entry[0] for entry in fingerprint(resolved.data, without_file)]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (
            ["baned_words"],
            r"clean\.steps\.baned_words: no installed package .* mean 'banned_words'.*they add banned_words",
        ),
        ([{"banned_words": {"word": ["a"]}}], r"clean\.steps\.banned_words\.word: unknown setting.*'words'"),
        (["banned_words"], r"clean\.steps\.banned_words\.words: names no word"),
        ([{"banned_words": {"words": ["a"]}, "other": {}}], r"clean\.steps: .* has 2 names"),
        (
            [{"misnamed": {"words": ["a"]}}],
            r"steps\.misnamed: its package builds .*, which is not a step named 'misnamed'",
        ),
        ([{"banned_words": {"words": ["a"]}}] * 2, "there are two steps called 'banned_words'"),
    ],
)
def test_wrong_steps_are_refused(steps: list, problem: str, with_step: None) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_steps(parse(CleanConfig, {"steps": steps}, "clean"))


@pytest.fixture
def with_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {
        "modelwright.objectives": {"smoothed": "OBJECTIVE", "careless": "CARELESS"},
        "modelwright.techniques": {"noise": "TECHNIQUE"},
    }
    add_package(tmp_path / "site", monkeypatch, "learning_words", LEARNING, added)


@pytest.mark.slow
def test_an_objective_and_a_technique_train(
    with_learning: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (f"{n} is followed by {n + 1}, and 3 times {n} is {3 * n}: a line of text." for n in range(600))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    small = ["--pack.seq_len", "64", "--hardware.num_threads", "1", "--tokenizer.vocab_size", "400"]
    small += ["--model.max_seq_len", "64", "--pretrain.batch_tokens", "256", "--pretrain.num_steps", "2"]
    for limit, value in (("max_top_ngram_fraction", "0.9"), ("max_record_fraction", "1")):  # the lines are alike
        small += [f"--clean.quality.limits.prose.{limit}", value]
    words = ["run", "tiny", "--run-dir", str(tmp_path / "run"), "--data.sources", str(tmp_path / "text.txt"), *small]
    words += ["--stages", "clean,tokenize,pack,pretrain,report", "--pretrain.techniques.noise.scale", "0.25"]
    losses = {}
    for epsilon in ("0.0", "0.5"):
        assert main([*words, "--pretrain.objective.smoothed.epsilon", epsilon]) == 0
        records = read_records(tmp_path / "run" / "pretrain" / "metrics.jsonl")
        steps = [record for record in records if "share_right" in record and "noise" in record]
        assert [record["noise"] for record in steps] == [0.25, 0.25]
        assert all(0 <= record["share_right"] <= 1 for record in steps)
        losses[epsilon] = [record["loss"] for record in steps]
    assert losses["0.0"] != losses["0.5"], "a setting of the objective makes another training"
    assert "nats per token" not in (tmp_path / "run" / "report.html").read_text(), "nobody knows the objective's unit"
    capsys.readouterr()
    assert main([*words, "--pretrain.objective.careless.epsilon", "0.1"]) == 2
    assert "its objective needs" in (shown := capsys.readouterr().err)
    assert "ObjectiveSpec(needs=...)" in shown
    fitted = ["run", "tiny", "--run-dir", str(tmp_path / "fitted"), "--data.sources", str(tmp_path / "text.txt")]
    fitted += ["--stages", "clean,tokenize,pack,pretrain", "--minutes", "5"]
    assert main([*fitted, "--pretrain.objective.smoothed.epsilon", "0.1"]) == 2
    assert "the updates of pretrain cannot be timed" in (shown := capsys.readouterr().err)
    assert "it learns the objective smoothed; set minutes to 0" in shown


def test_an_objective_is_checked_shown_and_part_of_the_run(with_learning: None) -> None:
    config = parse(TrainConfig, {"objective": {"smoothed": {}}}, "pretrain")
    assert dump(config)["objective"] == {"smoothed": {"epsilon": 0.1}}
    assert parse(TrainConfig, dump(config)) == config
    identities = [
        digest(parse(TrainConfig, {"objective": {"smoothed": one}}).identity()) for one in ({}, {"epsilon": 0.2})
    ]
    assert identities[0] != identities[1]
    assert "objective" not in TrainConfig().identity()
    for objective, problem in (
        ({"smooth": {}}, r"pretrain\.objective\.smooth: no installed package adds it .*they add careless, smoothed"),
        ({"smoothed": {"epsilon": 2}}, r"pretrain\.objective\.smoothed\.epsilon: must be in"),
        ({"smoothed": {}, "careless": {}}, r"pretrain\.objective: names smoothed, careless; a training has one"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse(TrainConfig, {"objective": objective}, "pretrain")
    for layout in (ParallelConfig(tensor=2), ParallelConfig(context=2)):  # it declares nothing
        with config_error("objective", match=r"objective: smoothed needs"):
            check_layout(config, layout, num_processes=2)
    run = tiny_run(stages=["clean", "tokenize", "pack", "pretrain", "dpo"], dpo={"objective": {"smoothed": {}}})
    with config_error("dpo.objective"):
        check_training(run, ParallelConfig(), num_processes=1, stages=["pretrain", "dpo"])


def test_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path / "site", monkeypatch, "shouting_words", REWARD, {"modelwright.rewards": {"shouts": "Config"}})
    reward = build_reward({"shouts": {"mark": "?", "weight": 2.0}})
    samples = [Sample(prompt=[], answer=answer, num_tokens=1) for answer in ("so?", "so!")]
    assert [one.value for one in reward.score(samples)] == [2.0, 0.0]
    with config_error("rewards.shout.kind"):
        build_reward({"shout": {}})


def test_a_route_and_a_back_end_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {
        "modelwright.routes": {"greet": "ROUTE", "greet_anyone": "OPEN", "measure": "MEASURED"},
        "modelwright.backends": {"echo": "BACKEND"},
    }
    add_package(tmp_path / "site", monkeypatch, "serving_words", SERVING, added)
    scopes = {"root": ["admin"], "reader": ["infer"], "probe": ["metrics"]}
    entries = [{"name": name, "sha256": key_hash(name), "scopes": scope} for name, scope in scopes.items()]
    (tmp_path / "keys.yaml").write_text(json.dumps({"keys": entries}))
    origin = "https://page.example"
    config = ServeConfig(port=0, backend="echo", keys_file=str(tmp_path / "keys.yaml"), cors_origins=(origin,))
    folder = write_model(tmp_path / "tiny")
    client, codec = load_engines(ModelSource(name="tiny", folder=folder), config)
    import serving_words  # pyright: ignore[reportMissingImports]

    assert [str(one) for one in serving_words.LOADED] == [str(folder)]
    with ServerThread(client, codec, config, model_name="tiny") as server:

        def ask(path: str, key: str = "", method: str = "GET", **fields) -> httpx.Response:
            headers = {"Origin": origin} | ({"Authorization": f"Bearer {key}"} if key else {})
            return httpx.request(method, server.url + path, headers=headers, timeout=60, **fields)

        answer = ask("/greet/ada", "root")
        assert answer.json() == {"greeting": "hello ada", "model": "tiny"}
        assert answer.headers["access-control-allow-origin"] == origin
        assert [ask("/greet/ada", key).status_code for key in ("", "wrong", "reader", "probe")] == [401, 401, 403, 403]
        assert ask("/greet/ada", "reader").json()["error"]["message"]
        assert ask("/open/ada").status_code == 200
        assert [ask("/measured/ada", key, "PUT").status_code for key in ("probe", "root")] == [200, 403]
        preflight = httpx.options(
            server.url + "/measured/ada", headers={"Origin": origin, "Access-Control-Request-Method": "PUT"}
        )
        assert preflight.status_code == 200
        metrics = ask("/metrics", "probe").text
        assert 'route="/greet/{who}"' in metrics
        assert 'status="403"' in metrics
        page = ask("/openapi.json").json()
        described = page["paths"]["/greet/{who}"]["get"]
        assert described["operationId"] == "greet"
        assert described["security"] == [{"key": []}]
        assert {"200", "401", "403", "429"} == described["responses"].keys()
        assert [one["name"] for one in described["parameters"]] == ["who"]
        assert "security" not in page["paths"]["/open/{who}"]["get"]
        assert page["components"]["schemas"]["GreetingReply"]["required"] == ["greeting", "model"]
        body = {"model": "tiny", "prompt": "the", "max_tokens": 2}
        assert ask("/v1/completions", "reader", "POST", json=body).json()["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("name", "attribute", "problem"),
    [
        ("mine", "HIDDEN", r"GET /v1/models/mine is answered by GET /v1/models/{name:path}"),
        ("mine", "DANGLING", r"its reply 'Greeting' is not a media type"),
        ("mine", "SHED", r"needs_engine is for routes of the scope 'infer', not 'metrics'"),
        ("mine", "NAMED", r"the name of its schema HealthReply is taken"),
        ("mine", "GREET", r"must be a RouteSpec, got Operation"),
        ("health", "ROUTE", r"the name 'health' is taken"),
    ],
)
def test_wrong_routes_are_refused(
    name: str, attribute: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(tmp_path, monkeypatch, "serving_words", SERVING, {"modelwright.routes": {name: attribute}})
    with pytest.raises(ConfigError, match=rf"entry point {name} of modelwright\.routes.*{problem}"):
        all_operations({})


def test_names_of_back_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path, monkeypatch, "serving_words", SERVING, {"modelwright.backends": {"echo": "BACKEND"}})
    assert backend_of(ServeConfig(backend="echo:w4")).weights == ("w4",)
    with config_error("backend", match="choose weights from w4"):
        backend_of(ServeConfig(backend="echo:w5"))
    with config_error("backend", match="'eco' is unknown; choose from modelwright, openvino, echo"):
        backend_of(ServeConfig(backend="eco"))


def test_a_back_end_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.core.extensions.entry_points", lambda **selected: ())
    with config_error("backend", match=r"pip install 'modelwright\[vllm\]'"):
        backend_of(ServeConfig(backend="vllm"))
