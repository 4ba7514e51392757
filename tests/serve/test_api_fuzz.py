"""Requests that schemathesis makes from /openapi.json: no 5xx, and only answers that it describes."""

import pytest

pytest.importorskip("schemathesis", reason="pip install 'modelwright[dev]'")

from api_fuzz import Findings, fuzz, small_server


@pytest.mark.slow
@pytest.mark.parametrize("scores", [False, True], ids=["language", "reward"])
def test_no_request_breaks_the_server(scores: bool):
    with small_server(scores=scores) as server:
        findings = fuzz(server.url, "tiny", 60 if scores else 120, seed=3)
        assert server.service.state.name == "ready"
        assert server.service.num_open == 0
    assert findings.problems == {}
    assert answered(findings, "/v1/embeddings", 200) > 0
    assert answered(findings, "/v1/score" if scores else "/v1/completions", 200) > 0
    assert answered(findings, "/v1/completions" if scores else "/v1/score", 200) == 0
    assert answered(findings, "/v1/chat/completions", 400) > 0


def answered(findings: Findings, path: str, status: int) -> int:
    label = f"POST {path}"
    return sum(count for (route, _, found), count in findings.answers.items() if (route, found) == (label, status))
