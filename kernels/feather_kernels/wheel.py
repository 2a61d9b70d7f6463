"""The wheel ``feather-kernels``: compiled libraries and their manifest, for machines without compilers.

It holds no Python that depends on a release and binds to apache-tvm-ffi alone, so it is tagged py3-none. Its platform
tag is read from the libraries: the oldest glibc that has every symbol version that they name.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from feather_kernels.errors import BuildError
from feather_kernels.prebuilt import DISTRIBUTION, MANIFEST, PACKAGE, Manifest, digest

NEEDS = "apache-tvm-ffi>=0.1.11"
# The first manylinux (PEP 600) whose libstdc++ has a version, where that is newer than 2.28, by its last number.
GLIBCXX = {28: 31, 29: 34, 30: 35, 31: 38, 32: 38, 33: 39}
CXXABI = {12: 31, 13: 34, 14: 38, 15: 39}
OLDEST_GLIBC = 28  # no tag is older: libraries are tried on none that is
EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file: equal contents make an equal wheel


def write_wheel(folder: Path, libraries: Mapping[str, Path], toolkit: Mapping[str, str], version: str) -> Path:
    """Write a wheel of these libraries, by the names that they have in it, into a folder; returns its path.

    Raises
    ------
    BuildError
        A folder that cannot be written.
    """
    tag = f"py3-none-{platform_tag(libraries.values())}"
    manifest = Manifest(version, toolkit, {name: digest(library) for name, library in libraries.items()})
    info = f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    texts = {
        f"{PACKAGE}/__init__.py": '"""Compiled libraries, which feather_kernels.prebuilt finds."""\n',
        f"{PACKAGE}/{MANIFEST}": manifest.to_json(),
        f"{info}/METADATA": "\n".join((
            "Metadata-Version: 2.4", f"Name: {DISTRIBUTION}", f"Version: {version}",
            "Summary: The compiled planner and attention kernels of feather-sglang", "License-Expression: Apache-2.0",
            "Requires-Python: >=3.10", f"Requires-Dist: {NEEDS}", "",
        )),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: feather_kernels.wheel\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }  # fmt: skip
    wheel = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    record = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp") as scratch:
            with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in [
                    *((name, text.encode()) for name, text in texts.items()),
                    *((f"{PACKAGE}/{name}", library.read_bytes()) for name, library in sorted(libraries.items())),
                ]:
                    archive.writestr(_entry(name), content)
                    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                    record.append(f"{name},sha256={hashed},{len(content)}")
                archive.writestr(_entry(f"{info}/RECORD"), "\n".join([*record, f"{info}/RECORD,,", ""]))
            scratch.flush()
            shutil.copyfile(scratch.name, wheel)
    except OSError as error:
        raise BuildError(f"cannot write {wheel}: {error.strerror}") from None
    return wheel


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    return entry


def platform_tag(libraries: Iterable[Path]) -> str:
    """The oldest manylinux on which all of these load, by the versions of the symbols that they need."""
    glibc = OLDEST_GLIBC
    for library in libraries:
        names = library.read_bytes()
        glibc = max(
            glibc,
            *(int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", names)),
            *(first for last, first in GLIBCXX.items() if b"\0GLIBCXX_3.4.%d\0" % last in names),
            *(first for last, first in CXXABI.items() if b"\0CXXABI_1.3.%d\0" % last in names),
        )
    return f"manylinux_2_{glibc}_{platform.machine()}"
