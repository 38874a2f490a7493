"""What the figures were measured on: processor, memory, versions. Nothing that names the machine or its owner."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forerun
from forerun_export.bench.memory import total_bytes

PACKAGES = ("onnxruntime", "torch", "transformers", "optimum", "optimum-onnx", "onnxruntime-genai")
_TOLD_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "i8mm")


def machine() -> dict[str, Any]:
    """Processor, the cores that this process may use, memory and system."""
    said = dict(_cpu_info())
    flags = said.get("flags", said.get("Features", "")).split()
    return {
        "cpu": said.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in _TOLD_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_info() -> Iterator[tuple[str, str]]:
    """Names and values of the first processor."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return
    for line in first.splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def versions() -> dict[str, str]:
    """Of Python, forerun and the packages that it is compared with, as far as they are installed."""
    found = {"python": platform.python_version(), "forerun": forerun.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
