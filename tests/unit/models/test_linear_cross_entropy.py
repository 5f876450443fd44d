"""The loss by chunks against full logits, PyTorch's own function, and FP16's range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dtrain
from dtrain.device import TensorBytes
from dtrain.errors import ModelError, UsageError
from dtrain.models.causal_lm import causal_lm_output
from dtrain.models.linear_cross_entropy import auto_chunk_rows, linear_cross_entropy
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.host_reads import forbidden
from tests.helpers.oracle import normwise_error

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LARGEST_SCALE = 2.0**16


def inputs(
    num_tokens: int = 37, rows: int = 72, hidden_dim: int = 16, *, vocab_size: int = 70, dtype: torch.dtype = FP32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias with gradients, and targets of which a third does not count."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    targets[::3] = IGNORE_INDEX
    return draw(num_tokens, hidden_dim), draw(rows, hidden_dim), draw(rows), targets


def full(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, size: int, **terms: float) -> Tensor:
    logits = F.linear(hidden, weight, bias)[None, :, :size]
    loss = causal_lm_output(logits, targets[None], **terms).loss
    assert loss is not None
    return loss


def gradients(loss: Tensor, of: Sequence[Tensor | None], scale: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(loss * scale, [value for value in of if value is not None]))


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(0, 9)),
    chunk_rows=st.integers(1, 50),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    has_bias=st.booleans(),
    all_ignored=st.booleans(),
)
def test_loss_and_gradients_are_those_of_full_logits(
    sizes: tuple[int, int, int], chunk_rows: int, smoothing: float, z_loss: float, has_bias: bool, all_ignored: bool
) -> None:
    num_tokens, vocab_size, padding = sizes
    hidden, weight, bias, targets = inputs(num_tokens, vocab_size + padding, vocab_size=vocab_size)
    if all_ignored:
        targets.fill_(IGNORE_INDEX)
    given_bias = bias if has_bias else None
    terms = {"label_smoothing": smoothing, "z_loss": z_loss}
    want = full(hidden, weight, given_bias, targets, vocab_size, **terms)
    got = linear_cross_entropy(
        hidden, weight, targets, bias=given_bias, vocab_size=vocab_size, chunk_rows=chunk_rows, **terms
    )
    assert (got.dtype, got.shape) == (FP32, ())
    # all terms are positive; a loss near 0 is a difference of logits
    assert abs(got - want).item() <= 1e-6 * max(1.0, want.item())
    of = (hidden, weight, given_bias)
    for own, other in zip(gradients(got, of), gradients(want, of), strict=True):
        assert (own - other).norm() <= 1e-6 * max(float(other.norm()), 0.1), "near 0 probabilities cancel"
    _, *of_weight = gradients(linear_cross_entropy(hidden, weight, targets, vocab_size=vocab_size), (hidden, weight))
    assert not of_weight[0][vocab_size:].any(), "padding has no gradient"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_16_bit_products_agree_with_full_logits_as_well_as_their_rounding_permits(
    dtype: torch.dtype, terms: dict[str, float]
) -> None:
    hidden, weight, bias, targets = inputs(dtype=dtype)
    want, got = (
        full(hidden, weight, bias, targets, 70, **terms),
        linear_cross_entropy(hidden, weight, targets, bias=bias, vocab_size=70, chunk_rows=16, **terms),
    )
    # the product is the same, to the bit, so only the FP32 part may differ
    assert abs(got - want).item() <= 1e-6 * want.item()
    scale = 1.0 if dtype == BF16 else LARGEST_SCALE
    of = (hidden, weight, bias)
    exact = [value.detach().float().requires_grad_() for value in of]
    reference = gradients(full(exact[0], exact[1], exact[2], targets, 70, **terms), exact, scale)
    ours, theirs = gradients(got, of, scale), gradients(want, of, scale)
    for own, other, true in zip(ours, theirs, reference, strict=True):
        assert own.dtype == dtype
        assert normwise_error(own, true) <= 1.5 * normwise_error(other, true) + torch.finfo(dtype).eps / 8


def test_products_run_in_the_dtype_of_autocast_and_gradients_come_in_that_of_their_input() -> None:
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", dtype=BF16):
        want = full(hidden, weight, None, targets, 70)
        got = linear_cross_entropy(hidden, weight, targets, vocab_size=70, chunk_rows=16)
        with dtrain.full_precision():
            region = linear_cross_entropy(hidden, weight, targets, vocab_size=70, chunk_rows=16)
    assert abs(got - want).item() <= 1e-6 * want.item()
    assert region.item() == pytest.approx(full(hidden, weight, None, targets, 70).item(), rel=1e-6)
    assert region.item() != pytest.approx(got.item(), rel=1e-6)
    assert {value.dtype for value in gradients(got, (hidden, weight))} == {FP32}


def test_tiny_fp16_gradients_survive_until_they_are_multiplied_by_the_loss_scale() -> None:
    """A confident model: many gradients are below 2^-25, which FP16 rounds to 0, and only a scale keeps them."""
    hidden, weight, _, targets = inputs(8, 70, dtype=FP16)
    targets = (hidden @ weight.t()).argmax(-1).detach()
    with torch.no_grad():
        hidden *= 4.0
    exact = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    (_, true) = gradients(F.cross_entropy(exact[0] @ exact[1].t(), targets), exact, LARGEST_SCALE)
    (_, own) = gradients(linear_cross_entropy(hidden, weight, targets, chunk_rows=3), (hidden, weight), LARGEST_SCALE)
    unscaled, scaled = (
        gradients(full(hidden, weight, None, targets, 70), (hidden, weight), scale)[1] for scale in (1, LARGEST_SCALE)
    )
    tiny = true.abs() < 2.0**-25 * LARGEST_SCALE
    assert tiny.float().mean() > 0.1
    lost = [int((values[tiny] == 0).sum()) for values in (own, scaled, unscaled)]
    assert lost[0] <= lost[1] < 0.3 * tiny.sum()
    assert lost[2] > 0.9 * tiny.sum(), "without the scale they are lost"
    errors = [normwise_error(values[tiny], true[tiny].float()) for values in (own, scaled)]
    assert errors[0] <= 1.1 * errors[1] < 0.01


@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 10.0])
def test_fp16_overflows_exactly_if_the_scaled_gradient_does(z_loss: float) -> None:
    hidden, weight, _, targets = inputs(dtype=FP16)
    targets[0] = 0  # an own loss for one token: its gradients have the size of the weights
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size=70, z_loss=z_loss)
    largest = max(float(grad.abs().max()) for grad in torch.autograd.grad(loss, (hidden, weight), retain_graph=True))
    below, above = 30000 / largest, 140000 / largest
    kept = torch.autograd.grad(loss * below, (hidden, weight), retain_graph=True)
    assert all(grad.isfinite().all() for grad in kept)
    lost = torch.autograd.grad(loss * above, (hidden, weight))
    assert not all(grad.isfinite().all() for grad in lost)
    assert not any(grad.isnan().any() for grad in lost)
    with torch.no_grad():
        hidden[1] = 60000.0  # Inf logits
    assert not linear_cross_entropy(hidden, weight, targets).isfinite()


def test_a_token_that_does_not_count_reaches_nothing_and_the_host_reads_nothing() -> None:
    hidden, weight, _, targets = inputs()
    with forbidden():
        linear_cross_entropy(hidden, weight, targets, chunk_rows=8, label_smoothing=0.1, z_loss=1e-3).backward()
    want = gradients(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    with torch.no_grad():
        hidden[targets == IGNORE_INDEX] = torch.nan
    loss = linear_cross_entropy(hidden, weight, targets)
    assert all(map(torch.equal, gradients(loss, (hidden, weight)), want))


def test_only_needed_gradients_are_formed_and_a_kept_graph_gives_them_again() -> None:
    hidden, weight, _, targets = inputs(rows=720)
    with TensorBytes(weight.device) as taken, torch.no_grad():
        linear_cross_entropy(hidden, weight, targets, chunk_rows=4)
    assert taken.peak < 0.5 * weight.nbytes, "no gradient without grad mode"
    (only,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets), (weight,))
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert torch.equal(only, second[1])
    assert all(map(torch.equal, first, (3 * value for value in second)))
    with pytest.raises(UsageError, match="create_graph=True reaches linear_cross_entropy"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (weight,), create_graph=True)


def test_temporaries_are_a_twentieth_of_full_fp32_logits() -> None:
    """At 4,096 tokens, the share does not depend on the vocabulary; both gradients are counted apart."""
    hidden, weight, _, targets = inputs(4096, 4096, 64)
    with TensorBytes(weight.device) as forward:
        loss = linear_cross_entropy(hidden, weight, targets)
    summed = 4 * weight.numel()  # the FP32 sums of the weight's gradient
    assert forward.peak - hidden.nbytes - summed <= 0.05 * 4 * 4096 * 4096
    assert abs(forward.kept - hidden.nbytes - weight.nbytes) < 100, "between forward and backward: the two gradients"
    with TensorBytes(weight.device) as backward:
        loss.backward()
    assert forward.kept + backward.peak <= forward.peak, "backward takes no more"


def test_auto_rows() -> None:
    assert [auto_chunk_rows(n, FP32) for n in (1, 4096, 8192, 10**6)] == [128, 128, 256, 4096]
    assert [auto_chunk_rows(n, BF16) for n in (1, 4096, 8192, 10**6)] == [128, 256, 512, 4096]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"chunk_rows": "all"}, UsageError, "chunk_rows=all"),
        ({"z_loss": -1.0}, UsageError, "z_loss=-1.0"),
        ({"vocab_size": 73}, ModelError, "vocab_size=73 must be from 1 to 72"),
        ({"bias": torch.zeros(3)}, ModelError, r"the bias is \[3\]; expected \[72\]"),
        ({"weight": torch.zeros(72, 16, dtype=BF16)}, ModelError, "float32 and the weight torch.bfloat16; cast one"),
        ({"targets": torch.zeros(36, dtype=torch.int64)}, ModelError, r"expected torch.int64 \[37\]"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "targets": targets} | changes))
