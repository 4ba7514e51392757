"""Judge: is the model better than before? Paired comparisons, results of the evaluation, answers, tasks of lm-eval."""

from collections.abc import Mapping
from typing import Any

from modelwright_board.files import as_list, as_number, as_object, parse_json, parse_lines, read_text
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Screen

MOST_COMPARISONS, MOST_QUESTIONS = 6, 12


def comparisons(board: Board) -> list[dict[str, Any]]:
    """Returns the finished comparisons, the newest first, with intervals of their differences."""
    found: list[dict[str, Any]] = []
    for job in board.jobs.of("judge", action="compare"):
        result = as_object(parse_json(board.jobs.result(job))) if job.state == "done" else {}
        measures = [as_object(one) for one in as_list(result.get("measures"))]
        if not measures or len(found) >= MOST_COMPARISONS:
            continue
        numbers: list[list[Any]] = []
        rows: list[list[Any]] = []
        verdicts: list[str] = []
        for one in measures:
            name = str(one.get("name"))
            low, middle, high = (as_number(one.get(key)) for key in ("low", "difference", "high"))
            numbers.append([name, low, middle, high])
            figures = [f"{as_number(one.get(key)):.4g}" for key in ("first", "second", "difference", "p_value")]
            rows.append([name, *figures, one.get("num_records")])
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
    measures: dict[str, list[list[Any]]] = {}
    scores = run.scores()
    for name, title, *interval in scores:
        if all(one == one for one in interval):
            measures.setdefault(title, []).append([name, *interval])
    by_id: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(score[0] for score in scores):
        for one in parse_lines(read_text(run.path, "evaluate", "artifact", name, "questions.jsonl"))[:MOST_QUESTIONS]:
            candidates = [str(text)[:300] for text in as_list(one.get("candidates"))]
            fresh = {"question": str(one.get("question"))[:500], "candidates": candidates, "answer": one.get("answer")}
            entry = by_id.setdefault(str(one.get("id")), {**fresh, "chosen": []})
            choice = one.get("choice")
            text = candidates[choice] if isinstance(choice, int) and 0 <= choice < len(candidates) else str(choice)
            entry["chosen"].append((name, text, choice == one.get("answer")))
    lm_eval: list[tuple[str, list[list[Any]]]] = []
    for path in sorted(run.path.glob("lm-eval-*.json"))[:6]:
        tables = as_object(run.json(path.name).get("results")).items()
        entries = [[task, name, as_number(value)] for task, table in tables for name, value in as_object(table).items()]
        lm_eval.append((path.name, [entry for entry in entries if entry[2] == entry[2]][:60]))
    return {"measures": measures, "questions": list(by_id.values())[:MOST_QUESTIONS], "lm_eval": lm_eval}


def show(board: Board, query: Query) -> Mapping[str, Any]:
    return {"comparisons": comparisons(board), **evaluated(board.chosen_run(query))}


SCREEN = Screen(
    name="judge", title="Judge", question="Is it better than before, and by how much?", show=show,
    stage="evaluate", blocks=("comparisons", "jobs"),
)  # fmt: skip
