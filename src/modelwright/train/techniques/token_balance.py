"""Distributes rows over microbatches with nearly equal numbers of real tokens."""

from modelwright.parallel.pipeline.balance import LoadBalanceConfig, balance_tokens
from modelwright.train.objective import Batch
from modelwright.train.technique import Runtime, Technique


def token_balance(config: LoadBalanceConfig, run: Runtime) -> Technique | None:
    if not config.tokens:
        return None

    def on_batch(step: int, batch: Batch) -> Batch:
        # Asked in each step: the number rises once memory has run out.
        num_parts = run.runner.num_microbatches(batch.num_groups)
        return balance_tokens(batch.padded(num_parts), num_parts) if num_parts > 1 else batch

    return Technique(name="token_balance", on_batch=on_batch, needs=frozenset())
