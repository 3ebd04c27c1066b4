"""Where a measurement was made: versions, device, memory."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from headsmith import __version__
from headsmith.errors import EnvironmentFault

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def versions() -> dict[str, str]:
    """Versions of headsmith, Python and the libraries that decide the numbers."""
    found = {"headsmith": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one. EnvironmentFault if absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as fault:
        raise EnvironmentFault(
            f"the device {name} cannot be used here; try --device cpu"
        ) from fault
    return device


def device_info(device: torch.device) -> dict[str, Any]:
    """Name and size of the device; for a CPU its model, cores and the threads that torch uses."""
    info: dict[str, Any] = {"type": device.type, "platform": platform.platform()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        info |= {"name": properties.name, "memory_bytes": properties.total_memory}
    else:
        info["name"] = _cpu_name()
    return info | {"cores": os.cpu_count(), "threads": torch.get_num_threads()}


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak: of CUDA's allocator, or on Linux of this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Elsewhere, and where this is not allowed, a process has one peak for its whole life.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak of the CUDA allocator since the reset, or of the process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if platform.system() == "Darwin" else peak * 1024)


def memory_bytes(device: torch.device) -> int:
    """What CUDA's allocator has given out now, or the process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
