"""The whole pipeline as a person runs it: one run, then everything that can be asked of it."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.artifacts import RunDir, read_attempts, read_manifest
from modelwright.core.config import load_yaml
from modelwright.core.records import read_records
from modelwright.pipeline.report.page import closing_lines
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.training import FILE
from rank_processes import start_process

Command = Callable[..., subprocess.CompletedProcess[str]]
CHROMIUM = Path("/usr/bin/chromium")
STAGES = ("clean", "tokenize", "pack", "pretrain", "sft", "evaluate", "quantize", "serve_check", "report")
ALL = ("--stages", ",".join(STAGES))
"""The recipe leaves `serve_check` out, because that stage needs an extra."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, command: Command, small_words: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    done = command(*small_words, "--run-dir", str(folder), *ALL)
    assert done.returncode == 0, done.stderr
    assert f"report   {folder}/report.html" in done.stdout
    return folder


def words_of(done: subprocess.CompletedProcess[str], name: str) -> str:
    """What the summary says after `name`."""
    lines = [line.split(None, 1) for line in done.stdout.splitlines()]
    return next((parts[1] for parts in lines if parts and parts[0] == name), "")


def test_every_stage_left_a_whole_artifact(run: Path) -> None:
    for name in STAGES:
        manifest = read_manifest(run / name / "artifact", kind=name, verify=True)
        assert set(manifest.inputs) <= set(STAGES)
        journal = json.loads((run / name / "stage.json").read_text())
        assert [entry["state"] for entry in journal["attempts"]] == ["done"]
    info = json.loads((run / "run.json").read_text())
    assert info["invocations"][0]["state"] == "done"
    assert set(info["stages"]) == set(STAGES)
    assert (run / "pretrain" / "metrics.jsonl").exists()
    assert list((run / "pretrain" / "tensorboard").iterdir())


def test_a_rerun_skips_everything_by_recipe_by_yaml_and_by_folder(
    run: Path, inside: Command, small_words: tuple[str, ...]
) -> None:
    for words in ((*small_words, "--run-dir", str(run), *ALL), ("run", str(run))):
        done = inside(*words)
        assert done.returncode == 0, done.stderr
        assert words_of(done, "ran") == ""
        assert words_of(done, "kept") == ", ".join(STAGES)
    before = (run / "config.yaml").read_text()
    done = inside("run", str(run / "config.yaml"), "--run-dir", str(run))
    assert words_of(done, "ran") == "", done.stderr
    assert (run / "config.yaml").read_text() == before


def test_the_resolved_config_holds_no_wish(run: Path) -> None:
    config = load_yaml(run / "config.yaml")
    assert config["hardware"] == {"device": "cpu", "num_threads": 1}
    assert config["training"]["precision"]["policy"] == "fp32"
    assert config["training"]["precision"]["fp32_matmul"] == "default"
    assert config["serve"]["int8"]["backend"] == "int_mm"
    assert "precision" not in config["pretrain"]


def test_training_shows_a_sample_and_the_end_shows_the_figures(run: Path) -> None:
    config = read_run_config(run / "config.yaml")
    for stage in config.trainings:
        samples = read_records(run / stage.name / FILE)
        assert [one["step"] for one in samples] == sorted({1, config.section(stage).num_steps})
    lines = closing_lines(config, RunDir(run))
    starts = [line.split()[0] for line in lines]
    assert starts[:2] == ["read", "learned"]
    assert starts[2:4] == ["code", "answers"]
    assert all(name in lines[2] for name in ("pretrained", "fine-tuned", "token bigram", "xz", "gzip"))
    assert sum(" ▸ " in line for line in lines) == 3
    assert any(line.startswith("What does `len` do? ▸") for line in lines)
    (times,) = (line for line in lines if line.startswith("time "))
    timed = [spec.name for spec in config.stages if read_attempts(RunDir(run).stage(spec.name))]
    assert [part.split()[0] for part in times.partition(": ")[2].split(", ")] == timed


def test_the_report_begins_with_what_is_worth_seeing(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    first = page[page.index('<section id="overview">') : page.index('<section id="data">')]
    assert page.index("Energy of training") < page.index('<section id="overview">')
    titles = (
        "Loss", "Learning, next to baselines", "Bits per byte on held-out text",
        "One beginning, continued while the model learned", "Answers of the served model",
    )  # fmt: skip
    places = [first.index(f"<h3>{title}</h3>") for title in titles]
    assert places == sorted(places)
    assert page.count("One beginning, continued while the model learned") == 2, "of both trainings, once each"
    samples, records = first[places[3] : places[4]], read_records(run / "pretrain" / FILE)
    assert samples.count('<div class="qa">') == 1 + len(records) >= 3, "the beginning, then its continuations"
    assert samples.index("The beginning") < samples.index("Step 1<")
    assert "<h3>Memory</h3>" in page
    assert first[places[4] :].count('<div class="qa">') == 3


@pytest.mark.slow
def test_a_changed_setting_runs_only_what_depends_on_it(run: Path, inside: Command) -> None:
    before = {name: read_manifest(run / name / "artifact").content_digest for name in STAGES}
    done = inside("run", str(run), "--evaluate.multiple_choice.num_questions", "4", "--stages", "evaluate")
    assert words_of(done, "ran") == "evaluate", done.stderr
    done = inside("run", str(run))
    assert words_of(done, "ran") == "quantize, report", done.stderr
    after = {name: read_manifest(run / name / "artifact").content_digest for name in STAGES}
    assert [name for name in STAGES if before[name] != after[name]] == ["evaluate", "quantize", "report"]


@pytest.mark.slow
def test_stages_that_are_needed_must_be_up_to_date(run: Path, inside: Command) -> None:
    done = inside("run", str(run), "--sft.learning_rate", "1e-5", "--stages", "evaluate")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("sft was made with other settings and is needed; add sft to --stages")


def test_dry_run_changes_nothing(run: Path, inside: Command) -> None:
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))
    done = inside("run", str(run), "--dry-run", "--sft.learning_rate", "1e-5")
    assert done.returncode == 0, done.stderr
    assert "parameters  " in done.stdout
    assert "pretrain    finished, kept" in done.stdout
    assert "sft         to be made again" in done.stdout
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*")) == before


@pytest.mark.slow
def test_dry_run_of_several_processes_names_their_axes_and_one_process_s_memory(run: Path, inside: Command) -> None:
    told = {}
    for words in ([], ["--nproc", "2"], ["--nproc", "2", "--parallel.zero_stage", "3"]):
        done = inside("run", str(run), "--dry-run", "--sft.learning_rate", "1e-5", *words)
        assert done.returncode == 0, done.stderr
        told[len(words)] = done.stdout
    assert "processes  " not in told[0]
    assert "processes   2 on 1 host: replicate 2" in told[2]
    assert "processes   2 on 1 host: shard 2" in told[4]
    memories = {text.split("memory of sft: ")[1].split(" = ")[1].splitlines()[0] for text in told.values()}
    assert len(memories) == 3


def test_the_server_answered_and_left(run: Path) -> None:
    answers = json.loads((run / "serve_check" / "artifact" / "answers.json").read_text())
    assert len(answers["answers"]) == 4
    assert answers["streamed"]["answer"] == answers["answers"][0]["answer"]
    assert answers["num_metrics"] > 10


def test_export_loads_in_transformers(run: Path, inside: Command, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = inside("export", str(run), "--to", "hf", str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    assert "manifest.json" not in [path.name for path in (tmp_path / "hf").iterdir()]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert model.config.vocab_size >= len(tokenizer)
    assert "hello" in text
    again = inside("export", str(run), "--to", "hf", str(tmp_path / "hf"))
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


@pytest.mark.slow
def test_start_from_the_exported_folder(
    run: Path, inside: Command, tmp_path: Path, corpus: Path, small_words: tuple[str, ...]
) -> None:
    inside("export", str(run), "--to", "hf", str(tmp_path / "hf"), "--stage", "pretrain")
    target = tmp_path / "second"
    done = inside(
        *small_words, "--run-dir", str(target), "--init-from", str(tmp_path / "hf"),
        "--stages", "clean,pack,sft,report", "--model.num_layers", "9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words_of(done, "ran") == "init, clean, pack, sft, report"
    assert load_yaml(target / "config.yaml")["model"]["num_layers"] == 2
    same = [(folder / "sft" / "artifact" / "model.safetensors").read_bytes() for folder in (run, target)]
    assert same[0] == same[1], "the same weights, data and settings must give the same model"


@pytest.mark.slow
def test_two_processes_by_torchrun(run: Path, tmp_path: Path, small_words: tuple[str, ...]) -> None:
    target = tmp_path / "two"
    code, output, errors = start_process(
        "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "modelwright.cli.main", *small_words,
        "--run-dir", target, "--stages", "clean,tokenize,pack,pretrain,report",
    ).end()  # fmt: skip
    assert code == 0, errors
    assert output.count("finished in") == 1
    last = [json.loads((folder / "pretrain/metrics.jsonl").read_text().splitlines()[0]) for folder in (run, target)]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-5)
    assert json.loads((target / "run.json").read_text())["invocations"][0]["world_size"] == 2


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_opens_without_network(run: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tool:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = tool.chromium.launch(executable_path=str(CHROMIUM), args=arguments)
        tab = browser.new_page(viewport={"width": width, "height": 900})
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto((run / "report.html").as_uri())
        titles = tab.locator("h2").all_inner_texts()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("svg").count() >= 12
        browser.close()
    assert requests == [(run / "report.html").as_uri()]
    assert titles == [
        "At a glance", "Data", "Tokens", "Pretraining", "Fine-tuning", "Benchmarks", "INT8 beside FP32",
        "Served answers", "Time and memory", "Energy and carbon dioxide", "Machine and settings",
    ]  # fmt: skip


@pytest.mark.slow
def test_report_can_be_written_again_by_name(run: Path, inside: Command) -> None:
    (run / "report.html").unlink()
    done = inside("report", str(run))
    assert done.stdout.strip() == str(run / "report.html")
    assert (run / "report.html").stat().st_size > 50_000


def test_chat_answers_in_the_terminal(run: Path, inside: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
    done = inside("chat", str(run), "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "Type a question" in done.stdout


def test_int8_model_can_be_served(run: Path, tmp_path: Path) -> None:
    from modelwright.pipeline.models import find_model
    from modelwright.pipeline.stages.serve import start_server

    found = find_model(run, int8=True)
    with start_server(found.source.folder, replace(found.server, port=0), tmp_path, 120) as server:
        assert server.url.startswith("http://127.0.0.1:")
    assert server.exit_code == 143
