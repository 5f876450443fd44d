"""Output layer and cross entropy by chunks of tokens, so that the logits of a batch never exist at once.

The gradients of a chunk are formed with its loss, in the forward, as Liger-Kernel and ``F.linear_cross_entropy`` of
PyTorch 2.13 do: the three products are those of full logits, and backward only multiplies by the incoming gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.config.fields import shown
from dtrain.errors import ModelError, UsageError
from dtrain.precision.forward import autocast_dtype
from dtrain.sharding.layout import round_up
from dtrain.tasks import IGNORE_INDEX

_SHARE = 0.05
"""Share of the memory of full FP32 logits that ``auto`` lets a chunk take."""

_MULTIPLE, _MOST_ROWS = 128, 4096
_NUM_SOFTMAX_PARTS = 8
"""Parts of a chunk whose softmax is computed at a time: an FP32 copy of one part is small, and stays in a cache."""

_NUM_WEIGHT_PARTS, _LEAST_ROWS = 32, 512
"""Parts of the vocabulary that a CPU multiplies at a time, and the least rows of one: its 16-bit products return no
FP32, so that a part is copied."""

_FP16_TOP = 2.0**15
"""Largest power of two in FP16."""

_FP16_LARGEST_LOG_SUM = 2.0**17
"""Bound of the logarithm of the sum of exponentials of FP16 logits, which are at most 65,504."""


def auto_chunk_rows(num_tokens: int, dtype: torch.dtype) -> int:
    """Returns the rows of a chunk of logits that ``auto`` chooses for products in ``dtype``.

    A chunk takes its product (4 or 2 bytes a logit) and at most 1 byte a logit for the FP32 softmax of an eighth of it.
    The rows are the largest multiple of 128 that keep this within 5 % of the FP32 logits of ``num_tokens``: a 25th of
    the tokens with FP32 products, a 15th with 16-bit ones. They are at least 128, because the weight and its gradient
    are read for each chunk, and at most 4,096.
    """
    fitting = int(_SHARE * 4 * num_tokens / (dtype.itemsize + 1))
    return min(max(_MULTIPLE, fitting // _MULTIPLE * _MULTIPLE), _MOST_ROWS)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_rows: int | str = "auto",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the mean cross entropy of ``hidden @ weight.T + bias``, whose logits exist for ``chunk_rows`` rows only.

    Loss and gradients are those of ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` under the
    autocast that is on: products in its dtype, softmax and loss in FP32. The weight's gradient is summed over the
    chunks in FP32. From forward to backward the gradients of ``hidden``, ``weight`` and ``bias`` are held, in FP32 if
    those are FP16, because the loss scale comes only in backward. Without grad mode none is formed.

    Args:
        hidden: [..., H] in FP32, BF16 or FP16.
        weight: [V, H], such as ``self.head.weight``.
        targets: int64 of ``hidden``'s shape without H; -100 does not count.
        bias: [V].
        vocab_size: number of classes; the rows of ``weight`` from there on are padding, and get zero gradients. None:
            all rows.
        chunk_rows: rows at a time; ``auto``: see ``auto_chunk_rows``.
        label_smoothing: as in ``F.cross_entropy``, 0 to 1.
        z_loss: coefficient of the mean squared logarithm of the softmax's denominator (Chowdhery et al., PaLM, 2022).
        dtype: of the products; None: that of autocast, or without autocast of ``hidden`` and ``weight``.

    Returns:
        FP32, 0-dim; 0 if no target counts.

    Raises:
        ModelError: shapes or dtypes do not fit each other.
        UsageError: ``chunk_rows``, ``label_smoothing`` or ``z_loss`` is not permitted; in backward, ``create_graph``
            asks for the graph of the gradients.

    Examples:
        >>> hidden, weight, targets = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
        >>> loss = dtrain.linear_cross_entropy(hidden, weight, targets, chunk_rows=2)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets))
        True
    """
    if chunk_rows != "auto" and (type(chunk_rows) is not int or chunk_rows < 1):
        raise UsageError(f"chunk_rows={shown(chunk_rows)} is neither auto nor a whole number of rows from 1")
    if not (0 <= label_smoothing <= 1 and 0 <= z_loss < math.inf):
        raise UsageError(f"label_smoothing={label_smoothing} must be from 0 to 1, and z_loss={z_loss} at least 0")
    size = weight.shape[0] if vocab_size is None else vocab_size
    _check_shapes(hidden, weight, targets, bias, size)
    dtype = dtype or _product_dtype(hidden, weight)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if chunk_rows == "auto":
        chunk_rows = auto_chunk_rows(len(rows), dtype)
    options = _Options(dtype, size, int(chunk_rows), label_smoothing, z_loss)
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, targets.reshape(-1), options, torch.is_grad_enabled())
    return loss


# what torch.compiler.disable sets, without its import of dynamo: a compiler would unroll the chunks into one graph
vars(linear_cross_entropy)["_torchdynamo_disable"] = True


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, size: int) -> None:
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise ModelError(
            f"hidden is {list(hidden.shape)} and the weight {list(weight.shape)}; expected [..., H] and [V, H]"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ModelError(
            f"targets are {targets.dtype} {list(targets.shape)}; expected torch.int64 {list(hidden.shape[:-1])}, the "
            f"shape of hidden without its last dimension"
        )
    if not 1 <= size <= len(weight):
        raise ModelError(f"vocab_size={size} must be from 1 to {len(weight)}, the rows of the weight")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"the bias is {list(bias.shape)}; expected [{len(weight)}], the rows of the weight")


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(hidden.device.type):
        return autocast_dtype(hidden.device.type)
    if hidden.dtype != weight.dtype:
        raise ModelError(f"hidden is {hidden.dtype} and the weight {weight.dtype}; cast one of them, or give dtype=")
    return hidden.dtype


@dataclass(frozen=True)
class _Options:
    """Arguments of ``linear_cross_entropy``; ``dtype`` is that of the products."""

    dtype: torch.dtype
    vocab_size: int
    chunk_rows: int
    label_smoothing: float
    z_loss: float

    @property
    def scale(self) -> float:
        """Power of two by which gradients of FP16 logits are multiplied before they are rounded to FP16.

        Otherwise small ones would vanish, because the loss scale comes only in backward. It is as large as a gradient
        of at most 1 + 2 z_loss x log-sum permits, so no loss scale under which full logits do not overflow keeps more.
        """
        if self.dtype != torch.float16:
            return 1.0
        return _FP16_TOP / 2.0 ** math.ceil(math.log2(1 + 2 * self.z_loss * _FP16_LARGEST_LOG_SUM))


class _LinearCrossEntropy(torch.autograd.Function):
    """Maps ``rows`` [N, H], ``weight`` [V, H], ``bias`` [V] or None and ``targets`` [N] to the FP32 loss."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: _Options,
        grad_enabled: bool,
    ) -> Tensor:
        inputs = (rows, weight, bias)
        needed = [grad_enabled and needs for needs in ctx.needs_input_grad[:3]]
        with torch.autocast(rows.device.type, enabled=False):
            loss, factor, gradients = _run_chunks(rows, weight, bias, targets, options, needed)
        ctx.needed = needed
        ctx.dtypes = [value.dtype for value, needs in zip(inputs, needed, strict=True) if value is not None and needs]
        ctx.save_for_backward(factor, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # `once_differentiable` would return gradients without a graph, silently
            raise UsageError(
                "create_graph=True reaches linear_cross_entropy, whose gradients are formed in the forward and have no "
                "graph; compute this loss from full logits (model.loss_chunk=none)"
            )
        factor, *stored = ctx.saved_tensors
        factor = grad * factor
        # in place unless the graph is kept for another backward, because the gradient of the weight is large
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled = [value * factor if keeps_graph else value.mul_(factor) for value in stored]
        cast = iter([value.to(dtype) for value, dtype in zip(scaled, ctx.dtypes, strict=True)])
        return *(next(cast) if needs else None for needs in ctx.needed), None, None, None


def _run_chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options, needed: list[bool]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the loss, a factor, and the gradients of the inputs that need one, which the factor is to multiply."""
    dtype, scale, device = options.dtype, options.scale, rows.device
    counted = targets != IGNORE_INDEX
    targets = targets.where(counted, 0)
    count = counted.sum().clamp(min=1).float()  # stays on the device, for which the host does not wait
    coefficient = counted.float() * (1 / count if scale == 1 else scale)
    grad_rows = torch.zeros_like(rows, dtype=_stored_dtype(rows)) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None
    product_weight = weight.to(dtype)
    total = torch.zeros((), device=device)
    for start in range(0, len(rows), options.chunk_rows):
        own = slice(start, start + options.chunk_rows)
        # zeros for a token that does not count, because its gradient of 0 times Inf would be NaN
        chunk = rows[own].where(counted[own, None], 0).to(dtype)
        logits = chunk @ product_weight.t() if bias is None else torch.addmm(bias.to(dtype), chunk, product_weight.t())
        total += _cross_entropy(logits, targets[own], counted[own], coefficient[own], options, needs_grad=any(needed))
        if grad_rows is not None:
            _add_rows_gradient(grad_rows[own], logits, product_weight)
        if grad_weight is not None:
            _add_weight_gradient(grad_weight, logits, chunk)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=torch.float32)
        del logits  # before the next chunk's are allocated
    if grad_weight is not None:
        grad_weight = grad_weight.to(_stored_dtype(weight))
    factor = torch.ones_like(count) if scale == 1 else 1 / (count * scale)
    return total / count, factor, [grad for grad in (grad_rows, grad_weight, grad_bias) if grad is not None]


def _stored_dtype(value: Tensor) -> torch.dtype:
    """Returns the dtype of the gradient of ``value`` until backward."""
    return torch.float32 if value.dtype == torch.float16 else value.dtype


def _cross_entropy(
    logits: Tensor, targets: Tensor, counted: Tensor, coefficient: Tensor, options: _Options, *, needs_grad: bool
) -> Tensor:
    """Returns the sum of the losses that count; overwrites ``logits`` [rows, V] by their gradients, if needed.

    ``coefficient`` [rows] multiplies the gradients.
    """
    size, smoothing, z_loss = options.vocab_size, options.label_smoothing, options.z_loss
    total = torch.zeros((), device=logits.device)
    for part in _parts(len(logits), _NUM_SOFTMAX_PARTS):
        values, index = logits[part, :size], targets[part, None]
        largest = values.amax(1, keepdim=True).float()
        at_target = values.gather(1, index).float()
        softmax = torch.softmax(values, 1, dtype=torch.float32)
        # the largest element is 1 / sum(exp(logit - largest)), and the softmax is one pass over the logits
        log_denominator = -softmax.amax(1, keepdim=True).log()
        losses = largest - at_target + log_denominator
        log_sum = largest + log_denominator
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (
                log_sum - values.mean(1, keepdim=True, dtype=torch.float32)
            )
        if z_loss:
            losses = losses + z_loss * log_sum.square()
        total += losses.squeeze(1).where(counted[part], 0).sum()
        if needs_grad:
            if z_loss:
                softmax *= 1 + 2 * z_loss * log_sum
            softmax.scatter_add_(1, index, torch.full_like(at_target, smoothing - 1))
            if smoothing:
                softmax -= smoothing / size
            torch.mul(softmax, coefficient[part, None], out=values)
        del softmax  # before the next part's is allocated
    if needs_grad:
        logits[:, size:] = 0
    return total


def _add_rows_gradient(grad: Tensor, logits: Tensor, weight: Tensor) -> None:
    """Adds ``logits`` @ ``weight`` to ``grad`` [rows, H], which holds zeros."""
    if grad.dtype != torch.float32:
        grad.copy_(logits @ weight)
        return
    is_widened = logits.dtype == torch.float16 and logits.device.type == "cpu"
    for part in _parts(len(weight), _NUM_WEIGHT_PARTS if is_widened else 1, _LEAST_ROWS):
        _add_product(grad, logits[:, part], weight[part])


def _add_weight_gradient(grad: Tensor, logits: Tensor, chunk: Tensor) -> None:
    """Adds the transposed ``logits`` @ ``chunk`` to FP32 ``grad`` [V, H]."""
    is_copied = logits.dtype != torch.float32 and logits.device.type == "cpu"
    for part in _parts(len(grad), _NUM_WEIGHT_PARTS if is_copied else 1, _LEAST_ROWS):
        _add_product(grad[part], logits[:, part].t(), chunk)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left`` @ ``right`` to FP32 ``out``."""
    if left.dtype == torch.float32:
        out.addmm_(left, right)
    elif left.device.type == "cuda":
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    elif left.dtype == torch.float16:  # scaled sums would leave the range of FP16, in which a CPU returns its products
        out.addmm_(left.float(), right.float())
    else:
        out += (left @ right).float()


def _parts(length: int, count: int, least: int = 1) -> Iterator[slice]:
    """Yields at most ``count`` slices that cover ``length`` elements, each of a multiple of ``least`` but the last."""
    step = max(1, round_up(-(-length // count), least))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
