"""The precision policy: the dtypes that the user asks for.

Resolved on a model, a ``PrecisionPolicy`` becomes a ``Contract``, which states the format of every module and the dtype
of every compute replica. The contract is printed at the start, stored in each checkpoint, and checked on live tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dtrain.config.fields import check_field, shown
from dtrain.config.precision import Float8, PrecisionConfig, check_rules, float8_rule_error, unsupported_format_reason
from dtrain.errors import ConfigError, ModelError
from dtrain.precision.float8.choice import Float8Decision
from dtrain.precision.float8.options import resolve_float8
from dtrain.precision.hardware import has_bf16_products

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that an FP32 master represents exactly. A frozen parameter of another dtype keeps its dtype."""

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
_COMPUTE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


@dataclass(frozen=True)
class PrecisionPolicy:
    """The formats that a model computes in.

    Attributes:
        name: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``; ``auto`` until ``on`` has seen the device.
        compute_dtype: dtype of compute replicas, matmuls, and gradients as backward produces them.
        master_dtype: dtype of master weights, optimizer state and reduced gradients.
        reduce_dtype: dtype in which ranks send gradients whose replica has the compute dtype. Sums are always FP32.
            None until ``reducing`` decides.
        output_dtype: floating outputs of a model that returns no loss are cast to it, so that a loss or metric
            computed outside the model is not in reduced precision.
        rules: pairs of a name pattern and a format (``fp32``, ``bf16``, ``fp16``, ``fp8``). The last rule that covers a
            module decides (``dtrain.precision.rules``).
        tf32: whether FP32 matmuls may run on TF32 Tensor Cores (10 mantissa bits).
        reason: why ``auto`` chose this format.
        float8: options of FP8 matmuls.
        decisions: FP8 decisions of the run being resumed. Linears without one are decided at the start.
    """

    name: str
    compute_dtype: torch.dtype
    master_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype = torch.float32
    rules: tuple[tuple[str, str], ...] = ()
    tf32: bool = False
    reason: str = ""
    float8: Float8 = field(default_factory=Float8)
    decisions: tuple[Float8Decision, ...] = ()

    def __post_init__(self) -> None:
        if self.master_dtype != torch.float32 or self.output_dtype != torch.float32:
            raise ConfigError(
                f"master and output dtype are FP32 in every policy; got {self.master_dtype} and {self.output_dtype}"
            )
        if self.compute_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"compute dtype must be float32, bfloat16 or float16; got {self.compute_dtype}")
        if self.reduce_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"reduce dtype must be float32, bfloat16 or float16; got {self.reduce_dtype}")
        if self.reduce_dtype == torch.float16 != self.compute_dtype:
            compute = str(self.compute_dtype).removeprefix("torch.")
            raise ConfigError(
                f"reduce dtype float16 under compute dtype {compute}: no loss scale keeps these gradients in the range "
                f"of FP16 (6e-8 to 65,504); use bf16 or fp32"
            )
        check_rules(self.rules)
        if self.uses_float8 and self.name != "auto" and self.compute_dtype != torch.bfloat16:
            raise float8_rule_error(self.name)

    @staticmethod
    def of(value: PrecisionPolicy | str | torch.dtype) -> PrecisionPolicy:
        """Returns what ``initialize(precision=...)`` accepts as a policy: its name, or the dtype that it computes in.

        Raises:
            ConfigError: as ``named``; or a dtype that no policy computes in.
        """
        if isinstance(value, PrecisionPolicy):
            return value
        if isinstance(value, torch.dtype):
            if value not in _NAMES:
                raise ConfigError(
                    f"precision={value} is not one of {', '.join(map(str, _NAMES))}; masters are FP32 in any case"
                )
            value = _NAMES[value]
        if not isinstance(value, str):
            raise ConfigError(
                f"precision={shown(value)} is not a name such as bf16, a torch dtype, or a dtrain.PrecisionPolicy"
            )
        return PrecisionPolicy.named(value)

    @staticmethod
    def named(name: str, *, rules: Mapping[str, str] | None = None, float8: Float8 | None = None) -> PrecisionPolicy:
        """Returns a policy by its name.

        Args:
            name: ``auto``, ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
            rules: format (``fp32``, ``bf16``, ``fp16``, ``fp8``) by name pattern of modules; the last match decides.
            float8: options of FP8 matmuls; None: ``Float8()``.

        Raises:
            ConfigError: the name or a format is unknown, or a rule says ``fp8`` but the compute dtype is not BF16.

        Examples:
            >>> model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
            >>> policy = dtrain.PrecisionPolicy.named("bf16", rules={"head": "fp32"})
            >>> engine = dtrain.initialize(model, precision=policy)
            >>> model["body"].weight.dtype, model["head"].weight.dtype
            (torch.bfloat16, torch.float32)
        """
        try:
            check_field(PrecisionConfig, "name", name, "precision")
        except ConfigError:
            if isinstance(name, str) and (reason := unsupported_format_reason(name)):
                raise ConfigError(f"precision={name}: {reason}") from None
            raise
        rules = check_field(PrecisionConfig, "rules", rules or {}, "rules")
        return PrecisionPolicy(
            name,
            _COMPUTE.get(name, torch.float32),
            rules=tuple(rules.items()),
            tf32=name == "tf32",
            float8=check_field(PrecisionConfig, "float8", float8 or Float8(), "float8"),
        )

    def on(self, device: torch.device) -> PrecisionPolicy:
        """Returns the policy for ``device``, with every ``auto`` resolved, also in the FP8 options.

        Raises:
            ConfigError: the device has no TF32, or no FP8 and ``emulate=False``; or ``auto`` does not become BF16
                although a rule says ``fp8``.
        """
        if self.uses_float8 and (float8 := resolve_float8(self.float8, device)) != self.float8:
            return replace(self, float8=float8).on(device)
        if self.name == "auto":
            name, reason = _choose(device)
            return replace(self, name=name, compute_dtype=_COMPUTE[name], reason=reason)
        if self.tf32 and not (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8):
            raise ConfigError(f"precision=tf32 needs an NVIDIA GPU of Ampere or later, this is {device}; use fp32")
        return self

    def reducing(self, name: str, *, reduces_every_micro_batch: bool) -> PrecisionPolicy:
        """Returns the policy with the dtype decided in which ranks send gradients.

        Args:
            name: ``fp32``, ``bf16``, ``fp16`` or ``auto``. ``auto`` is the policy's own ``reduce_dtype``. If that is
                None, it is the compute dtype for micro-batch gradients and FP32 for sums.
            reduces_every_micro_batch: whether each micro-batch's gradient is sent, instead of the rank's FP32 sum.

        Raises:
            ConfigError: the dtype loses precision without saving bytes.
        """
        # micro-batch gradients have the compute dtype already; a rank's FP32 sums would be rounded
        if name == "auto":
            dtype = self.reduce_dtype or (self.compute_dtype if reduces_every_micro_batch else torch.float32)
        else:
            dtype = _COMPUTE[name]
        if reduces_every_micro_batch and dtype == torch.bfloat16 and self.compute_dtype == torch.float16:
            raise ConfigError(
                "reduce dtype bfloat16 under compute dtype float16: micro-batch gradients are FP16 already, so that "
                "BF16 saves no bytes and loses three bits of each; use fp16 or fp32"
            )
        return replace(self, reduce_dtype=dtype)

    def dtype_during_reduction(self, replica_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which ranks send gradients of ``replica_dtype`` replicas (FP32 for FP32 modules)."""
        if self.reduce_dtype is not None and replica_dtype == self.compute_dtype:
            return self.reduce_dtype
        return torch.float32

    @property
    def uses_float8(self) -> bool:
        """Whether the name or a rule asks for FP8."""
        return self.name == "fp8" or any(name == "fp8" for _, name in self.rules)

    @property
    def is_reduced_precision(self) -> bool:
        """Whether the compute dtype is narrower than FP32."""
        return self.compute_dtype != torch.float32


def _choose(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        if has_bf16_products(device):
            return "bf16", f"{name} (compute capability {major}.{minor}) has BF16 Tensor Cores"
        return "fp16", f"{name} (compute capability {major}.{minor}) has no BF16 Tensor Cores; FP16 with loss scaling"
    if has_bf16_products(device):
        return "bf16", "this CPU multiplies BF16 matrices in hardware"
    return "fp32", "this CPU has no BF16 matrix instructions"


def check_trainable(model: nn.Module) -> None:
    """Checks that an FP32 master can represent every trainable parameter.

    Raises:
        ModelError: a parameter is on ``meta``, lazy, float64 or complex, or its module gives it sparse gradients; a
            parameter or buffer is sparse, or expanded, so that its elements share memory; or nothing is trainable. The
            message names the tensor.
    """
    for name, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise _sparse_gradient(f"'{name}.weight'" if name else "'weight'", "its module has sparse=True")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout != torch.strided:
            raise ModelError(
                f"'{name}' has the layout {tensor.layout}; an engine broadcasts and stores dense tensors only: use its "
                f".to_dense(), or keep a constant as a plain attribute of a list, outside of parameters and buffers"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not nn.parameter.is_lazy(tensor) and any(
            s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise ModelError(
                f"'{name}' is an expanded tensor (shape {list(tensor.shape)}, stride {list(tensor.stride())}), whose "
                f"elements share memory; give it values of its own with .contiguous()"
            )
    trainable = 0
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"'{name}' is a lazy parameter without a shape; run one forward before dtrain.initialize")
        if p.is_meta:
            raise ModelError(f"'{name}' is on the meta device and has no values; build the model on CPU or its GPU")
        if not p.requires_grad:
            continue
        trainable += 1
        if p.dtype not in TRAINABLE_DTYPES:
            raise ModelError(f"'{name}' is {p.dtype}; an FP32 master can hold float32, bfloat16 and float16 only")
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient; nothing to train")


def refuse_sparse_gradients(gradients: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raises ``ModelError`` for the first of the ``gradients``, by parameter, that is sparse."""
    for name, grad in gradients:
        if grad is not None and grad.layout != torch.strided:
            raise _sparse_gradient(f"'{name}'", f"the backward gives it one of {grad.layout}")


_SPARSE_FAILS = re.compile(r"between dense and sparse Tensors|'Sparse\w+' backend")
"""What torch says of an operation on a sparse gradient."""


@contextmanager
def sparse_gradients_refused(model: nn.Module) -> Iterator[None]:
    """Context of a backward: raises ``ModelError`` if it fails for a gradient that is sparse."""
    try:
        yield
    except RuntimeError as error:
        try:
            refuse_sparse_gradients((name, p.grad) for name, p in model.named_parameters())
        except ModelError as named:
            raise named from error
        if _SPARSE_FAILS.search(str(error)):  # native and fsdp2 have taken the gradient by now
            raise _sparse_gradient("a parameter", "the backward gives it one") from error
        raise


def _sparse_gradient(name: str, reason: str) -> ModelError:
    return ModelError(
        f"{name} gets a sparse gradient ({reason}); engines add and reduce gradients in flat dense buffers: set "
        f"sparse=False (torch.gather: sparse_grad=False), or freeze it"
    )
