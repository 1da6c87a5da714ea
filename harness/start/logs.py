"""A file for each rank, with all that it wrote, and when it did so last."""

import time
from pathlib import Path


class Logs:
    """The files of this node's ranks in a folder, which is made if need be; a context manager.

    A file of an earlier job is not lost: each job writes behind it, below a line of its own. Raises OSError if a file
    cannot be opened. If the disk is full later on, `lost` tells and the job goes on.
    """

    def __init__(self, folder, ranks):
        """ranks: their numbers in the job, in the order in which they run here."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = [folder / f"rank_{rank}.log" for rank in ranks]
        self.files = [open(path, "ab", buffering=0) for path in self.paths]  # noqa: SIM115
        self.ends = [True] * len(self.files)  # whether the last line of a file has its end
        self.said = (time.monotonic(), "")  # when the first rank wrote last, and its last line
        self.lost = None  # why something could not be written, the first time; "" once that is told

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.files:
            file.close()

    def write(self, i, data):
        """Add what the i-th rank here wrote, as it is."""
        self._write(i, data)
        if i == 0:
            line = data.rstrip(b"\r\n").replace(b"\r", b"\n").rsplit(b"\n", 1)[-1].decode(errors="replace")
            self.said = (time.monotonic(), line or self.said[1])

    def remark(self, text):
        """Add a line of the launcher to all files."""
        for i in range(len(self.files)):
            self._write(i, b"\n" * (not self.ends[i]) + f"launch.sh: {text}\n".encode(errors="backslashreplace"))

    def progress(self):
        """What the first rank said last, and when, in one line."""
        when, line = self.said
        name = self.paths[0].stem.replace("_", " ")
        return f"{name}, {time.monotonic() - when:.0f} s ago: {line[:100]}" if line else f"{name} has said nothing"

    def _write(self, i, data):
        self.ends[i] = data.endswith(b"\n")
        try:
            while data:
                data = data[self.files[i].write(data) :]
        except OSError as error:
            if self.lost is None:
                self.lost = f"{self.paths[i]}: {error.strerror}: from here on the logs have gaps"
