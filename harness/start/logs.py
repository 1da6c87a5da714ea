"""A log file for each rank of this node, with all that it wrote."""

import time
from pathlib import Path


class Logs:
    """The files DIR/rank_K.log of this node's ranks; a context manager. Lists are indexed by local rank.

    A job appends to the files of an earlier one. Raises OSError if a file cannot be opened or written.
    """

    def __init__(self, folder, ranks):
        """ranks: the ranks of this node, as numbered in the job."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.first = ranks[0]
        self.files = [open(folder / f"rank_{rank}.log", "ab", buffering=0) for rank in ranks]  # noqa: SIM115
        self.last_line, self.last_time = "", time.monotonic()  # of the first rank

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.files:
            file.close()

    def write(self, rank, lines):
        """Append lines that a local rank wrote."""
        self.files[rank].write(b"".join(lines))
        if rank == 0 and lines:
            self.last_line, self.last_time = lines[-1].decode(errors="replace").strip(), time.monotonic()

    def write_all(self, text):
        """Append a line of the launcher to all files."""
        for file in self.files:
            file.write(f"launch.sh: {text}\n".encode(errors="backslashreplace"))

    def progress(self):
        """One line: what the first rank wrote last, and when."""
        ago = time.monotonic() - self.last_time
        line = self.last_line[:100]
        return f"rank {self.first}, {ago:.0f} s ago: {line}" if line else f"rank {self.first} has written nothing"
