"""Files of weights, read and written here and not by a recipe: 8 bytes of length, a header in JSON, numbers."""

import json
from pathlib import Path

import numpy as np

DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "I64": "i8", "I32": "i4", "U8": "u1", "BOOL": "?"}


def header_of(path):
    """The number of bytes of a file's header, and the header."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length)
    assert text[:1] == b"{"
    return length, json.loads(text)


def read(path):
    """{name: array} of a file, whose numbers must follow each other without a gap."""
    length, header = header_of(path)
    data = Path(path).read_bytes()[8 + length :]
    header.pop("__metadata__", None)
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == len(data)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write(path, arrays):
    """Write a file as PyTorch's library does."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        dtype = next(key for key, kind in DTYPES.items() if array.dtype == kind)
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    numbers = b"".join(array.tobytes() for array in arrays.values())
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + numbers)
