"""Cached prompts over HTTP: what usage and metrics say of them, and that API keys do not share them."""

from pathlib import Path

import httpx

from serve.test_keys import post, write_keys

TEXT = "the quick brown fox jumps over the lazy dog. what does this do? it copies a tree of files. " * 2


def test_usage_and_metrics_count_cached_tokens_per_key(slow_server, tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", alice={}, bob={}, scrape={"scopes": ["metrics"]})
    server = slow_server(keys_file=keys, prefill_chunk_size=16, max_running=4)
    found = []
    for key in ("alice", "bob", "alice", "bob"):
        answer = post(server, key, prompt=[TEXT, "the"], max_tokens=6, temperature=0, n=2).json()
        found.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]))
    num_tokens = len(server.service.model.tokenizer.encode(TEXT))
    cached = (num_tokens - 1) // 16 * 16
    assert cached > 16
    assert [number for number, _ in found] == [0, 0, cached, cached]
    assert all(choices == found[0][1] for _, choices in found)
    metrics = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer scrape"}).text
    lines = [line.split() for line in metrics.splitlines() if line.startswith("modelwright_prefix_cache")]
    counts = {name: float(value) for name, value in lines}
    assert counts["modelwright_prefix_cache_hits_total"] == 2 * cached
    once = num_tokens + len(server.service.model.tokenizer.encode("the"))
    assert counts["modelwright_prefix_cache_queries_total"] == 4 * once, "n answers look a prompt up once"
    embedding = httpx.post(
        f"{server.url}/v1/embeddings",
        json={"model": "tiny", "input": TEXT},
        headers={"Authorization": "Bearer alice"},
        timeout=60,
    )
    assert embedding.status_code == 200
