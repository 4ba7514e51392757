"""caption: the decoder learns to answer about images, which it reads by a vision tower and a projector.

Artifact: a folder of `LlavaForConditionalGeneration` with its tokenizer (`model/vision/llava.py`). Facts: `captions`,
what it writes about held-out images.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.data.images.store import open_images
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.vision.image_prefix import image_prefix
from modelwright.model.vision.llava import save_llava
from modelwright.objectives.aligned_model import VISION_FOLDER
from modelwright.objectives.captioning import CaptionConfig, Captioning
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Block, Fact, Samples, Table, TextSample
from modelwright.pipeline.report.format import count, percent
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.align import ALIGN
from modelwright.pipeline.stages.caption_quality import measure_captions
from modelwright.pipeline.stages.captioned_rows import CAPTION as NAME
from modelwright.pipeline.stages.captioned_rows import CAPTION_ROWS, image_token_id, tower_shape
from modelwright.pipeline.stages.image_accuracy import accuracy_table, baseline_hint
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.row_use import RowUse
from modelwright.pipeline.stages.stage_inputs import needed_start, tokenizer_stage
from modelwright.pipeline.stages.training import FurtherModels, TrainedModel, training_spec


def _needs(config: RunConfig) -> tuple[str, ...]:
    return (PACK.name, *needed_start(config, NAME), *([ALIGN.name] if config.has(ALIGN) else []))


def _objective(inputs: StageInputs) -> Captioning:
    config, rows = inputs.training, inputs.parents[PACK.name] / CAPTION_ROWS.name
    assert isinstance(config, CaptionConfig)
    tower = Path(config.vision.init_from) if config.vision.init_from else None
    if tower is None and ALIGN.name in inputs.parents:
        tower = inputs.parents[ALIGN.name] / VISION_FOLDER
    tokenizer = Tokenizer.load(inputs.parents[tokenizer_stage(inputs.config)])
    return Captioning(
        source=inputs.plan,
        config=config,
        shape=tower_shape(inputs.config),
        tower=tower,
        image_token=image_token_id(tokenizer, config),
        images=inputs.images,
        heldout_images=open_images(rows, "heldout"),
    )


def _further(run: RunConfig, config: CaptionConfig) -> FurtherModels:
    folder = config.vision.init_from
    return FurtherModels(folders={"vision.init_from": folder} if folder else {})


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    config: CaptionConfig = trained.config.section(NAME)
    tokenizer, model = trained.tokenizer, trained.model
    pad = tokenizer.special_tokens.get("pad_token")
    save_llava(
        model,
        trained.folder,
        image_token=config.image_token,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        pad_id=tokenizer.id_of(pad) if pad else None,
    )
    tokenizer.save(trained.folder, max_length=model.config.max_seq_len)
    path = trained.folder / "generation_config.json"
    settings = {**json.loads(path.read_text(encoding="utf-8")), "eos_token_id": list(tokenizer.stop_ids)}
    write_atomic(path, json.dumps(settings, indent=2) + "\n")
    if not trained.heldout.is_dir():
        return {}
    prefix = image_prefix(model)
    assert prefix is not None
    assert trained.data is not None
    trained.context.progress.note("caption: describing held-out images")
    return {
        "captions": measure_captions(
            model.eval(),
            trained.data,
            trained.heldout.parent,
            tokenizer,
            prefix.tower.config,
            max_tokens=config.max_answer_tokens,
        )
    }


def _headline(data: RunData, stage: StageData) -> Sequence[Fact]:
    classes = stage.facts.get("captions", {}).get("classes")
    if not classes:
        return []
    return [Fact("Captions that name the right class", percent(classes["accuracy"], 1), baseline_hint(classes))]


def _blocks(stage: StageData) -> Sequence[Block]:
    captions = stage.facts.get("captions")
    if not captions:
        return []
    items = [
        TextSample(one["written"], one["reference"], "above what the model wrote, below the reference", one["image"])
        for one in captions["examples"]
    ]
    title = f"Held-out images; {percent(captions['exact'], 1)} of {count(captions['num_images'])} captions are exact"
    classes = captions.get("classes")
    return [*([_class_table(classes)] if classes else []), Samples(items, title)]


def _class_table(classes: Mapping[str, Any]) -> Table:
    remark = (
        "A caption names a class by words that training captions of no other class have; "
        f"{percent(classes['nothing_named'], 1)} of the captions name none or several, and count as wrong."
    )
    return accuracy_table(classes, method="the captions of this model", title="The class that is named", remark=remark)


CAPTION = training_spec(
    name=NAME,
    title="Learning to describe images",
    report_title="Captions of images",
    model_title="",  # not a language model that later stages go on with
    objective=_objective,
    rows=CAPTION_ROWS,
    run_needs=Captioning.needs,
    needs=_needs,
    config=CaptionConfig,
    headline=_headline,
    only_if_named=True,
    reads_images=True,
    blocks=_blocks,
    further=_further,
    row_use=RowUse(learns_by_heart=False),
    save=_save,
)
