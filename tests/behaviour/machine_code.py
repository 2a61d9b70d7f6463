"""Record the kernels' machine code, so that a refactoring of their sources can show that it did not change.

    python tests/behaviour/machine_code.py [--check]

Compiles ``csrc/packed_decode.cu`` for each of `CASES` and writes digests of its kernels' instructions, which know no
names, with the compiler's version to ``machine_code.json`` beside this file. ``--check`` compares instead. Needs nvcc
and the headers of CUTLASS, no GPU; some 30 s a case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tvm_ffi import libinfo

from feather_kernels.build import Configuration, cutlass_include, find_nvcc, source_dir

REFERENCE = Path(__file__).with_name("machine_code.json")
CASES = {"hopper": Configuration("bfloat16", 128, 90), "portable": Configuration("bfloat16", 128, 80)}


def nvcc_version() -> str:
    """As in "13.0.88"."""
    shown = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", shown)
    assert found, shown
    return found[1]


def sections(elf: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit ELF file that have bytes in it, by name."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    begin = headers[names][4]
    return {
        elf[begin + name : elf.index(b"\0", begin + name)].decode(): elf[offset : offset + length]
        for name, kind, _, _, offset, length in headers
        if kind != 8  # SHT_NOBITS
    }


def machine_code(case: str) -> list[str]:
    """Digests of one case's kernels, sorted: their names change with those of types."""
    flags = [flag for flag in CASES[case].flags if flag not in ("-shared", "-Xcompiler=-fPIC", "-Xptxas=-v")]
    includes = [source_dir(), cutlass_include(), libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    with tempfile.TemporaryDirectory() as scratch:
        cubin = Path(scratch, "kernels.cubin")
        source = source_dir() / "packed_decode.cu"
        command = [find_nvcc(), *flags, "-cubin", *(f"-I{path}" for path in includes), str(source), "-o", str(cubin)]
        subprocess.run(command, check=True)
        found = sections(cubin.read_bytes())
    code = [data for name, data in found.items() if name.startswith(".text.")]
    return sorted(hashlib.sha256(data).hexdigest()[:16] for data in code)


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with machine_code.json")
    options = parser.parse_args()
    found = {"nvcc": nvcc_version(), **{case: machine_code(case) for case in CASES}}
    if options.check:
        known = json.loads(REFERENCE.read_text())
        changed = [name for name, value in found.items() if known.get(name) != value]
        print(f"{len(found)} compared, {len(changed)} differ", *changed, sep="\n")
        return 1 if changed else 0
    REFERENCE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{sum(map(len, found.values())) - len(found['nvcc'])} kernels recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
