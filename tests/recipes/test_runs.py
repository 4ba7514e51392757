"""The Python interface: the ten lines of the guide, the same bits as the command line, callbacks, sources, errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import modelwright as mw
from finetune_files import write_examples, write_model
from modelwright.core.artifacts import read_manifest
from modelwright.core.config import DataError

QUICK = {
    "sft.learning_rate": 1e-2, "sft.num_steps": 6, "sft.num_epochs": 0,
    "data.validation_fraction": 0.2, "training.precision.policy": "fp32", "hardware.num_threads": 1,
    "training.precision.fp32_matmul": "default", "hardware.device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("data") / "boxes.jsonl")


@pytest.fixture(scope="module")
def run(model: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> mw.Run:
    return mw.finetune(model, examples, run_dir=tmp_path_factory.mktemp("runs") / "python", **QUICK)


def digest(folder: Path) -> str:
    return read_manifest(folder / "sft" / "artifact", kind="sft", verify=True).content_digest


def test_fine_tune_compare_serve_and_query_in_ten_lines(run: mw.Run, model: Path, examples: Path) -> None:
    from openai import OpenAI

    comparison = mw.compare(model, run.path, examples, resamples=100, max_new_tokens=4, num_records=8)
    assert "perplexity" in str(comparison)
    assert "&" not in comparison._repr_html_().replace("&#x27;", "")
    with mw.serve(run.path) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        question = [{"role": "user", "content": "Box 1: which color?"}]
        answer = client.chat.completions.create(model=server.model_name, messages=question, max_tokens=4)
    assert answer.choices[0].message.content is not None


def test_a_run_has_the_same_bits_as_from_the_command_line(
    run: mw.Run, model: Path, examples: Path, tmp_path: Path
) -> None:
    words = ["finetune", str(model), str(examples), "--run-dir", str(tmp_path / "run")]
    words += [f"--{name}={value}" for name, value in QUICK.items()]
    done = subprocess.run([sys.executable, "-m", "modelwright.cli.main", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "run") == digest(run.path)


def test_a_run_has_metrics_samples_a_report_and_a_model(run: mw.Run) -> None:
    records = run.metrics()["sft"]
    assert [one["step"] for one in records if "loss" in one] == list(range(1, 7))
    assert any("heldout_loss" in one or "validation_loss" in one for one in records)
    assert run.report is not None
    assert run.stages[-1] == "report"
    assert "<table>" in run._repr_html_()
    model = run.model()
    assert model.generate("Box", max_tokens=4, temperature=0) == model.generate(["Box"], max_tokens=4, temperature=0)[0]
    assert isinstance(model.chat("Box 1: which color?", max_tokens=4), str)
    first, second = model.score(["The color is red.", "zq xj"])
    assert first.bits_per_byte < second.bits_per_byte
    vectors = model.embed(["a box", "b"])
    assert len(vectors) == 2
    assert len(vectors[0]) == model.decoder.config.model_dim


def test_a_callback_stops_a_run_and_the_same_call_ends_it_with_the_same_bits(
    run: mw.Run, model: Path, examples: Path, tmp_path: Path
) -> None:
    seen: list[mw.TrainingStep] = []

    def stop_at_three(step: mw.TrainingStep) -> bool:
        seen.append(step)
        return step.step < 3

    first = mw.finetune(model, examples, run_dir=tmp_path / "run", on_step=stop_at_three, **QUICK)
    assert not first.is_finished
    assert [one.step for one in seen] == [1, 2, 3]
    assert seen[0].stage == "sft"
    second = mw.finetune(model, examples, run_dir=tmp_path / "run", on_step=seen.append, **QUICK)
    assert second.is_finished
    assert seen[3].step == 4
    assert digest(second.path) == digest(run.path)


def test_records_in_memory_are_kept_in_the_run_and_resume(model: Path, examples: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in examples.read_text().splitlines()][:40]
    first = mw.finetune(model, records, run_dir=tmp_path / "run", **QUICK)
    (kept,) = (first.path / "sources").iterdir()
    assert [json.loads(line) for line in kept.read_text().splitlines()] == records
    again = mw.finetune(model, iter(records), run_dir=tmp_path / "run", **QUICK)
    assert again.result is not None
    assert not any(outcome.ran for outcome in again.result.outcomes)


def test_errors_name_the_setting_and_have_a_code(model: Path, examples: Path, tmp_path: Path) -> None:
    with pytest.raises(mw.ConfigError) as unknown:
        mw.finetune(model, examples, run_dir=tmp_path / "run", sft={"num_stepz": 3})
    assert (unknown.value.key, unknown.value.code) == ("sft.num_stepz", "unknown")
    with pytest.raises(mw.ConfigError) as wrong:
        mw.finetune(model, examples, run_dir=tmp_path / "run", **{"sft.num_steps": "many"})
    assert (wrong.value.key, wrong.value.code) == ("sft.num_steps", "type")
    with pytest.raises(DataError, match="record 2"):
        mw.finetune(model, [{"text": "a"}, 3], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, modelwright as mw; mw.ConfigError, mw.TrainingStep; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_help_imports_no_library_of_size() -> None:
    """Each command's file is imported for the list of commands; what it needs to work is imported when it works."""
    code = (
        "import sys\nfrom modelwright.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('numpy', 'pyarrow', 'rich', 'scipy', 'starlette', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_packages_with_a_functions_name_are_callable() -> None:
    with pytest.raises(mw.ModelwrightError), mw.serve("no-such-run"):
        pass
    with pytest.raises(mw.ModelwrightError):
        mw.evaluate("no-such-run", "no-such-tasks")
