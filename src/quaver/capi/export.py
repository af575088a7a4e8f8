"""Compile the kernels of the C library for chosen GPUs, and write it with them: `quaver kernels`."""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

import quaver
from quaver.capi.cases import Selection, record
from quaver.capi.variants import ABSENT, FIELD_BITS, FIELDS, FORMULAS, KINDS, MODES, Variant, variants
from quaver.include import HEADERS
from quaver.kernels import tensorwise
from quaver.torch.backends.gpu import launch

#: The library's sources, which are copied as they are.
SOURCES = Path(__file__).parent / "csrc"
#: Version of Triton by which the library is tested. Its kernels take two scratch pointers after their arguments.
TRITON = "3.6."
#: Bytes at which a cubin begins.
ALIGNMENT = 64


@dataclass(frozen=True)
class CompiledVariant:
    """A variant with its machine code."""

    variant: Variant
    symbol: str
    cubin: bytes
    threads: int
    shared: int

    @property
    def digest(self) -> str:
        return sha256(self.cubin).hexdigest()


def export(
    archs: Sequence[int],
    folder: Path,
    selection: Selection,
    compress: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[int, list[CompiledVariant]]:
    """Compile kernels and write the library's sources, its tables and its build file into a folder.

    Args:
        archs: compute capabilities times ten, such as 90.
        folder: created if it does not exist; files of an earlier export are overwritten.
        compress: True to store cubins as compressed fatbins, which takes `fatbinary` of the CUDA toolkit.
        progress: called with a line about each kernel.

    Returns:
        The compiled variants of each architecture.

    Raises:
        ValueError: this version of Triton is not supported, a kernel needs what the library does not provide, or
            `fatbinary` is missing.
    """
    if not triton.__version__.startswith(TRITON):
        raise ValueError(
            "kernels are exported by Triton 3.6, with which the C library is tested, and this is "
            f"{triton.__version__}; pip install 'triton==3.6.0'"
        )
    if launch.interpreted(tensorwise.amax):
        raise ValueError("TRITON_INTERPRET=1 lets Triton interpret kernels instead of compiling them; unset it")
    if compress and shutil.which("fatbinary") is None:
        raise ValueError("--compress needs fatbinary of the CUDA toolkit on the path; leave --compress out")
    folder.mkdir(parents=True, exist_ok=True)
    exported = {}
    for arch in archs:
        found = variants(record(selection, arch))
        exported[arch] = compiled = compile_all(found, arch, progress)
        write_table(folder, arch, compiled, compress)
    for source in (*SOURCES.iterdir(), *HEADERS.glob("*.h*")):
        shutil.copy(source, folder / source.name)
    (folder / "quaver_tables.h").write_text(tables_header(list(archs)))
    return exported


def compile_all(
    found: Sequence[Variant], arch: int, progress: Callable[[str], None] = lambda _: None
) -> list[CompiledVariant]:
    """Compile variants for sm_`arch`.

    Raises:
        ValueError: as `why_not`.
    """
    compiled: list[CompiledVariant] = []
    with knobs.compilation.scope():
        # Line tables are more than half of a cubin.
        knobs.compilation.disable_line_info = True
        for number, variant in enumerate(found):
            if not compiled or compiled[-1].variant.kernel != variant.kernel:
                progress(f"sm_{arch}  {number:4}/{len(found)}  {variant.kernel}")
            one = variant.launch
            kernel = triton.compile(one.source, target=GPUTarget("cuda", arch, 32), options=one.options)
            if reason := why_not(kernel.metadata):
                raise ValueError(f"{variant.kernel} cannot be launched from C: {reason}")
            compiled.append(
                CompiledVariant(
                    variant,
                    kernel.metadata.name,
                    kernel.asm["cubin"],
                    32 * kernel.metadata.num_warps,
                    kernel.metadata.shared,
                )
            )
    return compiled


def why_not(metadata: Any) -> str:
    """Return why the library cannot launch a kernel with this metadata, or ""."""
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        return "it needs scratch memory"
    if getattr(metadata, "num_ctas", 1) != 1:
        return "its programs form clusters"
    if getattr(metadata, "launch_pdl", False):
        return "it uses programmatic dependent launch"
    if getattr(metadata, "launch_cooperative_grid", False):
        return "its grid is cooperative"
    return "it takes tensor descriptors" if getattr(metadata, "tensordesc_meta", None) else ""


# ---- files ----


def write_table(folder: Path, arch: int, compiled: Sequence[CompiledVariant], compress: bool) -> None:
    """Write an architecture's images, the table of its variants, and a description of them for people and tests."""
    images: dict[str, bytes] = {}
    for one in compiled:
        if one.digest not in images:
            images[one.digest] = _compressed(one.cubin, arch, folder) if compress else one.cubin
    blob, offsets = bytearray(), {}
    for digest, image in images.items():
        offsets[digest] = len(blob)
        blob += image + bytes(-len(image) % ALIGNMENT)
    name = f"quaver_sm{arch}"
    (folder / f"{name}.bin").write_bytes(blob)
    (folder / f"{name}_images.S").write_text(_assembly(name))
    (folder / f"{name}.c").write_text(_table(arch, compiled, offsets))
    described = [
        {
            "kernel": one.variant.kernel,
            "key": one.variant.key,
            "fields": FIELDS[one.variant.kernel],
            "arguments": one.variant.arguments,
            "multiples_of_16": one.variant.launch.divisible,
            "whole_blocks": one.variant.whole,
            "block": one.variant.block,
            "threads": one.threads,
            "shared": one.shared,
            "offset": offsets[one.digest],
            "bytes": len(images[one.digest]),
        }
        for one in compiled
    ]
    (folder / f"{name}.json").write_text(json.dumps(described, indent=1) + "\n")


def _compressed(cubin: bytes, arch: int, folder: Path) -> bytes:
    source, image = folder / "one.cubin", folder / "one.fatbin"
    source.write_bytes(cubin)
    command = ["fatbinary", "--compress-all", "-64", f"--create={image}", f"--image3=kind=elf,sm={arch},file={source}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        return image.read_bytes()
    except subprocess.CalledProcessError as error:
        raise ValueError(f"fatbinary failed: {error.stderr.strip()}") from error
    finally:
        source.unlink(missing_ok=True)
        image.unlink(missing_ok=True)


def _table(arch: int, compiled: Sequence[CompiledVariant], offsets: dict[str, int]) -> str:
    by_kernel: dict[str, list[str]] = {}
    for slot, one in enumerate(compiled):
        variant, (bm, bn) = one.variant, one.variant.block
        by_kernel.setdefault(variant.kernel, []).append(
            f"    {{{variant.key:#x}, {variant.assumes:#x}, {variant.whole:d}, {len(variant.arguments)}, "
            f'{one.threads}, {one.shared}, {bm}, {bn}, {slot}, {offsets[one.digest]}, "{one.symbol}"}},'
        )
    lines = [f"/* {build_text()} */", '#include "quaver_internal.h"', '#include "quaver_tables.h"', ""]
    for kernel, rows in by_kernel.items():
        lines += [f"static const qv_variant variants_{kernel}[] = {{", *rows, "};"]
    lines += ["static const qv_kernel kernels[QV_KERNELS] = {"]
    lines += [f"    [QV_{name.upper()}] = {{variants_{name}, {len(rows)}}}," for name, rows in by_kernel.items()]
    lines += ["};", f"extern const unsigned char qv_images_sm{arch}[];"]
    lines += [f"const qv_table qv_table_sm{arch} = {{{arch}, {len(compiled)}, kernels, qv_images_sm{arch}}};"]
    return "\n".join(lines) + "\n"


def _assembly(name: str) -> str:
    symbol = name.replace("quaver_", "qv_images_")
    return (
        f".section .rodata\n.globl {symbol}\n.hidden {symbol}\n.balign {ALIGNMENT}\n{symbol}:\n"
        f'.incbin "{name}.bin"\n.byte 0\n.section .note.GNU-stack,"",%progbits\n'
    )


def tables_header(archs: Sequence[int]) -> str:
    """Return quaver_tables.h: kernels, fields of their keys, and the tables of the architectures."""
    lines = [
        f"/* {build_text()} */",
        "#ifndef QUAVER_TABLES_H",
        "#define QUAVER_TABLES_H",
        '#include "quaver_internal.h"',
    ]
    lines += [f'#define QV_BUILD "{build_text()}"']
    lines += [f"enum {{ {', '.join(f'QV_{name.upper()}' for name in FIELDS)}, QV_KERNELS }};"]
    for name, fields in FIELDS.items():
        for i, field in enumerate(fields):
            lines.append(f"#define QV_{name.upper()}_{field.upper()}(value) ((uint64_t)(value) << {FIELD_BITS * i})")
    lines += [f"enum {{ {', '.join(f'QV_KIND_{kind.upper()}' for kind in KINDS)} }};"]
    lines += [f"enum {{ {', '.join(f'QV_MODE_{mode.upper()}' for mode in MODES)} }};"]
    lines += [f"enum {{ {', '.join(f'QV_FORMULA_{formula.upper()}' for formula in FORMULAS)} }};"]
    lines += [f"enum {{ QV_ABSENT = {ABSENT} }};"]
    lines += [f"extern const qv_table qv_table_sm{arch};" for arch in archs]
    lines += [f"#define QV_TABLES {{ {', '.join(f'&qv_table_sm{arch}' for arch in archs)} }}", "#endif"]
    return "\n".join(lines) + "\n"


def build_text() -> str:
    """Return the versions that decide the machine code."""
    ptxas = knobs.nvidia.ptxas.version
    return f"quaver {quaver.__version__}, commit {_commit()}, triton {triton.__version__}, ptxas {ptxas}"


def _commit() -> str:
    """Return the commit of this checkout, or "unknown" for an installed package."""
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "-C", str(SOURCES)]
    # An installed package may be in a virtual environment inside another repository.
    tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "quaver.c"], capture_output=True, check=False)
    done = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if tracked.returncode == done.returncode == 0 else "unknown"
