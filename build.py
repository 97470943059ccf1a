"""In-tree PEP 517 backend: compiles native/ into the top-level extension `_kslserve` and packs
wheels.

Hooks: build_wheel, build_sdist, build_editable and their get_requires. As a program:

    python build.py native [FOLDER]   compile the extension into FOLDER (default build/)
    python build.py cuda [FOLDER] [--arch LIST]   compile libksl_cuda.so (needs nvcc) into FOLDER
                                      (default build/); LIST: sm_90a,sm_120a
    python build.py abi               write the header's hash into kslserve/engine/abi.py

Use `pip wheel .`; `python -m build` run from this folder would import this file instead of that
tool.
"""

from __future__ import annotations

import base64
import concurrent.futures
import csv
import gzip
import hashlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
EXTENSION = "_kslserve.abi3.so"
CUDA_LIBRARY = "libksl_cuda.so"
CUDA_ARCHES = ("sm_90a", "sm_120a")
# For shapes and formats that faster kernels do not take.
CUDA_MAY_SPILL = ("core", "scan")
EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal sources make equal archives

COMMON_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread",
]  # fmt: skip
# One object per instruction set; the others are compiled for the platform's baseline.
ISA_FLAGS = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi",
                   "-mavx512vnni", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
    "isa_avx512bf16": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi",
                       "-mavx512vnni", "-mavx512bf16", "-mfma", "-mf16c",
                       "-mprefer-vector-width=512"],
}  # fmt: skip
# No contraction behind the source's back: sums and sampling must have the same bits everywhere.
CUDA_FLAGS = [
    "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall,-Wextra",
]  # fmt: skip
SDIST_FOLDERS = ("kslserve", "native", "tests", "bench", ".ci")
SDIST_FILES = (
    "pyproject.toml", "build.py", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE",
    ".clang-format",
)  # fmt: skip


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _abi() -> Any:
    """kslserve/engine/abi.py, loaded by path: importing the package would need the extension."""
    spec = importlib.util.spec_from_file_location("ksl_abi", ROOT / "kslserve/engine/abi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- native


def _sources() -> list[Path]:
    sources = sorted((ROOT / "native/common").glob("*.cc")) + sorted(
        (ROOT / "native/cpu").glob("*.cc")
    )
    x86 = platform.machine() in ("x86_64", "AMD64")
    return [s for s in sources if x86 or s.stem not in ISA_FLAGS]


def _headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "native").rglob("*")):
        if path.suffix in (".h", ".inl"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str]) -> str:
    """Runs a compiler; what it said beside warnings and errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines(keepends=True) if not _resources(line)]
    sys.stderr.write("".join(said))
    if done.returncode:
        raise SystemExit(f"build failed: {' '.join(command)}")
    return done.stderr + done.stdout


def _resources(line: str) -> bool:
    return line.startswith("ptxas info") or " bytes stack frame, " in line


def _spills(said: str) -> list[str]:
    """Kernels that keep registers in memory, from what `ptxas -v` said."""
    kernel, found = "", []
    for line in said.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernel = f"{match[1]} for {match[2]}"
        elif (match := re.search(r"(\d+) bytes spill stores, (\d+) bytes", line)) and (
            int(match[1]) + int(match[2])
        ):
            found.append(f"{kernel}: {match[1]} bytes stored, {match[2]} loaded")
    return found


def _emit_binding(path: Path) -> None:
    """The C source of the cffi API-mode module. The header is the only declaration there is."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef((ROOT / "native/include/ksl.h").read_text(encoding="utf-8"))
    ffi.cdef(
        'extern "Python" int ksl_python_read(void *, int64_t, int64_t, void *, void *, float *);'
    )
    ffi.set_source("_kslserve", '#include <stdint.h>\n#include "ksl.h"\n')
    ffi.emit_c_code(str(path))


def _compiler() -> list[str]:
    return (os.environ.get("CXX") or shutil.which("g++") or "c++").split()


def compile_extension(folder: Path) -> Path:
    """Compile and link `_kslserve` into `folder`; unchanged objects are taken from build/obj."""
    if sys.platform == "win32":
        raise SystemExit("kslserve does not build on Windows; use WSL or a Linux machine.")
    abi = _abi()
    header = abi.header_hash(ROOT)
    if header != abi.ABI_HASH:
        raise SystemExit("kslserve/engine/abi.py is for another ksl.h: run `python build.py abi`.")
    objects = BUILD / "obj"
    objects.mkdir(parents=True, exist_ok=True)
    binding = objects / "_kslserve.c"
    _emit_binding(binding)
    compiler = _compiler()
    include = ["-I", str(ROOT / "native/include"), "-I", sysconfig.get_paths()["include"]]
    stamp = [
        f'-DKSL_ABI_HASH="{header}"',
        f'-DKSL_VERSION="{_project()["version"]}"',
        f'-DKSL_SOURCE_DIGEST="{abi.source_digest(ROOT)}"',
    ]
    headers = _headers_digest()

    def build_object(source: Path) -> Path:
        flags = COMMON_FLAGS + ISA_FLAGS.get(source.stem, [])
        if source.stem == "abi":
            flags = flags + stamp
        language = ["-x", "c"] if source.suffix == ".c" else []
        if language:
            flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-w"]
        key = hashlib.sha256(
            "\0".join([headers, *compiler, *flags, sys.version]).encode() + source.read_bytes()
        ).hexdigest()[:24]
        target = objects / f"{source.stem}-{key}.o"
        if not target.exists():
            scratch = target.with_suffix(f".{os.getpid()}.tmp")
            _run([*compiler, *language, *flags, *include, "-c", str(source), "-o", str(scratch)])
            scratch.replace(target)
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        built = list(workers.map(build_object, [binding, *_sources()]))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / EXTENSION
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    scratch = folder / f"{EXTENSION}.{os.getpid()}.tmp"
    _run([*compiler, "-shared", "-pthread", *undefined, *map(str, built), "-o", str(scratch)])
    scratch.replace(target)
    return target


def _nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        raise SystemExit("the CUDA library needs NVIDIA's compiler: nvcc is not on the PATH.")
    return found


def compile_cuda(folder: Path, arches: tuple[str, ...] = CUDA_ARCHES) -> Path:
    """Compile and link the CUDA library into `folder`; unchanged objects come from build/obj."""
    abi = _abi()
    header = abi.header_hash(ROOT)
    if header != abi.ABI_HASH:
        raise SystemExit("kslserve/engine/abi.py is for another ksl.h: run `python build.py abi`.")
    nvcc = _nvcc()
    objects = BUILD / "obj"
    objects.mkdir(parents=True, exist_ok=True)
    stamp = [
        f'-DKSL_ABI_HASH="{header}"',
        f'-DKSL_VERSION="{_project()["version"]}"',
        f'-DKSL_SOURCE_DIGEST="{abi.source_digest(ROOT)}"',
    ]
    targets = []
    for arch in arches:
        number = arch.removeprefix("sm_")
        targets.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    digest = hashlib.sha256(_headers_digest().encode())
    kernels = hashlib.sha256()  # a part of `numerics`: equal strings mean equal bits
    for path in sorted((ROOT / "native/cuda").rglob("*.cu*")):
        kernels.update(path.read_bytes())
        if path.suffix == ".cuh":
            digest.update(path.read_bytes())
    headers = digest.hexdigest()
    kernel_stamp = f'-DKSL_CUDA_DIGEST="{kernels.hexdigest()}"'

    def build_object(source: Path) -> Path:
        if source.suffix == ".cu":
            command = [nvcc, *CUDA_FLAGS, *targets]
            command += [kernel_stamp] if source.stem == "open" else []
        else:
            command = [*_compiler(), *COMMON_FLAGS, *(stamp if source.stem == "abi" else [])]
        command += ["-I", str(ROOT / "native/include")]
        name = source.relative_to(ROOT / "native").as_posix().replace("/", "_")
        key = hashlib.sha256(
            "\0".join([headers, *command]).encode() + source.read_bytes()
        ).hexdigest()[:24]
        target = objects / f"{name}-{key}.o"
        if not target.exists():
            scratch = target.with_suffix(f".{os.getpid()}.tmp")
            found = _spills(_run([*command, "-c", str(source), "-o", str(scratch)]))
            if source.suffix == ".cu":
                target.with_suffix(".spills").write_text("\n".join(found), encoding="utf-8")
            scratch.replace(target)
        return target

    sources = sorted((ROOT / "native/common").glob("*.cc")) + sorted(
        (ROOT / "native/cuda").rglob("*.cu")
    )
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        built = list(workers.map(build_object, sources))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / CUDA_LIBRARY
    scratch = folder / f"{CUDA_LIBRARY}.{os.getpid()}.tmp"
    _run([nvcc, "-shared", "-cudart", "static", "-Xcompiler", "-pthread", *targets,
          *map(str, built), "-o", str(scratch)])  # fmt: skip
    scratch.replace(target)
    # The library is there and right, but not as fast as it should be. What is measured may decide
    # to spill; what is not, that of sm_120a, may not.
    hot = False
    for source, made in zip(sources, built, strict=True):
        if source.suffix != ".cu":
            continue
        for line in made.with_suffix(".spills").read_text(encoding="utf-8").splitlines():
            sys.stderr.write(f"spills registers: {line}\n")
            hot |= "for sm_120" in line and source.stem not in CUDA_MAY_SPILL
    if hot:
        raise SystemExit("build failed: kernels for sm_120a spill registers")
    return target


# ---------------------------------------------------------------- archives


def _tag() -> str:
    return "cp311-abi3-" + re.sub(r"[-.]", "_", sysconfig.get_platform())


def _metadata() -> str:
    project = _project()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Keywords: {','.join(project['keywords'])}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {_requirement(d)}" for d in project["dependencies"]),
    ]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_requirement(r, extra)}" for r in requirements]
    lines.append("Description-Content-Type: text/markdown")
    readme = (ROOT / project["readme"]).read_text(encoding="utf-8")
    return "\n".join(lines) + "\n\n" + readme


def _requirement(text: str, extra: str | None = None) -> str:
    name, _, marker = (part.strip() for part in text.partition(";"))
    markers = [f"({marker})" if extra else marker] if marker else []
    if extra:
        markers.append(f'extra == "{extra}"')
    return name + (f" ; {' and '.join(markers)}" if markers else "")


def _package_files() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "kslserve").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix(), path


def _write_wheel(folder: str, contents: list[tuple[str, bytes]]) -> str:
    project = _project()
    stem = f"{project['name']}-{project['version']}"
    info = f"{stem}.dist-info"
    name = f"{stem}-{_tag()}.whl"
    scripts = "".join(f"{k} = {v}\n" for k, v in project.get("scripts", {}).items())
    wheel = f"Wheel-Version: 1.0\nGenerator: kslserve\nRoot-Is-Purelib: false\nTag: {_tag()}\n"
    contents = [
        *contents,
        (f"{info}/METADATA", _metadata().encode()),
        (f"{info}/WHEEL", wheel.encode()),
        (f"{info}/entry_points.txt", f"[console_scripts]\n{scripts}".encode()),
        (f"{info}/licenses/LICENSE", (ROOT / "LICENSE").read_bytes()),
    ]  # fmt: skip
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(Path(folder) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents:
            mode = 0o755 if path.endswith(".so") else 0o644
            _add_zip(archive, path, data, mode)
            sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow([path, f"sha256={sha}", len(data)])
        rows.writerow([f"{info}/RECORD", "", ""])
        _add_zip(archive, f"{info}/RECORD", record.getvalue().encode(), 0o644)
    return name


def _add_zip(archive: zipfile.ZipFile, path: str, data: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(path, EPOCH)
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


# ---------------------------------------------------------------- PEP 517 and PEP 660


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return []


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None
) -> str:
    extension = compile_extension(BUILD)
    contents = [(name, path.read_bytes()) for name, path in _package_files()]
    contents += [(EXTENSION, extension.read_bytes()), *_cuda_library()]
    return _write_wheel(wheel_directory, contents)


def _cuda_library() -> list[tuple[str, bytes]]:
    """The CUDA library for the wheel, if `build.py cuda` made it from these sources."""
    path = BUILD / CUDA_LIBRARY
    if not path.is_file():
        return []
    data = path.read_bytes()
    if _abi().source_digest(ROOT).encode() in data:
        return [(CUDA_LIBRARY, data)]
    print(f"{path} is from other sources and stays out of the wheel", file=sys.stderr)
    return []


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None
) -> str:
    """The extension is installed; the package itself is found in the clone through a .pth file."""
    extension = compile_extension(BUILD)
    link = ("__editable__.kslserve.pth", f"{ROOT}\n".encode())
    return _write_wheel(wheel_directory, [link, (EXTENSION, extension.read_bytes())])


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    project = _project()
    stem = f"{project['name']}-{project['version']}"
    name = f"{stem}.tar.gz"
    files = [ROOT / f for f in SDIST_FILES if (ROOT / f).is_file()]
    for folder in SDIST_FOLDERS:
        files += [
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
        ]
    with (
        open(Path(sdist_directory) / name, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in files:
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{stem}/{path.relative_to(ROOT).as_posix()}")
            entry.size = len(data)
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(data))
        data = _metadata().encode()
        entry = tarfile.TarInfo(f"{stem}/PKG-INFO")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return name


def _write_abi_hash() -> None:
    path = ROOT / "kslserve/engine/abi.py"
    text = path.read_text(encoding="utf-8")
    text = re.sub(
        r'^ABI_HASH = ".*"$', f'ABI_HASH = "{_abi().header_hash(ROOT)}"', text, flags=re.M
    )
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> None:
    match arguments:
        case ["native"]:
            print(compile_extension(BUILD))
        case ["native", folder]:
            print(compile_extension(Path(folder)))
        case ["cuda", *rest]:
            arches = CUDA_ARCHES
            if "--arch" in rest and rest.index("--arch") + 1 < len(rest):
                at = rest.index("--arch")
                arches = tuple(rest[at + 1].split(","))
                del rest[at : at + 2]
            if len(rest) > 1:
                raise SystemExit(__doc__)
            print(compile_cuda(Path(rest[0]) if rest else BUILD, arches))
        case ["abi"]:
            _write_abi_hash()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
