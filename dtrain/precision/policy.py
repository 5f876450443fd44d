"""Precision as a value: which dtype each parameter, output and reduction has, and the contract that proves it.

A :class:`PrecisionPolicy` is what the user asks for. Resolved on a model it becomes a :class:`Contract`: the dtype of
every replica, printed at the start, stored with each checkpoint, asserted on the live tensors.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dtrain.errors import ConfigError, ContractError, ModelError, nearest

NAMES = ("auto", "fp32", "tf32", "bf16", "fp16")
REDUCE_NAMES = ("auto", "fp32", "bf16", "fp16")
_COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HELD = (torch.float32, torch.bfloat16, torch.float16)  # what an FP32 master holds; all else keeps its dtype, frozen
_NORM_CLASS = re.compile(r"norm(?!al)", re.IGNORECASE)  # RMSNorm, BatchNorm2d, BatchNormAct2d; not NormalNoise
_FP32_CLASSES = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.modules.loss._Loss)


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which numbers a model computes in.

    Attributes:
        name: ``fp32``, ``tf32``, ``bf16`` or ``fp16``; ``auto`` until :meth:`on` has seen the device.
        compute_dtype: of the replicas, of matrix products and of the gradients as they leave backward.
        master_dtype: of the weights the optimizer updates, and of its state and the reduced gradients.
        reduce_dtype: of gradients on the wire, where their replica has the compute dtype; sums are always FP32. None:
            decided by :meth:`reducing`.
        output_dtype: floating outputs of the model that carry no loss of their own are cast to it, so that a loss or
            metric computed outside the model is never low.
        fp32_modules: name patterns (``fnmatch``) of modules kept in FP32 beside norms, softmax and losses.
        tf32: FP32 matrix products may run on TF32 Tensor Cores (10 mantissa bits).
        reason: why ``auto`` chose this.
    """

    name: str
    compute_dtype: torch.dtype
    master_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype = torch.float32
    fp32_modules: tuple[str, ...] = ()
    tf32: bool = False
    reason: str = ""

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
            raise ConfigError(
                f"reduce dtype float16 under compute dtype {self.compute_dtype}: no loss scale keeps these gradients "
                f"in the range of FP16 (6e-8 to 65,504); use bf16 or fp32"
            )

    @staticmethod
    def named(name: str, *, fp32_modules: Iterable[str] = ()) -> PrecisionPolicy:
        """The policy of that name.

        Raises:
            ConfigError: an unknown name.
        """
        if name not in NAMES:
            raise ConfigError(f"unknown precision '{name}'{nearest(name, NAMES)}")
        dtype = _COMPUTE.get(name, torch.float32)
        return PrecisionPolicy(name, dtype, fp32_modules=tuple(fp32_modules), tf32=name == "tf32")

    def on(self, device: torch.device) -> PrecisionPolicy:
        """The policy as ``device`` can honour it; decides ``auto`` and says why.

        Raises:
            ConfigError: TF32 on a device without it.
        """
        if self.name == "auto":
            name, reason = _choose(device)
            return replace(self, name=name, compute_dtype=_COMPUTE[name], reason=reason)
        if self.tf32 and not (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8):
            raise ConfigError(f"precision=tf32 needs an NVIDIA GPU of Ampere or later, this is {device}; use fp32")
        return self

    def reducing(self, name: str, *, leaves_travel: bool) -> PrecisionPolicy:
        """The policy with the dtype of gradients on the wire decided.

        Args:
            name: ``fp32``, ``bf16`` or ``fp16``; ``auto``: what the policy says itself, else the compute dtype for
                leaves, which have it anyway, and FP32 for sums, which would be rounded.
            leaves_travel: the gradients of single micro-batches are sent, not each rank's FP32 sum of them.

        Raises:
            ConfigError: an unknown name, or a dtype that loses what it need not.
        """
        if name not in REDUCE_NAMES:
            raise ConfigError(f"unknown reduce dtype '{name}'{nearest(name, REDUCE_NAMES)}")
        if name == "auto":
            dtype = self.reduce_dtype or (self.compute_dtype if leaves_travel else torch.float32)
        else:
            dtype = _COMPUTE[name]
        if leaves_travel and dtype == torch.bfloat16 and self.compute_dtype == torch.float16:
            raise ConfigError(
                "reduce dtype bfloat16 under compute dtype float16: as many bytes as the FP16 leaves have, and three "
                "bits of each lost; use fp16 or fp32"
            )
        return replace(self, reduce_dtype=dtype)

    def wire_dtype(self, replica_dtype: torch.dtype) -> torch.dtype:
        """Of the gradients of parameters whose replica has ``replica_dtype``: FP32 islands stay FP32."""
        if self.reduce_dtype is not None and replica_dtype == self.compute_dtype:
            return self.reduce_dtype
        return torch.float32

    @property
    def is_low(self) -> bool:
        """Whether the compute dtype is narrower than FP32."""
        return self.compute_dtype != torch.float32

    def resolve(self, model: nn.Module, weights: str = "policy") -> Contract:
        """The contract of ``model`` under this policy.

        Args:
            model: with its names and dtypes.
            weights: how an engine holds what the model computes with: ``policy``, FP32 modules in FP32 and the rest in
                the compute dtype; ``fp32``, all in FP32, cast in each forward; ``compute``, all in the compute dtype,
                also those of FP32 modules, which compute on FP32 copies.

        Raises:
            ConfigError: a pattern of ``fp32_modules`` matches no module.
        """
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for pattern in self.fp32_modules:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(f"fp32_modules pattern '{pattern}' matches no module{nearest(pattern, names[1:])}")
        fp32_modules = tuple(
            name
            for name, module in model.named_modules(remove_duplicate=False)
            if is_fp32_class(module) or any(fnmatch.fnmatch(name, pattern) for pattern in self.fp32_modules)
        )
        inside = tuple(f"{name}." if name else "" for name in fp32_modules)
        protected = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name.startswith(inside)}
        if weights == "fp32":
            protected = {id(p) for p in model.parameters()}
        elif weights == "compute":
            protected = set()
        dtypes = {
            name: (torch.float32 if id(p) in protected else self.compute_dtype) if p.dtype in _HELD else p.dtype
            for name, p in model.named_parameters()
        }
        return Contract(self, fp32_modules, dtypes, weights)


def is_fp32_class(module: nn.Module) -> bool:
    """Whether the class alone keeps a module in FP32: norms (by class name), softmax and losses.

    A norm whose children have parameters is a block round a norm, such as ``PreNorm``: its children decide.
    """
    if isinstance(module, _FP32_CLASSES):
        return True
    is_block = any(True for child in module.children() for _ in child.parameters())
    return not is_block and bool(_NORM_CLASS.search(type(module).__name__))


def _choose(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bf16", f"{name} (compute capability {major}.{minor}) has BF16 Tensor Cores"
        return "fp16", f"{name} (compute capability {major}.{minor}) has no BF16 Tensor Cores; FP16 with loss scaling"
    if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return "bf16", "this CPU multiplies BF16 matrices in hardware"
    return "fp32", "this CPU has no BF16 matrix instructions"


@dataclass(frozen=True)
class Contract:
    """Which dtype every parameter's replica has, and all else that a checkpoint or a reader needs to know.

    Attributes:
        policy: that it follows from.
        fp32_modules: names of the modules that compute in FP32.
        replica_dtypes: of the weights as the model's forward finds them, by parameter.
        weights: how they are held, see :meth:`PrecisionPolicy.resolve`.
    """

    policy: PrecisionPolicy
    fp32_modules: tuple[str, ...]
    replica_dtypes: Mapping[str, torch.dtype]
    weights: str = "policy"

    def describe(self) -> list[str]:
        """Lines for people."""
        policy = self.policy
        counts = Counter(self.replica_dtypes.values())
        computed = [
            f"{counts.pop(dtype, 0)} in {short(dtype)}"
            for dtype in dict.fromkeys((policy.compute_dtype, torch.float32))
        ]
        computed += [f"{count} frozen in {short(dtype)}" for dtype, count in counts.items()]
        verb = "computed" if self.weights == "policy" else "held"
        lines = [
            f"precision {policy.name}: master {short(policy.master_dtype)}, compute {short(policy.compute_dtype)}, "
            f"gradients travel in {short(policy.reduce_dtype)}, summed in fp32, output {short(policy.output_dtype)}, "
            f"moments fp32",
            f"parameters {verb}: {', '.join(computed)} ({len(self.fp32_modules)} modules compute in fp32)",
        ]
        return [f"precision auto: {policy.name}, because {policy.reason}", *lines] if policy.reason else lines

    def to_dict(self) -> dict[str, Any]:
        """Plain values for ``config.yaml``, manifests and comparison between ranks."""
        policy = self.policy
        return {
            "precision": policy.name,
            "master": short(policy.master_dtype),
            "compute": short(policy.compute_dtype),
            "accumulate": "fp32",
            "reduce": short(policy.reduce_dtype),
            "output": short(policy.output_dtype),
            "optimizer_state": "fp32",
            "weights": self.weights,
            "tf32": policy.tf32,
            "fp32_modules": list(self.fp32_modules),
            "replicas": {name: short(dtype) for name, dtype in self.replica_dtypes.items()},
        }

    def check_parameters(self, model: nn.Module) -> None:
        """Asserts the dtype of every live replica.

        Raises:
            ContractError: naming the first parameter whose dtype is another one.
        """
        for name, parameter in model.named_parameters():
            want = self.replica_dtypes[name]
            if parameter.dtype != want:
                raise ContractError(
                    f"the compute replica of '{name}' is {parameter.dtype}, the contract says {want}; "
                    f"do not call .to(), .half() or .float() on a model after dtrain.initialize"
                )


def short(dtype: torch.dtype | None) -> str:
    """The name that configurations use: ``fp32``, ``bf16``, ``fp16``."""
    names: dict[torch.dtype | None, str] = {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        None: "auto",
    }
    return names.get(dtype, str(dtype).removeprefix("torch."))


def check_trainable(model: nn.Module) -> None:
    """Refuses parameters that no FP32 master can stand for.

    Raises:
        ModelError: naming the parameter: on ``meta``, lazy, float64 or complex, or no trainable parameter at all; or
            naming what is expanded, parameter or buffer: its elements share memory, so none can be written alone.
    """
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
        if p.dtype not in _HELD:
            raise ModelError(f"'{name}' is {p.dtype}; an FP32 master can hold float32, bfloat16 and float16 only")
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient; nothing to train")
