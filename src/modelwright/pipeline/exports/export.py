"""Type of an export of a model for other programs, and shared parts of those that write folders.

A model card in the form of the Hugging Face hub: a README.md with front matter, written from the run's records.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modelwright.core.artifacts import MANIFEST, ArtifactDraft, write_artifact
from modelwright.core.config import ConfigError
from modelwright.core.hub import name_of
from modelwright.core.texts import redact_text
from modelwright.model.hf_types.own import OWN_TYPE
from modelwright.pipeline.models import FoundModel
from modelwright.pipeline.report.blocks import count
from modelwright.pipeline.report.page import figures
from modelwright.pipeline.report.run_data import RunData
from modelwright.pipeline.stage import RunConfig, StageSpec
from modelwright.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export in addition to the format. dtype: one of `Export.dtypes`, "" for a format without any;
    overwrite: replace an earlier export.
    """

    dtype: str = ""
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Export:
    """A format in which models are written for other programs."""

    name: str
    """Name of the format after `--to`."""
    summary: str
    """Noun phrase for the written file or folder, for the command's help."""
    write: Callable[[FoundModel, Path, ExportOptions], Path]
    """Writes the model to a path and returns the path of the written file or folder."""
    target: Callable[[FoundModel, ExportOptions], Path]
    """Returns the default path."""
    dtypes: tuple[str, ...] = ()
    """Number formats for `--dtype`, the default first."""
    takes_integers: bool = False
    """True if quantized models can be written, too (`--int8`)."""
    needs_run: bool = False
    """True if only models of runs are written, because model folders have this format already."""


@contextmanager
def replaced(target: Path, *, holds: str, overwrite: bool) -> Generator[ArtifactDraft]:
    """Writes a folder atomically; it replaces an earlier export at most: one with the file `holds`."""
    # A mistyped path with --overwrite must not delete a folder of other files.
    if overwrite and target.is_dir() and any(target.iterdir()) and not (target / holds).is_file():
        raise ConfigError(
            f"{target}: contains something other than a model, so it is not replaced; choose another folder"
        )
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: is a file, so it is not replaced by a folder; choose another one")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another folder or add --overwrite")
    with write_artifact(target, kind="export", digest="") as draft:
        yield draft
    # An export is not an artifact of a run: with a manifest, a later edit of its files would count as damage.
    (target / MANIFEST).unlink()


def require_exportable(source: Path) -> None:
    """Raises `ConfigError` for a model whose type `transformers`, and so llama.cpp, lacks."""
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") == OWN_TYPE:
        if settings["attention_gate"] == "none":
            raise ConfigError(
                f"model.head_budget: {source} computes a learned share of its heads ({settings['head_budget']:g}), and "
                "no model type of transformers does; export it to onnx or openvino, or train one with head_budget 1"
            )
        raise ConfigError(
            f"model.attention_gate: {source} has a gate on attention's output ({settings['attention_gate']}), and no "
            "model type of transformers has one; export it to onnx or openvino, or train one with attention_gate none"
        )


CARD = "README.md"


def model_card(data: RunData, stage: str, *, library: str = "transformers", use: Sequence[str] = ()) -> str:
    """Returns the card of the model that a stage of the run has made. library: library that loads it; use: lines about
    its use, by default those for `transformers`.
    """
    config, shape = data.config, data.config.model
    names = [spec.name for spec in config.stages]
    spec = config.stages[names.index(stage)]
    trainings = [one for one in config.trainings if names.index(one.name) <= names.index(stage)]
    if stage in config.model_names[:-1]:
        evaluation = ["The run evaluated a later model than this one."]
    else:
        evaluation = [f"- {' '.join(line.split())}" for line in figures(data)] or ["Nothing was held out or evaluated."]
    sources = [Path(source).name or source for source in map(redact_text, config.text_sources)]
    texts = [f"- Sources: {', '.join(sources)}"]
    cleaned = data.done("clean")
    kept: Mapping[str, Any] = cleaned.facts.get("clean", {}).get("kept", {}) if cleaned else {}
    titles = {"prose": "Prose", "code": "Source code", "qa": "Conversations", "image": "Images"}
    for kind, splits in kept.items():
        counts = [splits.get(split, {}).get("documents", 0) for split in ("train", "heldout")]
        texts.append(f"- {titles.get(kind, kind)}: {counts[0]:,} for training, {counts[1]:,} held out")
    lineage: list[str] = []
    if invocations := data.info.get("invocations"):
        last = invocations[-1]
        lineage += [f"- From {redact_text(last['origin'].partition(',')[0])}, seed {data.config.seed}"]
        packages = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        lineage += [f"- Versions: {packages}" + (f" (commit {last['commit']})" if last.get("commit") else "")]
    digests: Mapping[str, Any] = data.info.get("stages", {})
    made = list(digests)[: list(digests).index(stage) + 1] if stage in digests else list(digests)
    lineage += [f"- {name}: sha256 {digests[name]['content']}" for name in made if "content" in digests[name]]
    sections = {
        "Data": texts,
        "Training": [line for one in trainings for line in _training_lines(data, one)],
        "Evaluation": evaluation,
        "Lineage": lineage or ["The run's journal is missing."],
        "Use": list(use) or _use_lines(config, spec),
    }
    task = "image-text-to-text" if spec.reads_images else "text-generation"
    fields: dict[str, Any] = {"library_name": library, "pipeline_tag": task}
    fields["tags"] = ["modelwright", *(one.name for one in config.trainings)]
    start = "random weights"
    if config.init_from:  # the name of the folder, or of its run, without the path on this machine
        folder = Path(config.init_from)
        start = folder.parents[1].name if folder.name == "artifact" and len(folder.parents) > 1 else name_of(folder)
        fields["base_model"] = start
    kind = "model that reads images, with a decoder" if spec.reads_images else f"{spec.model_title} model"
    summary = (
        f"A {kind} of {count(shape.num_parameters)} parameters, trained from {start} with Modelwright. Context of "
        f"{shape.max_seq_len:,} tokens, vocabulary of {shape.vocab_size:,}."
    )
    text = [f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n", f"# {config.name}", "", summary]
    for title, lines in sections.items():
        text += ["", f"## {title}", "", *lines]
    return "\n".join(text) + "\n"


def _training_lines(data: RunData, spec: StageSpec) -> list[str]:
    stage = data.done(spec.name)
    if stage is None:
        return []
    training: TrainConfig = data.config.section(spec)
    if "skipped" in stage.facts:
        return [f"- {spec.title}: skipped ({stage.facts['skipped']})"]
    facts = stage.facts
    if "num_steps" not in facts:
        return [f"- {spec.title}: the record of this stage is missing"]
    rate = f"{training.optimizer} at {training.peak_learning_rate:.3g}, {training.schedule.kind}"
    taken_step = facts.get("taken_step", facts["num_steps"])
    taken = f", weights of step {taken_step:,} taken" if taken_step != facts["num_steps"] else ""
    lines = [
        f"- {spec.title}: {facts['num_steps']:,} steps of {training.batch_tokens:,} tokens "
        f"({facts['num_epochs']:.2g} passes){taken}",
        f"  - {rate}, weight decay {training.weight_decay:g}, {training.gradient_accumulation_steps} accumulated "
        f"microbatches, precision {training.precision.policy}",
        f"  - {facts['num_tokens']:,} tokens in {facts['train_time_s']:,.0f} s on {facts['world_size']} processes",
    ]
    if training.neftune_noise_alpha:
        lines.append(f"  - NEFTune noise of strength {training.neftune_noise_alpha:g}")
    if facts.get("heldout_loss") is not None:
        lines.append(f"  - held-out loss {facts['heldout_loss']:.4f}, at best {facts['best_loss']:.4f}")
    return lines


def _use_lines(config: RunConfig, spec: StageSpec) -> list[str]:
    if spec.reads_images:
        # The question is the one on which the model was trained.
        question = json.dumps("\n" + config.section(spec).question, ensure_ascii=False)
        return [
            "```python",
            "from PIL import Image",
            "from transformers import AutoProcessor, LlavaForConditionalGeneration",
            "",
            f'processor = AutoProcessor.from_pretrained("{config.name}")',
            f'model = LlavaForConditionalGeneration.from_pretrained("{config.name}")',
            f'chat = [{{"role": "user", "content": processor.image_token + {question}}}]',
            "prompt = processor.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)",
            'image = Image.open("image.png").convert("RGB")',
            'inputs = processor(images=image, text=prompt, add_special_tokens=False, return_tensors="pt")',
            "answer = model.generate(**inputs, max_new_tokens=100)",
            'print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
            "```",
        ]
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{config.name}")',
        f'model = AutoModelForCausalLM.from_pretrained("{config.name}")',
        'chat = [{"role": "user", "content": "Hello."}]',
        "inputs = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
        "answer = model.generate(**inputs, max_new_tokens=100)",
        'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        "```",
    ]
