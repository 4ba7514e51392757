"""Tiny preferences: random answers to random prompts, packed into rows, and their log-probabilities one by one."""

from pathlib import Path

import numpy as np
import tiny_run
import torch
from torch import Tensor

from modelwright.data.rows.examples import PromptedAnswer, with_mismatched_answers
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import World, single
from modelwright.train.frozen_model import FrozenModel

EOS, NUM_GROUPS = 0, 12


def completions(num: int, *, seed: int = 0) -> list[PromptedAnswer]:
    """Random answers, two to each prompt one after the other."""
    dice, found = np.random.default_rng(seed), []
    for _ in range(num // 2):
        prompt = dice.integers(1, tiny_run.VOCABULARY, size=int(dice.integers(2, 7)))
        for _ in range(2):
            answer = dice.integers(1, tiny_run.VOCABULARY, size=int(dice.integers(1, 9)))
            mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
            found.append(PromptedAnswer(np.concatenate([prompt, answer]), mask))
    return found


def pairs(num: int, *, seed: int = 0) -> list[tuple[TokenSequence, TokenSequence]]:
    """Two answers to each prompt; the value is a margin from 0 to 2."""
    found = completions(2 * num, seed=seed)
    margins = np.random.default_rng(seed).random(num) * 2
    return [
        (TokenSequence(a.ids, a.mask, value=float(margin)), TokenSequence(b.ids, b.mask, value=float(margin)))
        for a, b, margin in zip(found[::2], found[1::2], margins, strict=True)
    ]


def labeled(num: int, *, seed: int = 0) -> list[tuple[TokenSequence, TokenSequence]]:
    """Answers and mismatched answers to the same prompts; the value is 1 for two of three, else 0."""
    matched = with_mismatched_answers(completions(num, seed=seed), seq_len=tiny_run.LENGTH)
    return [
        (TokenSequence(a.ids, a.mask, value=float(i % 3 > 0)), TokenSequence(b.ids, b.mask, value=float(i % 3 > 0)))
        for i, (a, b) in enumerate(matched)
    ]


def packed(folder: Path, groups: list[tuple[TokenSequence, TokenSequence]]) -> PackedRows:
    """The groups in rows of `tiny_run.LENGTH` tokens."""
    config = PackConfig(seq_len=tiny_run.LENGTH)
    sequences = [sequence for group in groups for sequence in group]
    pack(sequences, folder, config, vocab_size=tiny_run.VOCABULARY, eos_id=EOS, group_size=2)
    return PackedRows(folder)


def loader(folder: Path, groups: list[tuple[TokenSequence, TokenSequence]], *, batch_groups: int = 4) -> PackedLoader:
    """Batches of rows that hold a few groups each."""
    return PackedLoader(packed(folder, groups), batch_rows=batch_groups, seed=3)


def other_model(seed: int, dtype: torch.dtype) -> Decoder:
    """A model of the tiny shape with other weights, far enough from the initial ones for large log-ratios."""
    model = Decoder(tiny_run.SHAPE)
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model.to(dtype)


def reference_model(dtype: torch.dtype, world: World | None = None, *, sharded: bool = False) -> FrozenModel:
    """The frozen reference of the tiny runs."""
    return FrozenModel(other_model(5, dtype), world or single(), sharded=sharded)


def answer_log_probs(model: Decoder, sequence: TokenSequence) -> Tensor:
    """log p of each token of the answer, from a forward pass on this sequence alone with all logits."""
    assert sequence.mask is not None
    ids_1T = torch.from_numpy(np.asarray(sequence.ids))[None]
    positions_1T, segments_1T = torch.arange(ids_1T.shape[1])[None], torch.zeros_like(ids_1T, dtype=torch.int32)
    hidden_1TD = model(ids_1T, positions_1T, packed_attend(segments_1T, model.config.windows))
    log_probs_TV = model.logits(hidden_1TD)[0].log_softmax(-1)
    own_T = log_probs_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0]
    return own_T[torch.from_numpy(np.asarray(sequence.mask)[1:]).bool()]
