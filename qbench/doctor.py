"""What the machine offers: versions, processor, memory, disk, accelerators, optional packages."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

from qbench.resources import cache_dir

GIB = 2**30
REQUIRED = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy", "pydantic")
OPTIONAL = {
    "datasets": "calibration data of the hub, parquet files",
    "xllamacpp": "checks GGUF files in llama.cpp",
    "gptqmodel": "checks GPTQ folders in transformers",
    "lm-eval": "task accuracy",
    "nbclient": "runs the notebooks",
}
CPU_FEATURES = {
    "avx2": "256-bit vectors",
    "avx512f": "512-bit vectors",
    "avx512_vnni": "int8 dot products",
    "avx512_bf16": "bfloat16 products",
    "amx_int8": "int8 matrix tiles",
    "amx_bf16": "bfloat16 matrix tiles",
    "asimddp": "int8 dot products (Arm)",
    "bf16": "bfloat16 products (Arm)",
}


class Finding(NamedTuple):
    """One line of the examination."""

    what: str
    found: str
    note: str = ""


def examine() -> dict[str, list[Finding]]:
    """Findings by section."""
    return {
        "versions": _versions(),
        "processor": _processor(),
        "memory and disk": _memory_and_disk(),
        "accelerators": _accelerators(),
        "optional packages": [_package(name, note) for name, note in OPTIONAL.items()],
    }


def _package(name: str, note: str = "") -> Finding:
    try:
        return Finding(name, version(name), note)
    except PackageNotFoundError:
        return Finding(name, "not installed", note)


def _versions() -> list[Finding]:
    system = Finding("system", platform.platform())
    return [Finding("python", platform.python_version()), system, *map(_package, ("qbench-workbench", *REQUIRED))]


def _processor() -> list[Finding]:
    usable = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count()
    flags = _cpu_flags()
    present = [f"{name} ({meaning})" for name, meaning in CPU_FEATURES.items() if name in flags]
    found = [
        Finding("cores", str(usable), f"{psutil.cpu_count(logical=False) or 'unknown'} physical in the machine"),
        Finding("features", ", ".join(present) or "none known"),
    ]
    if "OMP_NUM_THREADS" in os.environ:
        found.append(Finding("OMP_NUM_THREADS", os.environ["OMP_NUM_THREADS"], "limits the cores that are used"))
    return found


def _cpu_flags() -> set[str]:
    """The kernel's names of what the processor can do; empty where there is no /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )


def _memory_and_disk() -> list[Finding]:
    memory, cache = psutil.virtual_memory(), cache_dir()
    held = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    here = shutil.disk_usage(Path.cwd())
    there = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists()))
    return [
        Finding("memory", f"{memory.total / GIB:.1f} GiB", f"{memory.available / GIB:.1f} GiB available"),
        Finding("disk here", f"{here.free / GIB:.1f} GiB free", str(Path.cwd())),
        Finding(
            "cache", f"{held / GIB:.2f} GiB held", f"{cache} ({there.free / GIB:.1f} GiB free; QBENCH_CACHE moves it)"
        ),
    ]


def _accelerators() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("cuda", "none", "everything runs on the processor")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        note = f"{properties.total_memory / GIB:.1f} GiB, {capability}"
        found.append(Finding(f"cuda:{index}", properties.name, note))
    return found
