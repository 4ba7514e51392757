"""Replay of texts that the model writes itself: by the template, always the same, marked, and resumed when killed."""

import json
import signal
from pathlib import Path

import pytest
import torch

from continual_update import QUICK
from continual_world import BASE, KILLER, World, words_of
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, DataError, derive_seed
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.sequence import SamplingParams
from modelwright.model.attention import packed_attend
from modelwright.model.hf import load_model
from modelwright_continual import self_replay
from modelwright_continual.commands.continual import continual
from modelwright_continual.self_replay import PART_TEXTS, SelfReplay
from modelwright_continual.update import UpdateRequest
from modelwright_continual.update_data import prepare_data
from rank_processes import start_process
from refusals import config_error

pytestmark = pytest.mark.slow

SILENT = SilentProgress()
WANTED = 1500
"""Bytes."""


@pytest.fixture(scope="module")
def talker(world: World) -> Path:
    """The run of a model that has learned questions, too."""
    settings = [word for word in QUICK if not word.startswith("--average")]
    words = ["run", "finetune", "--init-from", world.folder / "model", "--data.sources", world.folder / "old.jsonl"]
    words += ["--stages", "clean,pack,sft,quantize", "--run-dir", world.folder / "talker", *settings, *BASE]
    words += ["--sft.num_steps=60", "--pack.chat_loss", "all"]
    assert main([str(word) for word in words]) == 0
    return world.folder / "talker"


def texts_of(talker: Path, folder: Path, seed: int = 1, wanted: int = WANTED) -> list[Document]:
    return SelfReplay(talker / "sft/artifact", folder, seed).texts("conversations", wanted, SILENT)


def test_the_texts_are_the_model_s_own_and_the_same_every_time(talker: Path, tmp_path: Path) -> None:
    first = texts_of(talker, tmp_path / "a")
    assert sum(len(one.text.encode()) for one in first) >= WANTED
    assert texts_of(talker, tmp_path / "b") == first
    assert texts_of(talker, tmp_path / "c", seed=2) != first
    assert len({one.text for one in first}) > len(first) / 2
    part = sorted((tmp_path / "a").rglob("*.jsonl"))[0]
    part.write_text("")  # what is kept is taken, not written again
    assert len(texts_of(talker, tmp_path / "a", wanted=100)) < len(first)


def test_a_question_is_sampled_from_where_the_template_lets_a_user_begin(talker: Path, tmp_path: Path) -> None:
    """Beside a loop over the model's own probabilities, token by token."""
    folder = talker / "sft/artifact"
    tokenizer, model = Tokenizer.load(folder), load_model(folder).eval()
    begin, end = tokenizer.chat.question_bounds()
    rendered = tokenizer.chat.render([{"role": "user", "content": "Why?"}], add_generation_prompt=False)
    assert rendered.startswith(tokenizer.decode(begin, skip_special=False) + "Why?" + tokenizer.token_text(end))
    document = texts_of(talker, tmp_path)[0]
    number = int(document.id.rpartition("/")[2])
    assert number < PART_TEXTS
    seed = self_seed("conversations", number, "question")
    ids = list(begin)
    params = SamplingParams(seed=seed)
    with torch.no_grad():
        while True:
            positions_BT = torch.arange(len(ids))[None]
            segments_BT = torch.zeros_like(positions_BT).int()
            hidden = model(torch.tensor([ids]), positions_BT, packed_attend(segments_BT))
            sums = model.logits(hidden)[0, -1].double().softmax(-1).cumsum(-1)
            token = int(
                torch.searchsorted(sums, torch.tensor(params.uniform(len(ids) - len(begin)), dtype=torch.float64))
            )
            if token in (end, *tokenizer.stop_ids):
                break
            ids.append(token)
    assert tokenizer.decode(ids[len(begin) :]).strip() == document.meta["question"]


def self_seed(form: str, number: int, part: str) -> int:
    return derive_seed(derive_seed(derive_seed(1, "self-replay", form), part), number)


@pytest.mark.slow
def test_an_update_that_is_killed_while_it_writes_ends_with_the_same_texts_and_weights(
    world: World, talker: Path, tmp_path: Path
) -> None:
    def words(name: str) -> list[str]:
        return words_of(world, tmp_path / name, "--self-replay", "--margin", "0.9", model=talker)

    assert main(words("quiet")) in (0, 5)  # the gate is not asked
    for pattern, when in ((r"conversations-00000\.jsonl$", "before"), (r"conversations-00000\.jsonl$", "after")):
        environment = {"KILL_AT": pattern, "KILL_WHEN": when}
        code, _, errors = start_process(KILLER, *words("killed"), environment=environment).end()
        assert code == -signal.SIGKILL, (pattern, errors)
    assert main(words("killed")) in (0, 5)
    for name in ("data/old.jsonl", "sft/artifact/model.safetensors"):
        assert (tmp_path / "quiet" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    own_texts_are_taken_for_nobody_else_s(tmp_path / "quiet", world)


def own_texts_are_taken_for_nobody_else_s(run: Path, world: World) -> None:
    """The replayed file is refused as a source, its texts are trained on in this run alone, and lineage says what they
    are.
    """
    old = run / "data/old.jsonl"
    records = [json.loads(line) for line in old.read_text().splitlines()]
    assert records
    assert {record["meta"]["answer_by"] for record in records} == {"modelwright"}
    with pytest.raises(DataError, match="Modelwright itself wrote the text"):
        list(read_documents(SourceConfig(sources=(str(old),)), report=SourceReport()))
    assert len(list(read_documents(SourceConfig(sources=(str(old),), own_answers="train"), report=SourceReport())))
    assert any(document.source == "old" for document in read_kept(run / "clean/artifact", split="train"))
    new, known = (str(world.file("new")),), (str(world.file("old")),)
    with pytest.raises(ConfigError, match="replayed what its model wrote itself"):
        _ = UpdateRequest(model=run, new=new, replay=0.5).data
    following = UpdateRequest(model=run, new=new, old=known, replay=0.5)
    prepare_data(following.data, world.benchmark, run.parent / "next/data", SILENT)
    replayed = [json.loads(line) for line in (run.parent / "next/data/old.jsonl").read_text().splitlines()]
    assert replayed
    assert not [record for record in replayed if record["meta"].get("answer_by") == "modelwright"]


def test_a_text_with_line_separators_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model writes whatever it samples: separators that are line ends for `str.splitlines` are none in a file."""
    monkeypatch.setattr(self_replay, "model_digest", lambda folder: "of a model")
    replay = SelfReplay(tmp_path / "model", tmp_path / "kept", 1)
    texts = ["one\u2028and\u0085another\u2029text", "a second text"]
    part = tmp_path / "kept" / replay.identity / "text-00000.jsonl"
    part.parent.mkdir(parents=True)
    documents = [Document(id=text, text=text, kind="prose", split="train", source="s") for text in texts]
    part.write_text("".join(one.to_json() + "\n" for one in documents), encoding="utf-8")
    assert [one.text for one in replay.texts("text", 10, SILENT)] == texts


def test_a_model_that_writes_nothing_and_two_kinds_of_old_texts_are_refused(
    world: World, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_replay, "PART_TEXTS", 2)
    monkeypatch.setattr(self_replay, "FEWEST_BYTES", 10_000)
    with pytest.raises(DataError, match="writes no conversations"):
        texts_of(talker, tmp_path)
    with config_error("self-replay"):
        main_raising(words_of(world, tmp_path / "run", "--self-replay", "--old", world.file("old")))


def main_raising(words: list[str]) -> None:
    continual(words[1:])
