"""Generates completions of many prompts at once, without a server, for rollouts, evaluation and data generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from modelwright.core.errors import ConfigError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import Pixels, SamplingParams
from modelwright.model.decoder import Decoder


@dataclass
class Completion:
    """The new tokens of one prompt, with their log-probabilities under the model, before temperature (nats).
    finish_reason: as in `StepOutput`.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: EngineConfig | None = None,
    *,
    images: Sequence[Sequence[Pixels]] = (),
    on_step: Callable[[int], None] = lambda num_finished: None,
) -> list[Completion]:
    """Generates one completion for each prompt, in order. params: one for each prompt; model: whole, with any weights;
    it may be in training mode and keeps its mode. Two calls with the same weights, prompts and seeds return the same
    completions. images: of each prompt, in the order of their tokens; empty for none. on_step: called after each step
    of the engine with the number of finished completions. Raises `ConfigError` for a prompt that the engine rejects,
    and for a model of which this rank holds only a part.
    """
    if len(model.blocks) < model.config.num_layers or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "parallel: generation needs a whole model on every rank, and this layout divides the model; train with "
            "data parallelism alone (an objective says so in advance with needs = {WHOLE_MODEL}), or generate with "
            "ModelLayout.whole_model, which gathers it"
        )
    # The engine puts the model into evaluation mode.
    was_training = model.training
    try:
        # Not the fastest head: it is measured anew in each call, and two calls could then differ in the last bits.
        engine = Engine(model, config or EngineConfig(), head=model.logits)
        completions = [Completion() for _ in prompts]
        for number, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            engine.add(str(number), prompt, chosen, images=images[number] if images else ())
        num_finished = 0
        while engine.has_work:
            for output in engine.step():
                completion = completions[int(output.request_id)]
                completion.finish_reason = output.finish_reason
                num_finished += output.finished
                if output.finish_reason != "error":
                    completion.token_ids.append(output.token_id)
                    completion.logprobs.append(output.logprob)
            on_step(num_finished)
        return completions
    finally:
        model.train(was_training)
