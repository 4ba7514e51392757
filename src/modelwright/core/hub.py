"""Names of models and data sets on a hub, with the extra `hub`: the Hugging Face hub, or that of HF_ENDPOINT.

What is downloaded lies in the cache that all programs share (HF_HOME), each version in a folder named by its commit.
With HF_HUB_OFFLINE=1 nothing is asked of a hub, and only what is in the cache is found. HF_TOKEN, or `hf auth login`,
opens what is not public. Only weights in safetensors and text files of a model are fetched: no code, nothing pickled.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from modelwright.core.config import ConfigError, hub_hint, require
from modelwright.core.texts import redact_text

DATASETS = "hf://datasets/"
"""Beginning of a source on a hub: hf://datasets/OWNER/NAME[@REVISION][/FILE, FOLDER or PATTERN]."""
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*"]
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+?(?=/|$)))?(?:/(.+))?")
_ABOUT = re.compile(r"(?i)(readme|license|citation)[^/]*|[^/]*\.py|\.[^/]*")
"""Files at the top of a data set that are about it or load it: never read as data, never run."""
_HELDOUT = frozenset(("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"))


@contextmanager
def _asking(name: str, missing: str, hint: str = "") -> Generator[None]:
    """Turns what the library raises into one `ConfigError` with the remedy. hint: remedy without a hub."""
    from huggingface_hub import constants
    from huggingface_hub import errors as known

    where = redact_text(constants.ENDPOINT)
    try:
        yield
    except known.GatedRepoError:
        text = f"{name}: is gated on {where}; accept its terms on its page, and set HF_TOKEN"
    except known.RepositoryNotFoundError:
        text = f"{name}: {missing}, and none on {where} that you may see; correct the name, or set HF_TOKEN"
    except known.RevisionNotFoundError:
        text = f"{name}: exists on {where}, but not in this revision"
    except Exception as error:  # of the network, the hub or the token; several libraries have their own
        reason = f"{type(error).__name__}: {redact_text(str(error).strip().partition(chr(10))[0])}"
        if constants.HF_HUB_OFFLINE:
            text = f"{name}: {missing}, and HF_HUB_OFFLINE is set; unset it{hint}"
        elif isinstance(error, known.HfHubHTTPError):
            text = f"{name}: {where} refuses this ({reason}); check the name, and what HF_TOKEN may do"
        else:
            text = f"{name}: {missing}, and {where} cannot be asked ({reason}); check the connection and HF_ENDPOINT"
    else:
        return
    raise ConfigError(text, code="missing")


def model_folder(name: str) -> Path:
    """Returns the folder of the model OWNER/NAME, downloaded if the cache lacks its newest version. Raises
    `ConfigError` if it cannot be had, or is not in the Hugging Face layout with weights in safetensors.
    """
    require({name: "hub"})
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    with _asking(name, "no such folder, here or in the cache", hub_hint(name)):
        folder = Path(snapshot_download(name, allow_patterns=MODEL_FILES, ignore_patterns=["*/*"]))
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{name}: has no config.json with weights in safetensors at its top; choose another model")
    return folder


@cache
def dataset_path(source: str) -> tuple[Path, Path]:
    """Returns the downloaded data set of a source `hf://datasets/...`, and the path or pattern in it that the source
    names. A process asks for a version once, so that all that it reads is of one. Raises `ConfigError`.
    """
    found = _DATASET.fullmatch(source.removeprefix(DATASETS).rstrip("/"))
    if not found or ".." in (found[3] or "").split("/"):
        raise ConfigError(f"{source}: is not of the form {DATASETS}OWNER/NAME[@REVISION][/PATH]")
    name, revision, path = found.groups()
    require({source: "hub"})
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    chosen = [path, f"{path}/*"] if path else None
    with _asking(source, "no such data set in the cache"):
        folder = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=chosen)
    return Path(folder), Path(folder, path or "")


def is_data(path: str) -> bool:
    """Returns False for a path within a data set of a file that describes it or loads it."""
    return _ABOUT.fullmatch(path) is None


def is_heldout(file: str) -> bool:
    """Returns True for a file of a downloaded data set in a split that is not for training, by the words of its path
    within the data set, as `datasets` tells splits apart: data/test-00000-of-00001.parquet, dev.jsonl.
    """
    name, _, path = file.partition("/snapshots/")
    words = re.split(r"[^a-zA-Z]+", path.partition("/")[2].lower())
    return "/datasets--" in name and not _HELDOUT.isdisjoint(words)


def name_of(folder: Path) -> str:
    """Returns OWNER/NAME for the folder of a downloaded model, else the folder's own name."""
    is_cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return "/".join(folder.parents[1].name.split("--")[1:]) if is_cached else folder.name


def upload(folder: Path, name: str, *, overwrite: bool) -> None:
    """Uploads a model's folder as OWNER/NAME, which is created, private, where it does not exist. Raises `ConfigError`
    if the hub refuses it, or has a model there and `overwrite` is False.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(f"--to: {name!r} is not the name of a model on a hub; write --to hub OWNER/NAME")
    require({"--to hub": "hub"})
    from huggingface_hub import HfApi

    api = HfApi()
    with _asking(name, "it was not uploaded"):
        api.create_repo(name, private=True, exist_ok=True)
        has_model = not overwrite and api.file_exists(name, "config.json")
        if not has_model:
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model of Modelwright")
    if has_model:
        raise ConfigError(f"{name}: has a model already; choose another name or add --overwrite")
