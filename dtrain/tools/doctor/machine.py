"""Tables of this machine: software, devices, dtypes and their speed, launchers, trackers. Nothing is sent anywhere."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtrain.device import cublaslt_version, describe_cudnn, elapsed_ms, loaded_library
from dtrain.models.attention import attention_kernel
from dtrain.models.flash_attention import flash_attention_3_problem
from dtrain.precision.hardware import has_compiler, triton_problem
from dtrain.precision.policy import PrecisionPolicy
from dtrain.telemetry.gpu import describe_state
from dtrain.telemetry.host import describe_host, memory_left
from dtrain.telemetry.trackers import wandb_mode
from dtrain.tools.tables import Table
from dtrain.version import package_version, version

_PACKAGES = {
    "numpy": "data",
    "safetensors": "checkpoints",
    "blake3": "hashes of checkpoints; else SHA-256",
    "hydra-core": "configuration",
    "wandb": "tracker=wandb",
    "tensorboard": "tracker=tensorboard",
    "deepspeed": "engine=deepspeed",
    "ninja": "kernels that DeepSpeed compiles",
    "triton": "kernels on a GPU",
    "accelerate": "a peer of `dtrain bench engine`",
}
_LAUNCHERS = {"torchrun": "torch", "deepspeed": "DeepSpeed", "srun": "SLURM"}
_INSTRUCTIONS = {
    "AVX-512": "_is_avx512_supported",
    "BF16 (AVX-512)": "_is_avx512_bf16_supported",
    "BF16 (AMX)": "_is_amx_tile_supported",
    "FP16 (AMX)": "_is_amx_fp16_supported",
}
_SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
_HEADS, _HEAD_DIM = 16, 128  # of the attention whose kernel is shown
_BLOCKWISE = (12, 9)  # first cuBLASLt with FP8 products that have one scale for each block
_BUDGET_S = 0.4  # for the products of one size; the next size has eight times the operations
_REPEATS = 7


def machine_tables() -> list[Table]:
    """Returns all tables; takes about five seconds, mostly for matrix products."""
    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
    return [
        Table("Software", ("package", "version", "for"), _software()),
        Table("Machine", ("", "here"), _machine()),
        Table("Ranks", ("", "here", "for"), _ranks()),
        *(_speed_table(device) for device in devices),
    ]


def _software() -> list[tuple[str, str, str]]:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    rows = [
        ("dtrain", version(), ""),
        ("python", platform.python_version(), platform.platform(terse=True)),
        ("torch", str(torch.__version__), cuda),
    ]
    for name, purpose in _PACKAGES.items():
        number = package_version(name) or "not installed"
        problem = triton_problem(number) if name == "triton" else None
        rows.append((name, number, f"{purpose}; {number} {problem}" if problem else purpose))
    return rows


def _machine() -> list[tuple[str, str]]:
    host = describe_host()
    disk = shutil.disk_usage(Path.cwd())
    instructions = [name for name, probe in _INSTRUCTIONS.items() if getattr(torch.cpu, probe, bool)()]
    return [
        ("CPU", f"{host.cpu}, {host.cores} cores for this process"),
        ("matrix instructions", ", ".join(instructions) or "none known to PyTorch"),
        ("memory", f"{host.memory_gib:g} GiB, {memory_left() * host.memory_gib:.1f} GiB free"),
        ("disk of this folder", f"{disk.free / 2**30:.1f} GiB free"),
        ("compiler", _compiler("cpu")),
        *(_gpus() if torch.cuda.is_available() else [("GPU", "none visible to PyTorch")]),
        ("tracker=wandb", _wandb()),
    ]


def _gpus() -> list[tuple[str, str]]:
    rows = []
    for index in range(torch.cuda.device_count()):
        state = describe_state(index)
        rows += [
            (f"GPU {index}", _gpu(index)),
            (f"GPU {index} power and clocks", "; WARNING: ".join(filter(None, [state.summary(), state.problem]))),
            (f"GPU {index} MIG mode", (state.mig or "none, or unknown").lower()),
        ]
    capability = torch.cuda.get_device_capability(0)
    cudnn, problems = describe_cudnn(capability)
    missing = flash_attention_3_problem(capability)
    return [
        *rows,
        ("GPU driver", _driver()),
        ("cuDNN", "; WARNING: ".join([cudnn, *problems])),
        ("cublasLt", _cublaslt()),
        (f"attention of {_HEADS} heads of {_HEAD_DIM}", _attention()),
        ("attention, `reproducible=true`", f"not FlashAttention 3: {missing}" if missing else "FlashAttention 3"),
        ("compiler for GPUs", _compiler("cuda")),
    ]


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, compute capability "
        f"{properties.major}.{properties.minor}"
    )


def _compiler(device_type: str) -> str:
    if has_compiler(torch.device(device_type)):
        return "found"
    missing = "a C++ compiler" if device_type == "cpu" else "Triton, a C compiler"
    return f"{missing} or Python's headers are missing: nothing can be compiled"


def _driver() -> str:
    """Returns the version of the kernel module, which decides whether the CUDA of PyTorch can run."""
    file = Path("/proc/driver/nvidia/version")  # the driver's own tool may not be installed in a container
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", file.read_text(encoding="utf-8")) if file.exists() else None
    return found.group() if found else "unknown version"


def _cublaslt() -> str:
    number = cublaslt_version()
    if number is None:
        return "unknown version"
    is_old = tuple(map(int, number.split("."))) < _BLOCKWISE
    fix = "install the wheel of CUDA 13.0 (cu130)"
    needs = f"; FP8 products with blockwise scales need 12.9: {fix}" if is_old else ""
    return f"{number}, {loaded_library('libcublasLt.so')}{needs}"


def _attention() -> str:
    """Returns the kernels of a model with as many key heads as query heads, and of one with fewer."""
    shape = {"batch": 1, "heads": _HEADS, "seq_len": 2048, "head_dim": _HEAD_DIM}
    device = torch.device("cuda", 0)
    equal, grouped = (attention_kernel(device, torch.bfloat16, kv_heads=count, **shape) for count in (_HEADS, 4))
    return f"{equal}; with 4 key heads: {grouped} (BF16, causal, 2,048 tokens)"


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "no"


def _wandb() -> str:
    if package_version("wandb") is None:
        return "not installed: pip install wandb"
    modes = {
        "online": "online: logged in",
        "offline": "offline: not logged in (`wandb login`), or set by WANDB_MODE",
        "disabled": "off: set by WANDB_MODE",
    }
    return modes[wandb_mode("auto")]


def _ranks() -> list[tuple[str, str, str]]:
    rows = [
        ("backend gloo", "yes" if dist.is_gloo_available() else "no", "CPU ranks"),
        ("backend nccl", _nccl(), "GPU ranks"),
        ("memory shared between ranks", _shared_memory(), "`launch.shared_memory`, CPU ranks"),
    ]
    # the virtual environment of this Python first, even if it is not activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return rows + [
        (f"launcher {name}", shutil.which(name, path=path) or "not found", owner) for name, owner in _LAUNCHERS.items()
    ]


def _shared_memory() -> str:
    """Whether another process of this user may open this process's memory, as ranks do."""
    if not hasattr(os, "memfd_create"):
        return "no: this system has no memfd_create; sockets are used"
    memory = os.memfd_create("dtrain")
    try:
        opener = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
        command = [sys.executable, "-I", "-S", "-c", opener, f"/proc/{os.getpid()}/fd/{memory}"]
        subprocess.run(command, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "no: processes may not open each other's memory; sockets are used"
    finally:
        os.close(memory)
    return "yes"


def _speed_table(device: torch.device) -> Table:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    for speed in _measure_speeds(device):
        if speed.gflops is None:
            rows.append((speed.name, f"no: {speed.error}", ""))
        else:
            rows.append((speed.name, f"{speed.gflops:.3g}", f"{speed.size} x {speed.size}"))
    policy = PrecisionPolicy.named("auto").on(device)
    rows.append(("`precision=auto`", f"chooses {policy.name}", f"because {policy.reason}"))
    return Table(f"Matrix products on {name}", ("dtype", "GFLOP/s", "matrices"), rows)


@dataclass(frozen=True)
class MatmulSpeed:
    """Speed of a square matrix product in one dtype.

    Attributes:
        size: rows of the largest matrices within the time budget.
        gflops: 10^9 floating-point operations a second, median of a few products; None if the dtype does not run.
    """

    name: str
    size: int = 0
    gflops: float | None = None
    error: str = ""


def _measure_speeds(device: torch.device) -> list[MatmulSpeed]:
    makers: dict[str, Callable[[int], Callable[[], object]]] = {
        "fp32": partial(_dense_product, device, torch.float32, "highest"),
        "tf32": partial(_dense_product, device, torch.float32, "high"),
        "bf16": partial(_dense_product, device, torch.bfloat16, "highest"),
        "fp16": partial(_dense_product, device, torch.float16, "highest"),
        "fp8 (E4M3)": partial(_float8_product, device),
    }
    if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] < 8:
        del makers["tf32"]  # it would run in FP32
    precision = torch.get_float32_matmul_precision()
    try:
        return [_measure(name, make, device) for name, make in makers.items()]
    finally:
        torch.set_float32_matmul_precision(precision)


def _dense_product(device: torch.device, dtype: torch.dtype, fp32_precision: str, size: int) -> Callable[[], Tensor]:
    torch.set_float32_matmul_precision(fp32_precision)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def _float8_product(device: torch.device, size: int) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    # Tensor Cores require a column-major second operand
    scaled_mm: Any = F.scaled_mm
    kinds: Any = F.ScalingType
    scale = one, kinds.TensorWise
    return lambda: scaled_mm(a, b.t(), *scale, *scale, output_dtype=torch.bfloat16)


def _measure(name: str, make: Callable[[int], Callable[[], object]], device: torch.device) -> MatmulSpeed:
    largest = MatmulSpeed(name)
    for size in _SIZES[device.type]:
        try:
            product = make(size)
            elapsed_ms(product, device)  # warm-up: the first product initializes the library
            ms = [elapsed_ms(product, device)]
            while len(ms) < _REPEATS and sum(ms) < 1e3 * _BUDGET_S:
                ms.append(elapsed_ms(product, device))
        except (RuntimeError, NotImplementedError) as error:
            failed = MatmulSpeed(name, error=str(error).splitlines()[0])
            return failed if largest.gflops is None else largest  # a larger size may not fit into memory
        largest = MatmulSpeed(name, size, 2 * size**3 / median(ms) / 1e6)
        if 8 * min(ms) > 1e3 * _BUDGET_S:
            break
    return largest
