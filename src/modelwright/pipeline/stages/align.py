"""align: texts, code and images in one space, by contrastive learning of pairs.

Artifact: the language model with its tokenizer, and the towers beside it (`objectives/aligned_model.py`). Facts:
`retrieval`, recall on held-out pairs with chance and bags of words, and examples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.data.images.store import open_images
from modelwright.objectives.aligned_model import AlignedModel, save_alignment
from modelwright.objectives.contrastive import AlignConfig, Contrastive
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.report.blocks import Block, Fact, Samples, Table, TextSample
from modelwright.pipeline.report.format import count, percent
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.aligned_retrieval import measure_retrieval
from modelwright.pipeline.stages.aligned_rows import ALIGNED_ROWS
from modelwright.pipeline.stages.alignment import metric_charts
from modelwright.pipeline.stages.model_folder import save_model_folder
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.row_use import RowUse
from modelwright.pipeline.stages.training import FurtherModels, TrainedModel, training_spec

_TITLES = {
    "image: text to image": "captions to images",
    "image: image to text": "images to captions",
    "code: text to code": "docstrings to code",
    "code: code to text": "code to docstrings",
}


def _objective(inputs: StageInputs) -> Contrastive:
    config = inputs.training
    assert isinstance(config, AlignConfig)
    rows = inputs.parents[PACK.name] / ALIGNED_ROWS.name
    return Contrastive(inputs.plan, config, images=inputs.images, heldout_images=open_images(rows, "heldout"))


def _further(run: RunConfig, config: AlignConfig) -> FurtherModels:
    folder = config.vision.init_from
    return FurtherModels(folders={"vision.init_from": folder} if folder else {})


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    config = trained.config.section(ALIGN)
    save_model_folder(trained.model, trained.tokenizer, trained.folder)
    settings = {"embed_dim": config.embed_dim, "pooling": config.pooling, "loss": config.loss}
    save_alignment(trained.model, trained.folder, settings)
    if not trained.heldout.is_dir():
        return {}
    assert trained.data is not None
    trained.context.progress.note("align: measuring retrieval on held-out pairs")
    aligned = AlignedModel(trained.model.eval(), config.pooling)
    return {"retrieval": measure_retrieval(aligned, trained.data, trained.heldout.parent, trained.tokenizer)}


def _headline(data: RunData, stage: StageData) -> Sequence[Fact]:
    facts: list[Fact] = []
    for name in ("image: image to text", "code: text to code"):
        found = stage.facts.get("retrieval", {}).get("recall", {}).get(name)
        if found:
            hint = (
                f"recall@1 among {count(found['num_candidates'])}; chance {percent(found['chance']['at_1'], 1)}, "
                f"bag of words {percent(found['bag_of_words']['at_1'], 1)}"
            )
            facts.append(Fact(f"Retrieval, {_TITLES[name]}", percent(found["model"]["at_1"], 1), hint))
    return facts


def _blocks(stage: StageData) -> Sequence[Block]:
    charts = metric_charts(
        stage,
        {
            "Share of texts whose own partner is nearest": {"accuracy/image": "images", "accuracy/code": "code"},
            "Scale of cosines": {"scale": "scale"},
        },
    )
    retrieval = stage.facts.get("retrieval")
    return [*_retrieval_blocks(retrieval), *charts] if retrieval else charts


def _retrieval_blocks(retrieval: Mapping[str, Any]) -> list[Block]:
    header = ["held-out pairs", "queries", "candidates", "recall@1", "chance", "bag of words", "recall@5", "chance",
              "bag of words"]  # fmt: skip
    rows = [
        [_TITLES[name], count(one["num_queries"]), count(one["num_candidates"])]
        + [percent(one[method][rank], 1) for rank in ("at_1", "at_5") for method in ("model", "chance", "bag_of_words")]
        for name, one in retrieval["recall"].items()
    ]
    caption = (
        "How often the right candidate is the first, or among the first five. Bag of words: TF-IDF of the words; an "
        "image is described by the caption of the training image with the nearest pixels."
    )
    blocks: list[Block] = [Table(header, rows, "Retrieval", caption, numeric=tuple(range(1, 9)))]
    for name, examples in retrieval["examples"].items():
        items = [
            TextSample(
                one["query"], "\n".join(one["found"]), f"right one at place {one['place']}",
                image=one.get("query_image", ""), answer_images=one.get("found_images", ()),
            )
            for one in examples
        ]  # fmt: skip
        blocks.append(Samples(items, f"Examples, {_TITLES[name]}"))
    return blocks


ALIGN = training_spec(
    name="align",
    title="Aligning texts, code and images",
    report_title="Texts, code and images in one space",
    model_title="",  # not a model that later stages go on with
    objective=_objective,
    rows=ALIGNED_ROWS,
    run_needs=Contrastive.needs,
    needs=lambda config: (PACK.name,),
    config=AlignConfig,
    headline=_headline,
    only_if_named=True,
    loss_unit="",
    blocks=_blocks,
    further=_further,
    row_use=RowUse(compares_rows=True, learns_by_heart=False),
    save=_save,
)
