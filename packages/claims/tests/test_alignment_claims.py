"""The claims about alignment: their verdicts, their instruments, and a quick measurement of each."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from modelwright.core.artifacts import RunDir
from modelwright.core.progress import SilentProgress
from modelwright.data.document import Document
from modelwright.data.rows.examples import PromptRecord
from modelwright.data.sources import corpora
from modelwright.objectives.rollouts import Rollout
from modelwright.pipeline import resolve
from modelwright_claims import grpo_arithmetic, lora_dpo, ppo_true_reward, product_runs
from modelwright_claims.claim import Claim, Measurement, Setting, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.product_runs import Answers, Asker, pairs_file

pytestmark = pytest.mark.slow

TRUE, LEARNED = (ppo_true_reward.REWARDS[term] for term in (ppo_true_reward.TRUE, ppo_true_reward.LEARNED))


RATES = {"effective": {"fp32": 5e10, "bf16": 5e10}, "busy_cores": 0.0}
"""Stands for the rates of the machine, which every run would measure."""


def verdict(claim: Claim, samples: dict, conditions: dict | None = None) -> Verdict:
    """The verdict; one that is met has all figures that the overview shows."""
    found = judge(claim, Measurement(samples=samples, conditions=conditions or {}))
    if found.kind == "met":
        assert set(claim.headline) <= set(found.figures)
        assert all(figure.unit for figure in found.figures.values() if figure.value > 1)
    return found


def around(value: float, step: float = 0.01) -> list[float]:
    """Five repeats near a value."""
    return [value + step * number for number in (-2, 1, 0, 2, -1)]


PPO_SAMPLES = {
    **{f"{TRUE}{model}": around(value) for model, value in (("fine-tuning", 0.6), ("PPO", 0.8))},
    **{f"{TRUE}best of {number}": around(0.75) for number in (4, 8)},
    **{f"{LEARNED}{model}": around(value) for model, value in (("fine-tuning", 2.6), ("PPO", 5.2))},
    ppo_true_reward.WINS: around(0.7), ppo_true_reward.KL: around(4.0), ppo_true_reward.ACCURACY: around(0.9),
}  # fmt: skip


def test_ppo_is_judged_by_the_true_reward_and_against_best_of_n() -> None:
    met = verdict(ppo_true_reward.CLAIM, PPO_SAMPLES)
    assert met.kind == "met", met.reason
    assert met.figures[ppo_true_reward.GAIN].value == pytest.approx(0.2)
    assert met.figures["true reward of PPO over best of 8"].value == pytest.approx(0.05)
    assert "best of 8 by the same reward model 0.750 at 1.2 nats (PPO +0.050)" in met.reason
    assert met.figures[ppo_true_reward.ACCURACY].value == pytest.approx(90.0)
    pleasing = verdict(ppo_true_reward.CLAIM, {**PPO_SAMPLES, f"{TRUE}PPO": around(0.61, step=0.02)})
    assert pleasing.kind == "short"
    assert pleasing.reason.startswith("gain in true reward 0.01 points (lower bound")
    beaten = verdict(ppo_true_reward.CLAIM, {**PPO_SAMPLES, f"{TRUE}best of 4": around(0.81)})
    assert beaten.kind == "short"
    assert "true reward of PPO over best of 4 -0.01" in beaten.reason
    lacking = {name: values for name, values in PPO_SAMPLES.items() if name != f"{TRUE}PPO"}
    assert verdict(ppo_true_reward.CLAIM, lacking).kind == "not judged"


def accuracies(**changes: float) -> dict[str, list[float]]:
    """Samples of `grpo_arithmetic`."""
    arms = {
        "GRPO": 95.0, "before": 47.0, grpo_arithmetic.DEMONSTRATIONS: 48.0, grpo_arithmetic.VERIFIED: 94.0,
        grpo_arithmetic.MAJORITY: 50.0, grpo_arithmetic.ANY: 99.0,
    }  # fmt: skip
    return {f"{grpo_arithmetic.ACCURACY}{arm}": around(value, 0.5) for arm, value in (arms | changes).items()}


def test_grpo_must_beat_its_start_and_demonstrations_and_not_lose_to_verified_answers() -> None:
    claim, conditions = grpo_arithmetic.CLAIM, {grpo_arithmetic.NUM_PROBLEMS: 153}
    met = verdict(claim, accuracies(), conditions)
    assert met.kind == "met", met.reason
    assert "GRPO 95.0% of 153 problems; best of 8 by the verifier 99.0%" in met.reason
    assert "not above 0 points" in verdict(claim, accuracies(before=95.5), conditions).reason
    demonstrations = verdict(claim, accuracies(**{grpo_arithmetic.DEMONSTRATIONS: 96.0}), conditions)
    assert demonstrations.reason.startswith("accuracy of GRPO over fine-tuning on demonstrations -1 points")
    better = verdict(claim, accuracies(**{grpo_arithmetic.VERIFIED: 97.0}), conditions)
    assert (better.kind, better.reason[:49]) == ("short", "fine-tuning on verified answers is better by 2.0 ")
    beside = verdict(claim, accuracies(**{grpo_arithmetic.MAJORITY: 97.0}), conditions)
    assert (beside.kind, beside.figures["accuracy of GRPO over majority of 8"].value) == ("met", pytest.approx(-2.0))


def dpo_samples(**changes: list[float]) -> dict[str, list[float]]:
    """Samples of `lora_dpo`, by quantity and arm."""
    values = {
        "accuracy_full": around(90.0, 0.3), "accuracy_lora": around(89.5, 0.3), "pace_full": around(300.0, 1.0),
        "pace_lora": around(360.0, 1.0), "peak_full": around(7e8, 1e6), "peak_lora": around(4e8, 1e6),
    } | changes  # fmt: skip
    whats = {"accuracy": lora_dpo.ACCURACY, "pace": lora_dpo.PACE, "peak": lora_dpo.PEAK}
    arms = {"full": lora_dpo.FULL, "lora": lora_dpo.LORA}
    samples = {f"{whats[what]}{arms[arm]}": values[f"{what}_{arm}"] for what in whats for arm in arms}
    for arm in arms.values():
        samples |= {f"rates, {arm}": [1e-4, 1e-3, 1e-2], f"tuning, {arm}": [0.6, 0.5, 0.7]}
    return samples


def test_lora_is_judged_by_accuracy_memory_and_pace() -> None:
    met = verdict(lora_dpo.CLAIM, dpo_samples())
    assert met.kind == "met", met.reason
    assert met.figures[lora_dpo.MEMORY].value == pytest.approx(4 / 7, rel=1e-3)
    assert met.figures["peak bytes, LoRA"].unit == "MiB"
    assert met.figures["rate, LoRA"].value == 1e-3
    for change, part in (
        ({"accuracy_lora": around(86.0, 0.3)}, lora_dpo.GAP),
        ({"accuracy_lora": [86.0, 94.0, 89.0, 84.0, 97.0]}, lora_dpo.GAP),  # equal on average, without a bound near it
        (
            {"accuracy_full": around(50.1, 0.3), "accuracy_lora": around(50.0, 0.3)},
            f"{lora_dpo.ACCURACY}all weights 50.1%",
        ),
        ({"peak_lora": around(7.1e8, 1e6)}, lora_dpo.MEMORY),
        ({"pace_lora": around(290.0, 1.0)}, lora_dpo.SPEED),
    ):
        short = verdict(lora_dpo.CLAIM, dpo_samples(**change))
        assert (short.kind, short.reason[: len(part)]) == ("short", part)


def answers(rewards: dict[str, list[list[float]]], texts: list[list[str]]) -> Answers:
    nothing = torch.zeros(0)
    rollout = Rollout(
        prompts_C=nothing, ids_CL=nothing, prompt_lens_C=nothing, lens_C=nothing, log_probs_CT=nothing,
        stopped_C=nothing, rewards_C=nothing, terms_CR=nothing,
    )  # fmt: skip
    return Answers(
        rewards_PG={name: torch.tensor(values) for name, values in rewards.items()}, texts=texts, rollout=rollout
    )


def test_the_best_of_n_is_chosen_by_the_reward_model_and_not_by_the_true_reward() -> None:
    learned, true = [[1.0, 3.0, math.nan, 9.0]], [[0.9, 0.1, 0.8, 0.5]]
    found = answers({ppo_true_reward.LEARNED: learned, ppo_true_reward.TRUE: true}, [["a", "b", "c", "d"]])
    for number, expected in ((1, 0.9), (2, 0.1), (3, 0.1), (4, 0.5)):
        best = ppo_true_reward.best(found, number)
        assert best[ppo_true_reward.TRUE].tolist() == [[pytest.approx(expected)]]
    assert ppo_true_reward.best_of_kl(1) == 0.0
    assert ppo_true_reward.best_of_kl(8) == pytest.approx(1.2044, abs=1e-4)


def test_the_majority_is_the_most_frequent_answer_and_the_first_of_equals() -> None:
    texts = [["41", "31", " 41", "5"], ["7", "17", "7", "17"], ["2", "3", "3", "2"]]
    right = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]]
    found = answers({grpo_arithmetic.RIGHT: right}, texts)
    assert grpo_arithmetic.majority_right(found) == pytest.approx(200 / 3)
    assert grpo_arithmetic.percent_right(found) == pytest.approx(50.0)


class OneAsker:
    """Answers that are given."""

    def __init__(self, found: Answers) -> None:
        self.found, self.asked = found, list[int]()

    def prompts(self, split: str) -> list[PromptRecord]:
        turns = ("8 + 4", "9 + 9")
        return [PromptRecord(ids=[1], messages=[{"role": "user", "content": turn}]) for turn in turns]

    def ask(self, model: Path, prompts: list, *, num_answers: int, seed: int) -> Answers:
        self.asked.append(num_answers)
        return self.found


def test_verified_answers_are_right_and_kept_once() -> None:
    asker = OneAsker(
        answers({grpo_arithmetic.RIGHT: [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]}, [["12", "2", "= 12"], ["8"] * 3])
    )
    (document,) = grpo_arithmetic.verified_answers(asker, Path(), 7, seed=0)  # pyright: ignore[reportArgumentType]
    assert (document.text, document.split, asker.asked) == ("8 + 4\n\n12", "train", [3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with few pairs."""
    folder = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "MODULES_FRACTION", 0.05)
        pairs_file(folder / "alignment", "test")
    return folder


def test_pairs_of_tuning_are_not_reported(folder: Path) -> None:
    splits = ("test", "validation")
    files = {one: pairs_file(folder / "alignment", one).read_text().splitlines() for one in splits}
    documents = {one: [Document.from_json(line) for line in lines] for one, lines in files.items()}
    ids = {one: {document.id for document in of if document.split == "heldout"} for one, of in documents.items()}
    train = [{document.id for document in of if document.split == "train"} for of in documents.values()]
    assert train[0] == train[1]
    assert not any(a & b for a, b in itertools.combinations([*ids.values(), train[0]], 2))
    assert len(train[0]) > len(ids["test"]) > 0 < len(ids["validation"])


def test_a_pair_is_the_right_answer_and_the_one_without_the_carry(tmp_path: Path) -> None:
    documents = {one: list(map(Document.from_json, file(tmp_path, one))) for one in product_runs.SHARES}
    for document in documents["test"]:
        assert str(eval(document.meta["question"])) == document.meta["answer"]
        assert abs(int(document.rejected[0]["content"]) - int(document.meta["answer"])) == 10
    heldout = {
        one: {lora_dpo.problem_of(pair) for pair in of if pair.split == "heldout"} for one, of in documents.items()
    }
    train = {lora_dpo.problem_of(pair) for pair in documents["validation"] if pair.split == "train"}
    assert all(heldout.values())
    assert not any(a & b for a, b in itertools.combinations([*heldout.values(), train], 2))
    lines = lora_dpo.demonstrations_file(tmp_path).read_text().splitlines()
    demonstrations = [one for line in lines if (one := Document.from_json(line)).split == "train"]
    assert {lora_dpo.problem_of(one) for one in demonstrations} == train
    assert len(demonstrations) == 2 * sum(pair.split == "train" for pair in documents["test"])


def file(folder: Path, heldout: product_runs.HeldOut) -> list[str]:
    return lora_dpo.pairs_file(folder, heldout).read_text().splitlines()


@pytest.fixture
def setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A setting for measurements of few problems, by runs that do not measure the machine."""
    monkeypatch.setattr(corpora, "NUM_TERMS", 20)
    monkeypatch.setattr(resolve, "measure_rates", lambda *words, **settings: RATES)
    return Setting(quick=True, folder=folder, progress=SilentProgress())


@pytest.mark.slow
def test_a_quick_measurement_of_ppo(setting: Setting) -> None:
    found = ppo_true_reward.CLAIM.measure(setting)
    assert set(found.samples) == set(PPO_SAMPLES) | {f"{LEARNED}best of {number}" for number in (4, 8)}
    values = {name: value for name, (value,) in found.samples.items()}
    assert values[f"{LEARNED}best of 8"] > values[f"{LEARNED}best of 4"] > values[f"{LEARNED}fine-tuning"]
    assert found.conditions["updates of PPO"] == 4
    assert judge(ppo_true_reward.CLAIM, found).figures[ppo_true_reward.GAIN].unit == "points"


def test_the_kl_of_a_model_from_itself_is_zero_and_from_another_one_is_not(setting: Setting) -> None:
    """Compare models of the run of the quick measurement, which is not made again."""
    ppo_true_reward.CLAIM.measure(setting)
    run = RunDir(setting.folder / "alignment" / f"ppo-{ppo_true_reward.SEEDS[0]}")
    asker, start = Asker.of(run, "ppo"), run.stage("sft").artifact
    found = asker.ask(start, asker.prompts("heldout"), num_answers=2, seed=1)
    assert ppo_true_reward.kl_from(start, found, asker.row_len) == pytest.approx(0.0, abs=1e-3)
    assert ppo_true_reward.kl_from(run.stage("pretrain").artifact, found, asker.row_len) > 0.1


@pytest.mark.slow
def test_a_quick_measurement_of_grpo(setting: Setting) -> None:
    found = grpo_arithmetic.CLAIM.measure(setting)
    assert set(found.samples) == set(accuracies())
    assert all(0 <= value <= 100 for (value,) in found.samples.values())
    assert found.conditions[grpo_arithmetic.NUM_SAMPLES] == 2 * 1024 // 32
    assert found.conditions[grpo_arithmetic.NUM_STEPS] == 1
    assert judge(grpo_arithmetic.CLAIM, found).figures["accuracy of GRPO over before"].unit == "points"


@pytest.mark.slow
def test_a_quick_measurement_of_lora(setting: Setting) -> None:
    found = lora_dpo.CLAIM.measure(setting)
    assert set(found.samples) == set(dpo_samples()) | {f"{lora_dpo.LOSS}{arm}" for arm in lora_dpo.ARMS}
    for arm in lora_dpo.ARMS:
        assert found.samples[f"rates, {arm}"] == [lora_dpo.RATES[arm][0]]
        assert found.samples[f"{lora_dpo.PACE}{arm}"][0] > 0
        assert 0 < found.samples[f"{lora_dpo.ACCURACY}{arm}"][0] <= 100
    adapters = list((setting.folder / "dpo").glob(f"dpo-test-{lora_dpo.SEEDS[0]}-LoRA-*/dpo/artifact/adapter"))
    assert len(adapters) == 1


def test_rates_are_tuned_on_another_seed_until_the_best_lies_inside(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[lora_dpo.DpoJob] = []

    def run(setting: Setting, work: object, more: list[lora_dpo.DpoJob], *sources: object, name: str) -> list[dict]:
        jobs.extend(more)
        return [{lora_dpo.LOSS: abs(math.log10(job.rate) + 2.0)} for job in more]

    monkeypatch.setattr(lora_dpo, "by_seed", run)
    full = Setting(quick=False, folder=setting.folder, progress=SilentProgress())
    found = lora_dpo.Bench(full).tune(Path("base"))
    assert list(found[lora_dpo.LORA]) == [3e-4, 1e-3, 3e-3, pytest.approx(9e-3), pytest.approx(0.027)]
    assert {(job.seed, job.heldout) for job in jobs} == {(lora_dpo.TUNING_SEED, "validation")}
    assert lora_dpo.TUNING_SEED not in lora_dpo.SEEDS
    assert len({str(job.key) for job in jobs}) == len(jobs)
    assert product_runs.SHARES["test"][1] <= product_runs.SHARES["validation"][0]
