"""The ranks of a shell: they run statements, and are replaced when they no longer agree."""

import contextlib
import re
import signal
import tempfile
import traceback
from pathlib import Path

from oneflow_cookbook.pool import CallCancelled, Pool, PoolError
from oneflow_cookbook.shell import remember
from oneflow_cookbook.shell.screen import Following

INTERPRETER_FILE = str(Path(__file__).with_name("interpreter.py"))
INTERPRETER = "oneflow_cookbook.shell.interpreter"
HARNESS = str(Path(__file__).resolve().parents[1])
INSIDE = re.compile(f"^{re.escape(HARNESS)}/|/site-packages/oneflow/")  # paths of files that are not the user's
GRACE = 5  # seconds that the other ranks get once a rank has raised
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # a line of faulthandler
NOISE = ("libibverbs not available", "    @ ", "*** Check failure")  # in the output of a rank that died
LAST = 12  # lines of that output that are shown


class Ranks(Pool):
    """A pool whose calls end early when a rank has raised and the others wait.

    answered: number of ranks that have answered the present call.
    """

    answered = 0

    def time_left(self, result):
        self.answered += 1
        ended = isinstance(result, dict) and (result.get("error") or result.get("exit") is not None)
        return GRACE if ended else None


class Session:
    """Runs statements on all ranks; a context manager that ends the ranks.

    exit_code: the argument of exit(), once all ranks have called it; None before.
    """

    def __init__(self, world_size, timeout, screen, script=None, arguments=(), module=None):
        """timeout: seconds for a statement; 0: no limit. script: its path, or None, with its arguments.

        module: the script's name, if it is to be imported as `python -m` does.
        """
        self.world_size, self.screen = world_size, screen
        self.script, self.arguments, self.module = script, list(arguments), module
        self.ranks = Ranks(world_size, timeout)
        self.folder = tempfile.TemporaryDirectory(prefix="cookbook-shell-")
        self.interrupted, self.exit_code = False, None
        self.script_works = True  # whether the script ran well; else new ranks start without it
        self.lines = []  # all that was typed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ranks.close()
        self.folder.cleanup()

    def start(self):
        """Start the ranks, and run the script if there is one; returns whether the ranks agree. Raises PoolError."""
        script = self.script if self.script_works else None
        self.ranks.call(f"{INTERPRETER}:ready")
        self.script_works = False  # until it has run well
        agreed = self.call("begin", script=script, arguments=self.arguments, module=self.module)
        self.script_works = agreed and script is not None
        self.exit_code = None  # as with python -i, a script that calls exit() ends only itself
        return agreed

    def run(self, source, first):
        """Run a statement, and show its output and moves. first: the number of its first line."""
        dead = self.ranks.ranks.exit_codes() if self.ranks.ranks else {}
        if dead:
            self.screen.line(f"{named(dead)} ended while nothing ran ({codes(dead)}).")
            self.renew()
        remember(self.lines)
        if not self.call("run", source=source, first=first):
            self.renew()

    def renew(self):
        """Start new ranks, and show what is lost."""
        again = self.script if self.script_works else None
        lost = f"the names are lost that were typed after {again}, which runs again" if again else "all names are lost"
        self.screen.line(f"New ranks start: {lost}.", "bold red")
        self.ranks.close()
        while not self.start():
            self.screen.line("New ranks start, without the script.", "bold red")
            self.ranks.close()

    def call(self, function, **arguments):
        """Call a function of interpreter.py that runs the user's code; returns whether the ranks still agree."""
        self.ranks.answered = 0
        following = Following(self.screen, self.folder.name, self.ranks)
        following.start()
        try:
            with self.interruptible():
                answers = self.ranks.call(f"{INTERPRETER}:{function}", folder=self.folder.name, **arguments)
            moved = []
            if function == "run" and any(answer["sent"] for answer in answers) and not disagreement(answers):
                moved = self.ranks.call(f"{INTERPRETER}:moved")
        except PoolError as error:
            following.finish()
            self.explain(error)
            return False
        except CallCancelled:  # Ctrl-C just before or after the call
            self.screen.line("Interrupted.", "bold red")
            return False
        finally:
            following.finish()
        if moved:
            self.screen.moves(moved)
        return self.judge(answers)

    @contextlib.contextmanager
    def interruptible(self):
        """Inside it, Ctrl-C ends the call, which then fails like a call that hangs."""
        self.interrupted = False

        def interrupt(number, frame):
            if not self.interrupted:
                self.interrupted = True
                raise CallCancelled

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def judge(self, answers):
        """Whether all ranks ended a statement in the same way; shows how they differ if not."""
        difference = disagreement(answers)
        if difference:
            self.screen.line(f"{difference}, so the ranks no longer agree.", "bold red")
            return False
        self.exit_code = answers[0]["exit"]
        return True

    def explain(self, error):
        """Show why a call failed. error: a PoolError."""
        if not error.hung:
            text, _, log = str(error).partition(": rank ")[2].partition("\n")
            lines = [line for line in log.splitlines() if line.strip() and not line.startswith(NOISE)]
            self.screen.line(f"Rank {text.rstrip(':')}.", "bold red")
            for line in lines[-LAST:]:
                self.screen.line(f"  {line}")
            return
        raised = {rank: answer["error"] for rank, answer in error.answers.items() if answer.get("error")}
        done, waiting = sorted(set(error.answers) - set(raised)), named(error.waiting)
        limit = "" if self.interrupted or raised else f" in {self.ranks.timeout:g} s"
        words = f"{waiting} did not finish this statement{limit}" + (f"; {named(done).lower()} did" if done else "")
        if self.interrupted:
            words = f"Interrupted: {words[0].lower()}{words[1:]}"
        elif raised:
            words = f"{named(raised)} raised {kinds(raised.values())}; {words[0].lower()}{words[1:]}"
        self.screen.line(f"{words}. {'It is' if len(error.waiting) == 1 else 'They are'} here:", "bold red")
        self.screen.by_ranks({rank: place_in_words(text) for rank, text in error.waiting.items()})

    def complete(self, text):
        """The completions of the name at the end of a text, on rank 0."""
        if self.ranks.ranks is None or self.ranks.ranks.exit_codes():
            return []
        try:
            return self.ranks.call(f"{INTERPRETER}:complete", text=text)[0]
        except PoolError:
            return []


def disagreement(answers):
    """In words, how the ranks ended a statement differently; "" if all ended it in the same way."""
    ends = {rank: (answer["error"], answer["exit"]) for rank, answer in enumerate(answers)}
    if len(set(ends.values())) == 1:
        return ""
    raised = {rank: error for rank, (error, _) in ends.items() if error}
    left = [rank for rank, (_, code) in ends.items() if code is not None]
    words = [f"{named([rank]).lower()} raised {kinds([error])}" for rank, error in raised.items()]
    words += [f"{named(left).lower()} called exit()"] if left else []
    rest = [rank for rank in ends if rank not in raised and rank not in left]
    text = ", ".join(words) + (f", and {named(rest).lower()} did not" if rest else ", not at the same place")
    return text[0].upper() + text[1:]


def named(ranks):
    """ "Rank 1" or "Ranks 0, 2"."""
    ranks = list(ranks)
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(map(str, ranks))}"


def kinds(errors):
    """The names of these errors, each once."""
    return ", ".join(dict.fromkeys(error if isinstance(error, str) else error[0] for error in errors))


def codes(ended):
    """{rank: exit code} in words, without the ranks."""
    return ", ".join(signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in ended.values())


def place_in_words(log):
    """Where a rank is, from its log with the lines of faulthandler: the user's frames, the innermost last."""
    frames = FRAME.findall(log.rpartition("(most recent call first)")[2])[::-1]
    first = min((number for number, (path, *_) in enumerate(frames) if path == INTERPRETER_FILE), default=0)
    of_user = [frame for frame in frames[first:] if not INSIDE.search(frame[0])]
    if not of_user:
        return "at the end of the statement: it waits for other ranks"
    frames = traceback.StackSummary.from_list([(path, int(line), name, None) for path, line, name in of_user])
    return "".join(frames.format())
