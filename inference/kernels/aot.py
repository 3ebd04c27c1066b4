"""Ahead-of-time compilation of the kernels: registers, spills, shared memory and theoretical
occupancy for each architecture, without a GPU.

Every module that launches kernels has a function `specimens() -> list[Specimen]`: its kernels as
they are launched at the sizes that matter. Triton compiles them for an architecture that this
machine need not have, and the figures are read from the finished cubin. This needs Triton and its
own NVIDIA tools (`pip install 'headsmith[kernels]'`), and TRITON_INTERPRET unset.
"""

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from headsmith.errors import HeadsmithError

ARCHITECTURES = (80, 90, 100)


def architecture_of(device: torch.device) -> int:
    """80, 90, 100 ...; in the interpreter one is as good as another."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Specimen:
    """One kernel as it is launched.

    `kernel` is the @triton.jit function. `signature` gives the type of every argument that is not
    a constexpr, in Triton's words: "*bf16" (a pointer, aligned to 16 bytes as torch's allocations
    are), "i32", "i64", "fp32"; "i32:16" is an integer that is always a multiple of 16, as most
    strides are. `constexprs` gives the value of every other argument. `architectures` are those on
    which it is launched so.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    architectures: tuple[int, ...] = ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor of an architecture holds. The registers lie in four parts and are
    given to warps 256 at a time; each block costs 1 KiB of shared memory on top of its own.
    """

    shared: int
    warps: int = 64
    blocks: int = 32
    registers: int = 65536
    tensor_columns: int = 0


# A100, H100/H200 and B200 (CUDA C programming guide, technical specifications).
MULTIPROCESSORS = {
    80: Multiprocessor(shared=164 * 1024),
    90: Multiprocessor(shared=228 * 1024),
    100: Multiprocessor(shared=228 * 1024, tensor_columns=512),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a cubin needs: registers a thread, bytes of local memory a thread that registers were
    spilled to, bytes of shared memory a block, and the share of the warps that fit.
    """

    name: str
    architecture: int
    registers: int
    spills: int
    shared: int
    occupancy: float


def available() -> bool:
    """Whether kernels can be compiled here: Triton is installed and not in interpreter mode."""
    return find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")


def collect(package: str = "headsmith.inference.kernels") -> list[Specimen]:
    """The specimens of all kernels of a package, module by module."""
    found: list[Specimen] = []
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        module = importlib.import_module(info.name)
        if hasattr(module, "specimens"):
            found += module.specimens()
    return found


def build(specimen: Specimen, architecture: int) -> Any:
    """Triton's compiled kernel of one specimen for sm_`architecture`, with its PTX and cubin in
    `asm`.

    Raises HeadsmithError where Triton is absent or interprets.
    """
    if not available():
        raise HeadsmithError(
            "kernels are compiled with Triton: pip install 'headsmith[kernels]' and unset "
            "TRITON_INTERPRET"
        )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specimen.kernel.arg_names
    missing = set(names) ^ (set(specimen.signature) | set(specimen.constexprs))
    assert not missing, f"{specimen.name}: {sorted(missing)} are not the kernel's arguments"
    types = {n: specimen.signature.get(n, "constexpr").partition(":")[0] for n in names}
    source = ASTSource(
        fn=specimen.kernel,
        signature=types,
        constexprs=dict(specimen.constexprs),
        attrs=_alignment(names, specimen.signature),
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": specimen.num_warps, "num_stages": specimen.num_stages},
    )


def compile_for(specimen: Specimen, architecture: int) -> Compiled:
    """What one specimen needs on sm_`architecture`."""
    kernel = build(specimen, architecture)
    registers, spills, static = _resources(kernel.asm["cubin"])
    shared = kernel.metadata.shared + static
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    share = occupancy(architecture, specimen.num_warps, registers, shared, columns)
    return Compiled(specimen.name, architecture, registers, spills, shared, share)


def _alignment(names: Sequence[str], signature: dict[str, str]) -> dict[tuple[int], list[Any]]:
    """Triton's words for the arguments that are multiples of 16."""
    aligned = {n for n, t in signature.items() if t.startswith("*") or t.endswith(":16")}
    return {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack a thread, bytes of static shared memory of a cubin.

    The kernels declare no arrays of their own, so what lies on the stack was spilled.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", told)}
    return found["REG"], found["STACK"] + found.get("LOCAL", 0), found.get("SHARED", 0)


def occupancy(
    architecture: int, num_warps: int, registers: int, shared: int, tensor_columns: int = 0
) -> float:
    """The share of a multiprocessor's warps that blocks of this kind fill, 0 to 1."""
    has = MULTIPROCESSORS[architecture]
    a_warp = -(-registers * 32 // 256) * 256
    by_registers = 4 * (has.registers // 4 // a_warp)
    blocks = min(has.blocks, has.warps // num_warps, by_registers // num_warps)
    blocks = min(blocks, has.shared // (shared + 1024))
    if tensor_columns and has.tensor_columns:
        blocks = min(blocks, has.tensor_columns // tensor_columns)
    return blocks * num_warps / has.warps
