"""A model card in the form of the Hugging Face hub: a README.md with front matter, written from the run's records."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from modelwright.core.redact import redact_text
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import count
from modelwright.pipeline.report.page import figures
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import StageSpec
from modelwright.train.config import TrainConfig

CARD = "README.md"


def model_card(data: RunData, stage: str, *, library: str = "transformers", use: Sequence[str] = ()) -> str:
    """The card of the model that a stage of the run has made. library: what loads it; use: lines that say how, those
    for `transformers` without.
    """
    config = data.config
    spec = next(spec for spec in config.stages if spec.name == stage)
    sections = {
        "Data": _data_lines(data),
        "Training": [line for spec in _trainings(config, stage) for line in _training_lines(data, spec)],
        "Evaluation": _evaluation_lines(data, stage),
        "Lineage": _lineage_lines(data, stage),
        "Use": list(use) or (_image_use_lines(config, spec) if spec.reads_images else _use_lines(config)),
    }
    task = "image-text-to-text" if spec.reads_images else "text-generation"
    text = [_front_matter(config, library, task), f"# {config.name}", "", _summary(config, spec)]
    for title, lines in sections.items():
        text += ["", f"## {title}", "", *lines]
    return "\n".join(text) + "\n"


def _front_matter(config: RunConfig, library: str, task: str) -> str:
    fields: dict[str, Any] = {"library_name": library, "pipeline_tag": task}
    fields["tags"] = ["modelwright", *(stage.name for stage in config.trainings)]
    if config.init_from:
        fields["base_model"] = _base_name(config)
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _base_name(config: RunConfig) -> str:
    """The name of the folder that the run started from, without the path on this machine."""
    folder = Path(config.init_from)
    return folder.parents[1].name if folder.name == "artifact" and len(folder.parents) > 1 else folder.name


def _summary(config: RunConfig, spec: StageSpec) -> str:
    kind = "model that reads images, with a decoder" if spec.reads_images else f"{spec.model_title} model"
    start = f"from {_base_name(config)}" if config.init_from else "from random weights"
    shape = config.model
    return (
        f"A {kind} of {count(shape.num_parameters)} parameters, trained {start} with Modelwright. Context of "
        f"{shape.max_seq_len:,} tokens, vocabulary of {shape.vocab_size:,}."
    )


def _data_lines(data: RunData) -> list[str]:
    sources = [Path(source).name or source for source in map(redact_text, data.config.text_sources)]
    lines = [f"- Sources: {', '.join(sources)}"]
    cleaned = data.done("clean")
    if cleaned is not None:
        lines += list(_kept_lines(cleaned))
    return lines


def _kept_lines(stage: StageData) -> Iterator[str]:
    kept: Mapping[str, Mapping[str, Mapping[str, int]]] = stage.facts.get("clean", {}).get("kept", {})
    names = {"prose": "Prose", "code": "Source code", "qa": "Conversations", "image": "Images"}
    for kind, splits in kept.items():
        counts = {split: table.get("documents", 0) for split, table in splits.items()}
        parts = f"{counts.get('train', 0):,} for training, {counts.get('heldout', 0):,} held out"
        yield f"- {names.get(kind, kind)}: {parts}"


def _evaluation_lines(data: RunData, stage: str) -> list[str]:
    if stage in data.config.model_names[:-1]:
        return ["The run evaluated a later model than this one."]
    return [f"- {' '.join(line.split())}" for line in figures(data)] or ["Nothing was held out or evaluated."]


def _trainings(config: RunConfig, stage: str) -> list[StageSpec]:
    """The trainings up to this stage."""
    names = [spec.name for spec in config.stages]
    return [spec for spec in config.trainings if names.index(spec.name) <= names.index(stage)]


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


def _lineage_lines(data: RunData, stage: str) -> list[str]:
    lines: list[str] = []
    if invocations := data.info.get("invocations"):
        last = invocations[-1]
        lines += [f"- From {redact_text(last['origin'].partition(',')[0])}, seed {data.config.seed}"]
        packages = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        lines += [f"- Versions: {packages}" + (f" (commit {last['commit']})" if last.get("commit") else "")]
    digests: Mapping[str, Any] = data.info.get("stages", {})
    names = list(digests)[: list(digests).index(stage) + 1] if stage in digests else list(digests)
    lines += [f"- {name}: sha256 {digests[name]['content']}" for name in names if "content" in digests[name]]
    return lines or ["The run's journal is missing."]


def _use_lines(config: RunConfig) -> list[str]:
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


def _image_use_lines(config: RunConfig, spec: StageSpec) -> list[str]:
    """How `transformers` is asked what the model has learned to answer."""
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
