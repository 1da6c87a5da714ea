"""What the shell shows: the output of the ranks, equal parts once, and what moved."""

import json
import math
import re
import threading
import time
from pathlib import Path

from rich.text import Text

from oneflow_cookbook.measure.steps import tensors_and_moves
from oneflow_cookbook.report.drawing import bytes_in_words, colour, in_words, quiet

PATIENCE = 5  # seconds until the terminal shows that only some ranks have finished
PAUSE = 0.1  # seconds between two looks at what the ranks print
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object; each rank has its own
CALL = "a call of "  # how steps.py names the call of a graph
MOST = 12  # moves of a statement that are shown
MESSAGES = 4000  # bytes from a rank: OneFlow's own messages may be that many


class Screen:
    """Writes lines to a rich console."""

    def __init__(self, console, world_size):
        self.console, self.world_size = console, world_size
        self.arrow = "↓" if (console.encoding or "").lower().replace("-", "").startswith("utf8") else "v"

    def line(self, text, style=""):
        self.console.print(Text(text.rstrip(" "), style), soft_wrap=True, highlight=False)

    def by_ranks(self, parts):
        """Show {rank: text}: equal texts once."""
        groups = {}
        for rank, text in sorted(parts.items()):
            groups.setdefault(ADDRESS.sub(" at 0x...", text), []).append(rank)
        for text, ranks in groups.items():
            everyone = len(ranks) == self.world_size
            label = Text(f"[{'all' if everyone else ','.join(map(str, ranks))}] ", "" if everyone else colour(ranks[0]))
            for line in text.rstrip("\n").split("\n"):
                self.console.print(label + Text(line.rstrip()), soft_wrap=True, highlight=False)

    def moves(self, by_rank):
        """Show what moved in a statement. by_rank: what interpreter.moved returned on each rank."""
        events, sent = by_rank[0]["events"], [result["sent"] for result in by_rank]
        same_steps = len({len(result["events"]) for result in by_rank}) == 1
        moves = tensors_and_moves(by_rank) if same_steps else []
        only_step = len(events) == 1 and events[0].times == 1
        for move in moves:
            move.sent = sent if only_step and move is moves[0] else None
        shown = [in_words(move) for move in without_calls(moves) if not quiet(move)]
        if not shown:
            shown = implicit(moves, by_rank[0]["compares"], max(sent))
        elif not only_step and any(move.is_exact for move in moves):
            shown.append(f"in all, sent by rank: {', '.join(map(bytes_in_words, sent))}")
        if len(shown) > MOST:
            shown[MOST:] = [f"and {len(shown) - MOST} more"]
        for words in shown:
            self.line(f"  {self.arrow} {words}", "bold yellow")


def without_calls(moves):
    """These moves, but where a single tensor moves in the call of a graph, its move replaces that of the call."""
    result = []
    for move in moves:
        call = result[-1] if result else None
        if call and call.name.startswith(CALL) and len(call.boxings or []) == 1 and move.line == 0:
            result.pop()
            move.name, move.sent = f"{call.name[len(CALL) :]}: {move.name}", call.sent
        result.append(move)
    return result


def implicit(moves, compares, sent):
    """The lines for a statement that sent bytes, although none of its steps explains them."""
    about = f"{bytes_in_words(sent)} from a rank, OneFlow's own messages included"
    of_backward = [move for move in moves if move.name == "backward"]
    if of_backward:
        return [f"backward: the gradients, {about}"]
    if compares:
        return [f"flow.tensor: OneFlow compares the values of all ranks, {about}"]
    from_local = [move for move in moves if move.collective == "local to global"]
    if from_local:  # to S and P the ranks only compare shapes
        to_broadcast = [move for move in from_local if move.change.endswith("B")]
        return [f"{move.name}: {move.change}, broadcast from rank 0" for move in to_broadcast]
    if sent < MESSAGES:
        return [f"OneFlow's ranks exchanged {bytes_in_words(sent)}: messages of its own, or small parts of a tensor"]
    return [f"OneFlow moved data inside this statement: {about}"]


class Following(threading.Thread):
    """Shows what the ranks print while a statement runs: each part once all ranks have written it."""

    def __init__(self, screen, folder, ranks):
        """folder: with the file that each rank writes. ranks: a session.Ranks."""
        super().__init__(daemon=True)
        self.screen, self.ranks = screen, ranks
        self.done = 0  # number of parts shown
        self.stop = threading.Event()
        self.error = None  # an OSError while writing: nobody reads the output
        self.files = [Path(folder) / str(rank) for rank in range(ranks.world_size)]
        self.parts = {rank: [] for rank in range(ranks.world_size)}
        self.offsets = [0] * ranks.world_size
        for file in self.files:
            file.write_bytes(b"")

    def run(self):
        try:
            hint = time.monotonic() + PATIENCE if self.screen.console.is_terminal else math.inf
            while not self.stop.wait(PAUSE):
                self.look()
                if time.monotonic() > hint and 0 < self.ranks.answered < self.ranks.world_size:
                    done = f"{self.ranks.answered} of {self.ranks.world_size} ranks have finished this statement"
                    self.screen.line(f"({done}; Ctrl-C ends it and shows where the others are)", "dim")
                    hint = math.inf
        except OSError as error:
            self.error = error

    def look(self):
        """Read new parts, and show those that all ranks have written."""
        for rank, file in enumerate(self.files):
            with open(file, "rb") as stream:
                stream.seek(self.offsets[rank])
                lines = [line for line in stream.read().splitlines(True) if line.endswith(b"\n")]
            self.offsets[rank] += sum(map(len, lines))
            self.parts[rank] += map(json.loads, lines)
        while all(len(parts) > self.done for parts in self.parts.values()):
            self.show()

    def show(self):
        """Show the next part."""
        parts = {rank: parts[self.done] for rank, parts in self.parts.items() if len(parts) > self.done}
        self.done += 1
        self.screen.by_ranks(parts)

    def finish(self):
        """Show the rest, even what only some ranks have printed. Raises OSError if nobody reads it."""
        self.stop.set()
        self.join()
        if self.error:
            raise self.error
        self.look()
        while any(len(parts) > self.done for parts in self.parts.values()):
            self.show()
