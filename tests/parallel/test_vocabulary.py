"""Loss, logits and embedding over a vocabulary of 68 on three ranks against the whole head."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed import run_distributed
from modelwright.data.rows.batch import IGNORED
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh
from modelwright.parallel.tensor_parallel import own_rows
from parallel.axis_cases import RANKS, ROW_LEN, Results, model, rows, shard
from tolerances import TOLERANCES

CHUNK = 7


def hidden_states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, ROW_LEN, 32, generator=torch.Generator().manual_seed(6)).to(dtype)


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


def log_probs_and_gradients(model: Decoder, hidden: Tensor, labels: Tensor) -> Results:
    """Log-probabilities and entropies of the tokens, with their gradients in hidden states and head."""
    hidden = hidden.clone().requires_grad_()
    log_probs, entropies = model.token_log_probs_and_entropies(hidden, labels, chunk_tokens=CHUNK)
    factors = torch.randn(2, *labels.shape, generator=torch.Generator().manual_seed(7))
    (log_probs * factors[0] + entropies * factors[1]).sum().backward()
    weight = model.head_weight
    assert weight.grad is not None
    assert hidden.grad is not None
    gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
    return {"log_probs": log_probs.detach(), "entropies": entropies.detach(), "hidden": hidden.grad, "head": gradient}


def losses(make: Callable[[], Decoder]) -> Results:
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
    found = log_probs_and_gradients(make(), hidden_states(), labels)
    return results | {f"tokens/{key}": value for key, value in found.items()}


def shared_losses(world: World) -> Results:
    mesh = build_mesh(world, ParallelConfig(tensor=world.size))
    return losses(lambda: shard(model().float(), mesh))


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(shared_losses, RANKS)


@pytest.fixture(scope="module")
def expected():
    return losses(lambda: model().float())


@pytest.mark.parametrize("result", ["loss", "hidden", "head"])
@pytest.mark.parametrize("labels", ["some", "all", "none"])
def test_loss_and_gradients_are_those_of_the_whole_head(expected, ranks, labels, result):
    found = ranks[0][f"{labels}/{result}"]
    torch.testing.assert_close(found, expected[f"{labels}/{result}"], **TOLERANCES["fp32_gradient"])


@pytest.mark.parametrize("result", ["log_probs", "entropies", "hidden", "head"])
def test_log_probs_and_gradients_are_those_of_the_whole_head(expected, ranks, result):
    torch.testing.assert_close(
        ranks[0][f"tokens/{result}"], expected[f"tokens/{result}"], **TOLERANCES["fp32_gradient"]
    )


@pytest.mark.parametrize("result", ["loss", "hidden", "head"])
def test_bf16_products_keep_fp32_sums(expected, ranks, result):
    found = ranks[0][f"bf16/{result}"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected[f"some/{result}"], **TOLERANCES["bf16_gradient"])
    assert not torch.equal(found, expected[f"some/{result}"])


def test_all_ranks_have_the_same_bits(ranks):
    first, *others = ranks
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_no_label_no_loss_and_no_gradient(ranks):
    found = ranks[0]
    assert all(torch.count_nonzero(found[f"none/{result}"]) == 0 for result in ("loss", "hidden", "head"))


@pytest.mark.parametrize(("vocab_size", "num_ranks"), [(68, 3), (8, 2), (7, 4), (5, 4), (1, 2)])
def test_rows_are_cut_as_a_dtensor_cuts_them(vocab_size, num_ranks):
    pieces = torch.arange(vocab_size).chunk(num_ranks)
    for rank in range(num_ranks):
        expected = pieces[rank].tolist() if rank < len(pieces) else []
        assert list(own_rows(vocab_size, num_ranks, rank)) == expected
