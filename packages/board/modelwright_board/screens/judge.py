"""Judge: is the model better than before? Paired comparisons, results of the evaluation, answers, tasks of lm-eval."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright_board import screen
from modelwright_board.files import as_list, as_number, as_object, parse_json, parse_lines, read_text
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Values

MOST_COMPARISONS, MOST_QUESTIONS = 6, 12


def compare(board: Board, values: Values) -> Sequence[str]:
    first, second = screen.required(values, "first", "Before"), screen.required(values, "second", "After")
    data = screen.split_words(screen.required(values, "sources", "Data"))
    return ["compare", first, second, *data, *screen.option(values, "records", "--num-records"), "--json"]


def tasks(board: Board, values: Values) -> Sequence[str]:
    limit = screen.option(values, "limit", "--limit")
    return [
        "evaluate", screen.required(values, "target", "Model"), "--tasks", screen.required(values, "tasks", "Tasks"),
        *limit,
    ]  # fmt: skip


def comparisons(board: Board) -> list[dict[str, Any]]:
    """Returns the finished comparisons, the newest first, with intervals of their differences."""
    found: list[dict[str, Any]] = []
    for job in board.jobs.of("judge", action="compare"):
        result = as_object(parse_json(board.jobs.result(job))) if job.state == "done" else {}
        measures = [as_object(one) for one in as_list(result.get("measures"))]
        if not measures or len(found) >= MOST_COMPARISONS:
            continue
        numbers = [
            [str(one.get("name")), *(as_number(one.get(key)) for key in ("low", "difference", "high"))]
            for one in measures
        ]
        rows = [
            [
                one.get("name"),
                *(f"{as_number(one.get(key)):.4g}" for key in ("first", "second", "difference", "p_value")),
                one.get("num_records"),
            ]
            for one in measures
        ]
        verdicts: list[str] = []
        for (name, low, middle, high), one in zip(numbers, measures, strict=True):
            word = "better" if (middle < 0) == bool(one.get("lower_is_better")) else "worse"
            verdicts.append(f"{name}: {'no difference shown' if low <= 0 <= high else word}")
        models = [str(one)[:300] for one in as_list(result.get("models"))][:2]
        found.append({"id": job.id, "models": models, "intervals": numbers, "rows": rows, "verdicts": verdicts})
    return found


def evaluated(run: Run | None) -> Mapping[str, Any]:
    """Returns the intervals of each measure of the run's models, its questions, and results of lm-eval."""
    empty: dict[str, Any] = {"measures": {}, "questions": [], "lm_eval": []}
    if run is None:
        return empty
    models = as_object(run.json("evaluate", "artifact", "results.json").get("models"))
    measures: dict[str, list[list[Any]]] = {}
    for name, model in reversed(models.items()):
        model = as_object(model)
        tables = {
            f"bits per byte of {kind}": (as_object(one), "bits_per_byte")
            for kind, one in as_object(model.get("bits_per_byte")).items()
        }
        tables |= {
            "perplexity of answers": (as_object(model.get("answers")), "perplexity"),
            "multiple choice": (as_object(model.get("multiple_choice")), "accuracy"),
        }
        for title, (table, key) in tables.items():
            numbers = [as_number(table.get(one)) for one in (f"{key}_low", key, f"{key}_high")]
            if all(value == value for value in numbers):
                measures.setdefault(title, []).append([name, *numbers])
    by_id: dict[str, dict[str, Any]] = {}
    for name in reversed(list(models)):
        for one in parse_lines(read_text(run.path, "evaluate", "artifact", name, "questions.jsonl"))[:MOST_QUESTIONS]:
            candidates = [str(text)[:300] for text in as_list(one.get("candidates"))]
            entry = by_id.setdefault(
                str(one.get("id")),
                {
                    "question": str(one.get("question"))[:500],
                    "candidates": candidates,
                    "answer": one.get("answer"),
                    "chosen": [],
                },
            )
            choice = one.get("choice")
            text = candidates[choice] if isinstance(choice, int) and 0 <= choice < len(candidates) else str(choice)
            entry["chosen"].append((name, text, choice == one.get("answer")))
    lm_eval = [
        (
            path.name,
            [
                [task, metric, as_number(value)]
                for task, table in as_object(run.json(path.name).get("results")).items()
                for metric, value in as_object(table).items()
                if as_number(value) == as_number(value)
            ][:60],
        )
        for path in sorted(run.path.glob("lm-eval-*.json"))[:6]
    ]
    return {"measures": measures, "questions": list(by_id.values())[:MOST_QUESTIONS], "lm_eval": lm_eval}


def show(board: Board, query: Query) -> Mapping[str, Any]:
    return {"comparisons": comparisons(board), **evaluated(board.chosen_run(query))}


def state(board: Board, run: Run | None) -> str:
    stage = run.stage("evaluate") if run else None
    return stage.state if stage else ""


SCREEN = screen.Screen(
    name="judge", title="Judge", question="Is it better than before, and by how much?", show=show, state=state,
    blocks=("comparisons", "jobs"), actions=(screen.Action("compare", compare), screen.Action("tasks", tasks)),
)  # fmt: skip
