"""What vLLM's /metrics says of its cache (vllm.v1.metrics.loggers)."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

BLOCKS, USAGE = "vllm:cache_config_info", "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, kw_only=True)
class VllmFigures:
    """Figures of all engines of a vLLM together, since its start. num_blocks: of the cache; used_share: of them, the
    mean over the engines.
    """

    num_blocks: int = 0
    used_share: float = 0.0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


def read_figures(text: str) -> VllmFigures:
    """Read the text of /metrics; a metric that is not there is 0. Raises `ValueError` for another format."""
    names = (BLOCKS, USAGE, PREEMPTIONS, QUERIES, HITS)
    # Parsing all of them each second would hold up streams.
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(names)]
    sums, counts, num_blocks = defaultdict[str, float](float), Counter[str](), 0
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            sums[sample.name] += sample.value
            counts[sample.name] += 1
            if sample.name == BLOCKS:
                blocks = sample.labels.get("num_gpu_blocks", "")
                num_blocks += int(blocks) if blocks.isdigit() else 0
    return VllmFigures(
        num_blocks=num_blocks,
        used_share=sums[USAGE] / max(1, counts[USAGE]),
        num_preemptions=round(sums[PREEMPTIONS]),
        num_prefix_queries=round(sums[QUERIES]),
        num_prefix_hits=round(sums[HITS]),
    )
