"""Models and data sets by their names on a hub that runs on this machine, in processes with its address."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from local_hub import GATED, SHA, Hub, running_hub
from modelwright.core.hub import is_data, is_heldout, name_of

pytest.importorskip("huggingface_hub", reason="pip install 'modelwright[hub]'")


@pytest.fixture(scope="module")
def hub() -> Generator[Hub]:
    with running_hub() as hub:
        hub.repositories["models/owner/small"] = {
            "config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "README.md": b"# Card",
            "pytorch_model.bin": b"pickled", "modeling.py": b"raise SystemExit", "onnx/model.json": b"{}",
        }  # fmt: skip
        hub.repositories["models/owner/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"pickled"}
        record = json.dumps({"question": "What is it?", "answer": "A {}."})
        hub.repositories["datasets/owner/pairs"] = {
            "README.md": b"# About the data", "pairs.py": b"raise SystemExit",
            "data/train-00000.jsonl": "".join(record.replace("{}", f"n{n}") + "\n" for n in range(8)).encode(),
            "data/test-00000.jsonl": (record.replace("{}", "test") + "\n").encode(),
        }  # fmt: skip
        yield hub


def result_of(code: str, hub: Hub, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that asks the hub and keeps its cache in `home`: the library reads the variables when it is
    imported."""
    variables = {**os.environ, **hub.environment(str(home)), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=120)


MODEL = """
import sys
from modelwright.core.config import ConfigError
from modelwright.core.hub import model_folder, name_of
try:
    folder = model_folder(sys.argv[1] if len(sys.argv) > 1 else {name!r})
    print(folder, name_of(folder), *sorted(path.name for path in folder.iterdir()))
except ConfigError as error:
    print(error.code, error)
"""


def test_a_model_is_downloaded_once_without_code_and_pickles_and_found_offline(hub: Hub, tmp_path: Path) -> None:
    code = MODEL.format(name="owner/small")
    done = result_of(code, hub, tmp_path)
    folder, name, *files = done.stdout.split()
    assert (Path(folder).name, name) == (SHA, "owner/small"), done.stderr
    assert files == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"
    num_asked = len(hub.requests)
    assert result_of(code, hub, tmp_path, HF_HUB_OFFLINE="1").stdout == done.stdout
    assert len(hub.requests) == num_asked, "with HF_HUB_OFFLINE nothing is asked"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("owner/none", {}, "none on {url} that you may see; correct the name, or set HF_TOKEN"),
        (GATED, {}, "is gated on {url}; accept its terms"),
        ("owner/pickled", {}, "no config.json with weights in safetensors"),
        ("owner/none", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("owner/none", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be asked"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path, name: str, changes: dict[str, str], message: str):
    done = result_of(MODEL.format(name=name), hub, tmp_path, **changes)
    assert message.format(url=hub.url) in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert name in done.stdout
    assert "hf_secret" not in done.stdout + done.stderr


DATA = """
import sys
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.core.config import ConfigError
report = SourceReport()
config = SourceConfig(sources=({source!r},), validation_fraction=0.0)
try:
    for document in read_documents(config, report=report):
        print(document.split, document.source, document.body)
except ConfigError as error:
    print("refused", error)
"""


def test_a_data_set_is_read_with_its_splits_and_without_what_is_about_it(hub: Hub, tmp_path: Path) -> None:
    done = result_of(DATA.format(source="hf://datasets/owner/pairs"), hub, tmp_path)
    lines = done.stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["heldout", *["train"] * 8], done.stderr
    assert all("About" not in line and "SystemExit" not in line for line in lines)
    assert any("hf://datasets/owner/pairs/data/train-00000.jsonl" in line for line in lines)
    num_asked = len(hub.requests)
    only = result_of(DATA.format(source="hf://datasets/owner/pairs/data/test-00000.jsonl"), hub, tmp_path / "other")
    assert [line.split()[0] for line in only.stdout.splitlines()] == ["train"], "a file that is named is not held out"
    assert not any("train-00000" in one for one in hub.requests[num_asked:]), "only what is named is downloaded"


@pytest.mark.parametrize("source", ["hf://datasets/owner", "hf://datasets/owner/pairs/../../x"])
def test_a_source_of_another_form_is_refused(hub: Hub, tmp_path: Path, source: str) -> None:
    assert "refused hf://datasets/owner" in result_of(DATA.format(source=source), hub, tmp_path).stdout


UPLOAD = """
from pathlib import Path
from modelwright.core.config import ConfigError
from modelwright.core.hub import upload
try:
    upload(Path({folder!r}), {name!r}, overwrite={overwrite})
    print("uploaded")
except ConfigError as error:
    print(error.code, error)
"""


def test_a_folder_is_uploaded_to_a_private_repository_and_replaced_only_if_asked(hub: Hub, tmp_path: Path) -> None:
    files = {"config.json": b'{"a": 1}', "model.safetensors": os.urandom(4000), "README.md": b"# Card"}
    (folder := tmp_path / "model").mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    values = {"folder": str(folder), "name": "owner/mine"}
    done = result_of(UPLOAD.format(**values, overwrite=False), hub, tmp_path / "home")
    assert done.stdout.endswith("uploaded\n"), done.stdout + done.stderr
    assert hub.repositories["models/owner/mine"] == files
    assert "owner/mine" in hub.private
    files["README.md"] = b"# Another card"
    (folder / "README.md").write_bytes(files["README.md"])
    again = result_of(UPLOAD.format(**values, overwrite=False), hub, tmp_path / "home")
    assert "add --overwrite" in again.stdout, again.stderr
    assert hub.repositories["models/owner/mine"]["README.md"] == b"# Card"
    assert "uploaded" in result_of(UPLOAD.format(**values, overwrite=True), hub, tmp_path / "home").stdout
    assert hub.repositories["models/owner/mine"] == files
    wrong = UPLOAD.format(folder=str(folder), name="mine", overwrite=False)
    assert "write --to hub OWNER/NAME" in result_of(wrong, hub, tmp_path / "home").stdout


def test_names_within_the_cache() -> None:
    root = Path("/cache/datasets--owner--pairs/snapshots") / SHA
    assert is_heldout(f"{root}/data/validation-00000-of-00001.parquet")
    assert is_heldout(f"{root}/dev.jsonl")
    assert not is_heldout(f"{root}/data/train-00000-of-00001.parquet")
    assert not is_heldout(f"{root}/latest/contest.jsonl"), "words, not parts of words"
    assert not is_heldout("/home/test/own/test.jsonl"), "a user's own folder"
    assert is_data("data.jsonl")
    assert is_data("data/README.md")
    assert not is_data("README.md")
    assert name_of(Path("/cache/models--owner--small/snapshots") / SHA) == "owner/small"
    assert name_of(Path("/models/small")) == "small"
