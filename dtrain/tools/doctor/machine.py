"""What this machine can do: software, devices, dtypes and their speed, launchers, trackers. Nothing leaves it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

import torch
import torch.distributed as dist

from dtrain.precision.compiler import has_compiler
from dtrain.precision.policy import PrecisionPolicy
from dtrain.telemetry.trackers import wandb_mode
from dtrain.tools.doctor.speed import measure
from dtrain.tools.host import describe_host, memory_left
from dtrain.tools.tables import Table
from dtrain.version import version

_PACKAGES = {
    "numpy": "data",
    "safetensors": "checkpoints",
    "hydra-core": "configuration",
    "wandb": "tracker=wandb",
    "tensorboard": "tracker=tensorboard",
    "deepspeed": "engine=deepspeed",
    "ninja": "kernels that DeepSpeed compiles",
    "triton": "optim.compile on a GPU",
    "accelerate": "a peer of `dtrain bench engine`",
}
_LAUNCHERS = {"torchrun": "torch", "deepspeed": "DeepSpeed", "srun": "SLURM"}
_INSTRUCTIONS = {
    "AVX-512": "_is_avx512_supported",
    "BF16 (AVX-512)": "_is_avx512_bf16_supported",
    "BF16 (AMX)": "_is_amx_tile_supported",
    "FP16 (AMX)": "_is_amx_fp16_supported",
}


def machine_tables() -> list[Table]:
    """Everything, in about five seconds, most of which are matrix products."""
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
        try:
            rows.append((name, package_version(name), purpose))
        except PackageNotFoundError:
            rows.append((name, "not installed", purpose))
    return rows


def _machine() -> list[tuple[str, str]]:
    host = describe_host()
    disk = shutil.disk_usage(Path.cwd())
    instructions = [name for name, probe in _INSTRUCTIONS.items() if getattr(torch.cpu, probe, bool)()]
    return [
        ("CPU", f"{host.cpu}, {host.cores} cores for this process"),
        ("matrix instructions", ", ".join(instructions) or "none that PyTorch knows"),
        ("memory", f"{host.memory_gib:g} GiB, {memory_left() * host.memory_gib:.1f} GiB free"),
        ("disk of this folder", f"{disk.free / 2**30:.1f} GiB free"),
        ("C++ compiler", "found" if has_compiler(torch.device("cpu")) else "none: optim.compile cannot be used"),
        *((f"GPU {index}", _gpu(index)) for index in range(torch.cuda.device_count())),
        *([] if torch.cuda.is_available() else [("GPU", "none that PyTorch sees")]),
        ("tracker=wandb", _wandb()),
    ]


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, compute capability "
        f"{properties.major}.{properties.minor}"
    )


def _wandb() -> str:
    try:
        package_version("wandb")
    except PackageNotFoundError:
        return "not installed: pip install wandb"
    words = {
        "online": "online: logged in",
        "offline": "offline: nobody is logged in (`wandb login`), or WANDB_MODE says so",
        "disabled": "off: WANDB_MODE says so",
    }
    return words[wandb_mode("auto")]


def _ranks() -> list[tuple[str, str, str]]:
    rows = [
        ("backend gloo", _yes(dist.is_gloo_available()), "CPU ranks"),
        ("backend nccl", _yes(dist.is_nccl_available()), "GPU ranks"),
        ("memory shared between ranks", _shared_memory(), "`launch.shared_memory`, CPU ranks"),
    ]
    # the environment of this Python first, whether or not it was activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return rows + [
        (f"launcher {name}", shutil.which(name, path=path) or "not found", owner) for name, owner in _LAUNCHERS.items()
    ]


def _yes(here: bool) -> str:
    return "yes" if here else "no"


def _shared_memory() -> str:
    """Whether another process of this user may open this one's memory, as ranks do."""
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
    for speed in measure(device):
        if speed.gflops is None:
            rows.append((speed.name, f"no: {speed.refusal}", ""))
        else:
            rows.append((speed.name, f"{speed.gflops:.3g}", f"{speed.size} x {speed.size}"))
    policy = PrecisionPolicy.named("auto").on(device)
    rows.append(("`precision=auto`", f"chooses {policy.name}", f"because {policy.reason}"))
    return Table(f"Matrix products on {name}", ("dtype", "GFLOP/s", "matrices"), rows)
