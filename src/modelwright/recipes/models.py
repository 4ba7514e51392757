"""Models from Python: loading, answering, scoring, comparing, exporting and serving.

`run`, `finetune` and `align` make the run folders that the commands make.
"""

import html
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, Stopped, dump, merge, nested_settings, parse, require
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.records import read_records
from modelwright.evaluate.scoring import EvaluateConfig, Scored, sequence_nats
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.generate import generate as complete
from modelwright.infer.sequence import SamplingParams
from modelwright.model.adapters import merge_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.peft_folder import load_adapter
from modelwright.pipeline.models import FoundModel, find_model
from modelwright.pipeline.resolve import resolved_device
from modelwright.pipeline.run import RunResult, check_request, execute
from modelwright.pipeline.run_config import run_schema
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.dpo import DPO
from modelwright.pipeline.stages.grpo import GRPO
from modelwright.pipeline.stages.kto import KTO
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.ppo import PPO
from modelwright.pipeline.stages.report import REPORT
from modelwright.pipeline.stages.reward import REWARD
from modelwright.recipes.load import RUNS, Request, find_run, find_target, finetune_request, settings_of_target
from modelwright.recipes.load import load as load_request
from modelwright.recipes.sources import FOLDER, read_sources
from modelwright.recipes.watch import OnStep, WatchedProgress, shown
from modelwright.serve.load import ModelSource, ServedTokenizer, load_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

PathLike = str | os.PathLike[str]
Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Cost of one text. nats: negative log-likelihood of all of its tokens."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / max(1, self.num_tokens))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(1, self.num_bytes)


class Model:
    """A model in memory. `found` says where it came from."""

    def __init__(self, decoder: Decoder, tokenizer: ServedTokenizer, found: FoundModel) -> None:
        self.decoder, self.tokenizer, self.found = decoder, tokenizer, found

    def __repr__(self) -> str:
        return f"Model({self.found.source.describe()})"

    @overload
    def generate(
        self, prompt: str, *, max_tokens: int = ..., temperature: float = ..., top_p: float = ..., seed: int = ...
    ) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], *, max_tokens: int = ..., temperature: float = ..., top_p: float = ...,
                 seed: int = ...) -> list[str]: ...  # fmt: skip

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        max_tokens: int = 128,
        temperature: float = 0.7,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> str | list[str]:
        """Continues one text or several. temperature: 0 takes the likeliest token. The same seed gives the same text.
        Raises `ConfigError` for an empty prompt and one that fills the context.
        """
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        answers = self._complete([self.tokenizer.encode(text) for text in texts], params)
        return answers[0] if isinstance(prompt, str) else answers

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int = 512,
        temperature: float = 0.7,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> str:
        """Answers a question, or a conversation of messages with `role` and `content`, in the model's chat template."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        return self._complete([self.tokenizer.encode_chat(turns)], params)[0]

    def score(self, texts: Sequence[str]) -> list[TextScore]:
        """How likely the model finds each text; each token has as much context as the model takes."""
        encoded, config = [self.tokenizer.encode(text, with_begin=False) for text in texts], EvaluateConfig()
        nats = sequence_nats(
            self.decoder,
            [Scored([self.tokenizer.start_id, *ids], 1) for ids in encoded],
            context_overlap=config.context_overlap,
            max_context=config.max_context,
            batch_tokens=config.batch_tokens,
            progress=SilentProgress(),
        )
        return [
            TextScore(nats=float(cost), num_tokens=len(ids), num_bytes=len(text.encode()))
            for text, ids, cost in zip(texts, encoded, nats, strict=True)
        ]

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """The last hidden state of each text after the final norm [texts, model_dim]."""
        engine, results = Engine(self.decoder, EngineConfig()), dict[str, list[float]]()
        for number, text in enumerate(texts):
            engine.embed(str(number), self.tokenizer.encode(text))
        while engine.has_work:
            results.update({output.request_id: list(output.embedding) for output in engine.step()})
        return [results[str(number)] for number in range(len(texts))]

    def _complete(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        stop = self.tokenizer.stop_ids
        chosen = [replace(params, stop_ids=stop, seed=params.seed + number) for number in range(len(prompts))]
        done = complete(self.decoder, prompts, chosen)
        return [self.tokenizer.decode([one for one in answer.token_ids if one not in stop]) for answer in done]


def find(target: PathLike, *, stage: str = "", int8: bool = False) -> FoundModel:
    """Finds the model of a run or a model folder and verifies its files."""
    return find_model(find_target(os.fspath(target)), stage=stage, int8=int8)


def load(target: PathLike, *, adapter: PathLike = "", stage: str = "", int8: bool = False) -> Model:
    """Loads the model of a run, or of a Hugging Face folder. adapter: a PEFT folder, which is merged into the weights.
    Raises `ConfigError`, `ModelError` or `ArtifactError` if there is none, or a file is damaged.
    """
    found = find(target, stage=stage, int8=int8)
    decoder, tokenizer = load_folder(found.source.folder, Int8WeightsConfig())
    if os.fspath(adapter):
        load_adapter(decoder, Path(adapter))
        merge_adapters(decoder)
    return Model(decoder.to(resolved_device("auto")).eval(), tokenizer, found)


@dataclass(frozen=True)
class ComparedModels:
    """Two models on the same records. result: the `ComparedModels` with its measures."""

    result: Any

    def __str__(self) -> str:
        return self.result.table()

    def as_json(self) -> str:
        return self.result.as_json()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.result.table())}</pre>"


def compare(
    first: PathLike,
    second: PathLike,
    sources: Any,
    *,
    resamples: int = 10_000,
    max_new_tokens: int = 512,
    num_records: int = 0,
    progress: bool | Progress = False,
) -> ComparedModels:
    """Compares two models on the same records, as `modelwright compare` does, with a paired bootstrap over records."""
    from modelwright.pipeline.compare import CompareConfig, compare_models

    config = CompareConfig(resamples=resamples, max_new_tokens=max_new_tokens, num_records=num_records)
    found, given = (find(first), find(second)), read_sources(sources)
    try:
        paths = [str(given.waiting)] if given.waiting else given.paths
        with shown(progress) as display:
            return ComparedModels(compare_models(*found, paths, config, display))
    finally:
        given.close()


def evaluate(
    target: PathLike,
    tasks: PathLike,
    *,
    limit: int = 0,
    num_fewshot: int = -1,
    chat: bool = False,
    stage: str = "",
    int8: bool = False,
    out: PathLike = "",
    progress: bool | Progress = False,
) -> "Evaluation":
    """Evaluates a model on lm-eval's local tasks, as `modelwright evaluate` does, and writes the results."""
    from modelwright.pipeline.harness import HarnessConfig, evaluate_tasks, find_tasks, write_results

    config, path = HarnessConfig(limit=limit, num_fewshot=num_fewshot, uses_chat=chat), Path(tasks)
    chosen, found = find_tasks(path), find(target, stage=stage, int8=int8)
    name = f"lm-eval-{path.resolve().stem}.json"
    place = found.run.path / name if found.run is not None else Path(f"{found.source.name}-{name}")
    with shown(progress) as display:
        results = evaluate_tasks(found, chosen, config, display)
    return Evaluation(results, write_results(results, Path(out) if os.fspath(out) else place), found)


@dataclass(frozen=True)
class Evaluation:
    """Results of lm-eval's tasks, the file that has them, and the model."""

    results: Mapping[str, Any]
    path: Path
    found: FoundModel


@dataclass(frozen=True)
class Exported:
    """A model in a form of other programs. model: what it was made of; notes: what its user should know."""

    path: Path
    model: str
    notes: tuple[str, ...]


def export(
    target: PathLike,
    to: str,
    dest: PathLike = "",
    *,
    dtype: str = "",
    stage: str = "",
    int8: bool = False,
    adapter: PathLike = "",
    overwrite: bool = False,
) -> Exported:
    """Writes a model for other programs, as `modelwright export` does. to: the name of the form; adapter: a folder of
    PEFT or Unsloth that is merged into the model first.
    """
    from modelwright.pipeline.exports import EXPORTS, added_exports
    from modelwright.pipeline.exports.export import ExportOptions
    from modelwright.pipeline.exports.merge import merge_folder

    added = added_exports()
    if to not in EXPORTS and to not in added:
        known = ", ".join([*EXPORTS, *added])
        raise ConfigError(f"--to: {to!r} is not understood; write one of {known}, with or without DEST", code="choice")
    chosen = EXPORTS[to] if to in EXPORTS else added[to]()
    if int8 and not chosen.takes_integers:
        able = ", ".join(one.name for one in EXPORTS.values() if one.takes_integers)
        raise ConfigError(f"--int8: {to} cannot hold these weights; export to one of {able}")
    if dtype and dtype not in chosen.dtypes:
        remedy = f"choose from {', '.join(chosen.dtypes)}" if chosen.dtypes else "leave it out"
        raise ConfigError(f"--dtype: {to} does not know the number format {dtype!r}; {remedy}", code="choice")
    adapter = os.fspath(adapter)
    if int8 and adapter:
        raise ConfigError("--int8: an adapter is merged into weights that are not quantized; leave one of the two out")
    word = os.fspath(target)
    needs_run = chosen.needs_run and not adapter
    found = find_model(find_run(word).path if needs_run else find_target(word), stage=stage, int8=int8)
    options = ExportOptions(dtype=dtype or "".join(chosen.dtypes[:1]), overwrite=overwrite)
    described, notes = found.source.describe(), tuple[str, ...]()
    with ExitStack() as stack:
        exported = found
        if adapter:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="modelwright-merge-"))) / "merged"
            notes = tuple(merge_folder(found.source.folder, Path(adapter), folder).notes)
            described += f" with the adapter {adapter}"
            # Without its run: the run's records and digest are those of the model without the adapter.
            name = f"{found.source.name}-{Path(adapter).resolve().name}"
            exported = FoundModel(ModelSource(name=name, folder=folder))
        place = Path(dest) if os.fspath(dest) else chosen.target(exported, options)
        return Exported(
            Path(chosen.write(exported, place, options)), described, (*filter(None, [found.remark]), *notes)
        )


@dataclass(frozen=True)
class RunningServer:
    """A running server. url: its address without `/v1`; model_name: what clients ask for."""

    url: str
    model_name: str


@contextmanager
def serve(
    target: PathLike,
    *,
    stage: str = "",
    int8: bool = False,
    served_model_name: str = "",
    port: int = 0,
    **settings: Any,
) -> "Iterator[RunningServer]":
    """Serves a model over HTTP within the block, in a thread with engines of its own, as the OpenAI API does; drains
    and stops at its end. port: 0 takes a free one; settings: those of `modelwright serve`.
    """
    require({"serve": "serve"})
    from modelwright.serve.config import ServeConfig
    from modelwright.serve.engines.backends import load_engines
    from modelwright.serve.server import ServerThread

    found = find(target, stage=stage, int8=int8)
    given = nested_settings(ServeConfig, {"port": port, **settings})
    config = parse(ServeConfig, merge(dump(found.server), given))
    name = served_model_name or found.source.name
    engines = load_engines(found.source, config)
    with ServerThread(*engines, config, model_name=name, requests=found.requests, source=found.source) as server:
        yield RunningServer(server.url, name)


if TYPE_CHECKING:
    import pandas as pd

METHODS = (DPO, KTO, GRPO, PPO)


@dataclass(frozen=True)
class Run:
    """The folder of a run. is_finished: false if a callback has stopped it; the same call goes on with it."""

    path: Path
    is_finished: bool = True
    result: RunResult | None = field(default=None, repr=False)

    @classmethod
    def open(cls, target: "str | os.PathLike[str]") -> "Run":
        """Opens a run by its folder or its name under runs/. Raises `ConfigError` if there is none."""
        return cls(find_run(os.fspath(target)).path)

    @property
    def report(self) -> Path | None:
        """The HTML page about the run; None before the stage `report`."""
        path = RunDir(self.path).report
        return path if path.is_file() else None

    @property
    def stages(self) -> list[str]:
        """The stages that have finished, in the order in which they first did."""
        return list(RunDir(self.path).read_info()["stages"])

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """The logged steps of each training stage, by its name."""
        return self._records("metrics.jsonl")

    def frame(self) -> "pd.DataFrame":
        """The same metrics as one pandas frame with a column `stage`. Needs pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise ConfigError("frame: needs pandas; pip install pandas, or use metrics()", code="missing") from None
        return pd.DataFrame([{"stage": name, **one} for name, steps in self.metrics().items() for one in steps])

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Texts that the model wrote during each training, by stage."""
        return self._records("samples.jsonl")

    def model(self, *, stage: str = "", int8: bool = False) -> Model:
        """Loads the run's last finished model, that of `stage`, or the quantized one."""
        return load(self.path, stage=stage, int8=int8)

    def _records(self, name: str) -> dict[str, list[dict[str, Any]]]:
        stages = self.stages
        places = {stage: place for place, stage in enumerate(stages)}
        folders = sorted(self.path.glob(f"*/{name}"), key=lambda path: places.get(path.parent.name, len(stages)))
        return {path.parent.name: read_records(path) for path in folders}

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{len(steps)}</td><td>{html.escape(str(steps[-1].get('loss', '')))}"
            "</td></tr>"
            for name, steps in self.metrics().items()
            if steps
        )
        head = "<tr><th>stage</th><th>logged steps</th><th>last loss</th></tr>"
        return f"<p><b>Run</b> {html.escape(str(self.path))}</p><table>{head}{rows}</table>"


def run(
    target: "str | os.PathLike[str]",
    sources: Any = None,
    *,
    stages: Sequence[str] = (),
    run_dir: "str | os.PathLike[str]" = "",
    restart: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Run:
    """Brings a run to its end, as `modelwright run` does: finished stages are skipped, what was cut off goes on.

    target: a recipe, a YAML file or a run's folder; sources: as in `finetune`, by default those of the target; stages:
    only these; settings: nested (`sft={"num_steps": 20}`) or dotted (`**{"sft.num_steps": 20}`). Works in this process.
    Raises `ModelwrightError` with the text of the command line.
    """
    overrides, name = nested_settings(run_schema(), settings), os.fspath(target)
    if sources is not None:
        given = read_sources(sources)
        try:
            own = Path(name) if Path(name).is_dir() else RUNS / str({**settings_of_target(name), **overrides}["name"])
            placed = given.place((Path(run_dir) if os.fspath(run_dir) else own) / FOLDER)
        finally:
            given.close()
        overrides = merge({"data": {"sources": placed}}, overrides)
    request = load_request(name, overrides, os.fspath(run_dir), tuple(stages))
    return _carry_out(request, ["run", name], stages, restart, on_step, progress)


def finetune(
    model: "str | os.PathLike[str]",
    sources: Any,
    *,
    lora: bool = False,
    stages: Sequence[str] = (),
    run_dir: "str | os.PathLike[str]" = "",
    restart: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Run:
    """Fine-tunes a Hugging Face folder or a run on examples, as `modelwright finetune` does.

    sources: paths, records, texts or a frame (`read_sources`); those in memory are written into the run's
    folder under a name with their digest, so that the same call resumes; lora: train low-rank adapters only. The rest
    as in `run`.
    """
    overrides, base = nested_settings(run_schema(), settings), os.fspath(model)
    given = read_sources(sources)
    try:
        folder = Path(os.fspath(run_dir))
        if given.waiting and not os.fspath(run_dir):
            stem = f"{find_model(find_target(base)).source.name}-{Path(given.paths[0]).stem}"
            folder = RUNS / str(overrides.get("name", stem))
        placed = given.place(folder / FOLDER)
    finally:
        given.close()
    request = finetune_request(base, placed, overrides, os.fspath(run_dir), lora=lora, only=tuple(stages))
    return _carry_out(request, ["finetune", base, *placed], stages, restart, on_step, progress)


def align(
    model: "str | os.PathLike[str]",
    sources: Any,
    *,
    method: str = DPO.name,
    run_dir: "str | os.PathLike[str]" = "",
    restart: bool = False,
    on_step: OnStep | None = None,
    progress: bool | Progress = False,
    **settings: Any,
) -> Run:
    """Trains a model on preferences or rewards: the run of docs/alignment.md from this model.

    sources: pairs for `dpo`, labeled answers for `kto`; `grpo` and `ppo` take pairs, which train a reward model,
    or records with questions if `rewards` are among the settings of the stage. The rest as in `run`.
    """
    if method not in (names := [stage.name for stage in METHODS]):
        raise ConfigError(f"method: {method!r} is not one of {', '.join(names)}", code="choice")
    overrides = nested_settings(run_schema(), settings)
    found = find_model(find_target(os.fspath(model))).source
    learns_reward = method in (GRPO.name, PPO.name) and "rewards" not in overrides.get(method, {})
    order = [CLEAN.name, PACK.name, *([REWARD.name] if learns_reward else []), method, REPORT.name]
    defaults = {"name": f"{found.name}-{method}", "init_from": str(found.folder.resolve()), "stages": order}
    merged = merge(defaults, overrides)
    return run("quickstart", sources, run_dir=run_dir, restart=restart, on_step=on_step, progress=progress, **merged)


def _carry_out(
    request: Request,
    words: Sequence[str],
    only: Sequence[str],
    restart: bool,
    on_step: OnStep | None,
    progress: bool | Progress,
) -> Run:
    check_request(request.config, request.run, only, num_processes=1, restart=restart)
    with shown(progress) as display:
        watched = WatchedProgress(display, on_step)
        for note in request.notes:
            watched.note(note)
        try:
            result = execute(
                request.config,
                request.run,
                only=only,
                origin=request.origin,
                words=words,
                progress=watched,
                restart=restart,
            )
        except Stopped:
            if not watched.has_stopped:
                raise
            return Run(request.run.path, is_finished=False)
    return Run(request.run.path, result=result)
