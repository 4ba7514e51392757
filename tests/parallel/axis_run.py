"""Parts of a model on the ranks of one axis, compared by tests with what one process computes.

axis_run.py FOLDER: rank r leaves FOLDER/rank<r>.safetensors, whose keys name a check and a result of it, as in
"sp/gradient/norm.weight". `of_all_ranks` starts it.
"""

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ContextAttention, ParallelConfig
from modelwright.parallel.context import attention_of
from modelwright.parallel.grad_norm import like_parameter
from modelwright.parallel.mesh import Mesh, World, join_world, lay_out
from modelwright.parallel.tensor import shard_layers
from rank_processes import run_ranks
from tiny_decoder import make_decoder

RANKS = 3
ROW_LEN = 36
VOCABULARY = 68
"""Not a multiple of the ranks."""
CHUNK = 7
Results = dict[str, Tensor]


def model(*, tied: bool = True, num_kv_heads: int = 3) -> Decoder:
    """Six query heads for three ranks; in float64, so that a wrong gradient cannot hide."""
    return make_decoder(
        num_heads=6, num_kv_heads=num_kv_heads, vocab_size=VOCABULARY, tie_embeddings=tied
    ).double()  # fmt: skip


def rows() -> TokenBatch:
    """Two rows of documents of several lengths, one of them with padding; about a quarter of the labels ignored."""
    generator = torch.Generator().manual_seed(5)
    segments = torch.zeros(2, ROW_LEN, dtype=torch.int32)
    segments[0, 11:], segments[1, 3:], segments[1, 30:] = 1, 1, -1
    starts = torch.zeros(2, ROW_LEN, dtype=torch.int64)
    starts[0, 11:], starts[1, 3:], starts[1, 30:] = 11, 3, 30
    labels = torch.randint(VOCABULARY, (2, ROW_LEN), generator=generator)
    labels[torch.rand(2, ROW_LEN, generator=generator) < 0.25] = IGNORED
    return TokenBatch(
        input_ids_BT=torch.randint(VOCABULARY, (2, ROW_LEN), generator=generator),
        labels_BT=labels,
        positions_BT=torch.arange(ROW_LEN) - starts,
        segments_BT=segments,
    )


def hidden_states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, ROW_LEN, 32, generator=torch.Generator().manual_seed(6)).to(dtype)


def forward_backward(model: Decoder) -> Results:
    """Output, loss and gradients of two microbatches, of which the second one adds to the first one's gradients."""
    results: Results = {}
    for batch in rows().split(2):
        output = model(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT))
        loss = whole_loss(model, output, batch.labels_BT)
        loss.backward()
        results |= {"output": output.detach(), "loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = like_parameter(parameter.grad, parameter)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        results[f"gradient/{name}"] = whole.contiguous()
    return results


def whole_loss(model: Decoder, output: Tensor, labels: Tensor) -> Tensor:
    """A term of the logits and one of the hidden states, both in float64."""
    picked = model.logits(output).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (labels != IGNORED)).sum() + 0.1 * output.square().sum()


def loss_and_gradients(model: Decoder, hidden: Tensor, labels: Tensor) -> Results:
    """The fused loss alone, times a factor, with its gradients in hidden states and head."""
    hidden = hidden.clone().requires_grad_()
    loss = model.cross_entropy(hidden, labels, chunk_tokens=CHUNK)
    (0.37 * loss).backward()
    weight = model.head_weight
    assert weight.grad is not None
    assert hidden.grad is not None
    gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
    return {"loss": loss.detach(), "hidden": hidden.grad, "head": gradient}


def losses(make) -> Results:
    """`loss_and_gradients` in several circumstances; `make` gives a fresh float32 model."""
    labels = rows().labels_BT
    circumstances = {
        "some": (labels, False),
        "all": (labels.clamp(min=0), False),
        "none": (torch.full_like(labels, IGNORED), False),
        "bf16": (labels, True),
    }
    results: Results = {}
    for name, (chosen, is_bf16) in circumstances.items():
        model = make()
        model.ends.head_dtype = torch.bfloat16 if is_bf16 else None
        found = loss_and_gradients(model, hidden_states(), chosen)
        results |= {f"{name}/{key}": value for key, value in found.items()}
    return results


def shard(model: Decoder, mesh: Mesh, *, sequence_parallel: bool = True) -> Decoder:
    assert mesh.devices is not None
    return shard_layers(model, mesh.devices["tensor"], sequence_parallel=sequence_parallel)


def tensor_checks(mesh: Mesh) -> Results:
    results: Results = {}
    found = {
        "sp": forward_backward(shard(model(), mesh)),
        "whole": forward_backward(shard(model(), mesh, sequence_parallel=False)),
        "untied": forward_backward(shard(model(tied=False), mesh)),
        "one_kv": forward_backward(shard(model(num_kv_heads=1), mesh)),
        "one_kv_whole": forward_backward(shard(model(num_kv_heads=1), mesh, sequence_parallel=False)),
        "loss": losses(lambda: shard(model().float(), mesh)),
    }
    for check, values in found.items():
        results |= {f"{check}/{key}": value for key, value in values.items()}
    laid_out = shard(model(tied=False), mesh)
    results |= {f"piece/{name}": p.to_local().contiguous() for name, p in laid_out.named_parameters()}
    return results


def context_checks(context: World) -> Results:
    """One layer's attention on the ranks' own tokens, with gradients."""
    _, part = attention_of(rows(), context)
    results = {"tokens": part.input_ids_BT, "labels": part.labels_BT, "positions": part.positions_BT}
    _, places = attention_of(numbered(), context)
    own = places.input_ids_BT[0]
    results["places"] = own
    for kind in get_args(ContextAttention):
        attend, _ = attention_of(rows(), context, kind)
        inputs = [x[:, own].requires_grad_() for x in queries_keys_values()]
        out = attend(0, *inputs)
        gradients = torch.autograd.grad((out * output_weights()[:, own]).sum(), inputs)
        results[f"{kind}/out"] = out.detach()
        results |= {f"{kind}/{name}": gradient for name, gradient in zip("qkv", gradients, strict=True)}
    return {f"context/{key}": value.contiguous() for key, value in results.items()}


def numbered() -> TokenBatch:
    """Rows whose tokens are their places."""
    places = torch.arange(ROW_LEN).expand(2, -1)
    return TokenBatch(input_ids_BT=places, labels_BT=places, positions_BT=places, segments_BT=rows().segments_BT)


def queries_keys_values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, ROW_LEN, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


def output_weights() -> Tensor:
    return torch.randn(2, ROW_LEN, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


@cache
def of_all_ranks() -> list[Results]:
    """What each of `RANKS` ranks computed; the processes are started once."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(Path(__file__), folder, size=RANKS)
        return [load_file(Path(folder) / f"rank{rank}.safetensors") for rank in range(RANKS)]


def of_check(name: str, rank: int = 0) -> Results:
    found = {key: value for key, value in of_all_ranks()[rank].items() if key.startswith(f"{name}/")}
    return {key.removeprefix(f"{name}/"): value for key, value in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    with join_world(torch.device("cpu")) as world:
        results = tensor_checks(lay_out(world, ParallelConfig(tensor=world.size)))
        results |= context_checks(lay_out(world, ParallelConfig(context=world.size)).context)
        save_file(results, Path(sys.argv[1]) / f"rank{world.rank}.safetensors")


if __name__ == "__main__":
    main()
