"""The kinds of faults: what is done, and what must come of it."""

import signal
from dataclasses import dataclass
from typing import Callable, Optional

from benchmarks import fault_actions as do
from benchmarks.fault_actions import at_some_moment, from_a_checkpoint, nothing, signal_launcher, signal_rank
from benchmarks.fault_actions import while_it_trains as in_training

DEATH = 15  # seconds within which a job must end, or start again, after a death
ANY = None  # exit code: any but 0


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and what must come of it."""

    part: str  # of the page
    name: str  # in the words of the page
    inject: Callable  # does it to the job of a Trial; False if it came too late
    code: Optional[int]  # the exit code of every launcher that is left; 0: the job continues
    says: str = ""  # a pattern that they say; RANK and NODE stand for what was hit
    hosts: tuple = (1, 2)
    cards: int = 2  # how often it comes in a round of tries
    prepare: Callable = nothing  # before the job starts
    restarts: bool = False  # whether half of the tries have --max-restarts 2, which brings the job back
    may_continue: bool = False  # whether the job may also continue, as if nothing had happened
    speakers: str = "all"  # who must say it: all that are left, "hit": that host, "first": node 0, "any": one of them
    gone: bool = False  # whether the launcher that is hit ends silently, with a code of its own
    on_signal: str = ""  # what a rank does on SIGUSR2: raise, or exit with a code
    silent: bool = False  # whether only --timeout ends the job
    within: Optional[float] = DEATH  # seconds from the fault to the end; None: it need not end soon
    keeps: bool = True  # whether the checkpoints are still good
    shows: str = ""  # a pattern of the line that the page quotes, if not `says`


ERROR = r"^\[\d+\] [\w.]*(Error|Exception)\b"
RANK_FAILED = r"rank RANK of \d+NODE failed: "
GONE = r"node \d \([^)]*\) is gone"
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)


def ends_all(number):
    return rf"{number.name}(NODE: every rank is ended|: nothing)"


RANKS = [
    Fault("Ranks", "a rank is killed (SIGKILL)", at_some_moment(signal_rank(signal.SIGKILL)), 137,
          RANK_FAILED + "killed by signal 9", cards=4, restarts=True),
    Fault("Ranks", "a rank is killed together with a second one",
          at_some_moment(do.signal_two_ranks(signal.SIGKILL)), 137, RANK_FAILED + "killed by signal 9", restarts=True),
    Fault("Ranks", "a rank is killed, and a rank again after the restart",
          at_some_moment(do.kill_again_after_the_restart), 0, "rank .* failed: killed by signal 9"),
    Fault("Ranks", "a rank is ended by a signal: TERM, HUP, QUIT, XCPU", at_some_moment(signal_rank(*ENDINGS)), ANY,
          RANK_FAILED + "killed by signal", restarts=True),
    Fault("Ranks", "a rank crashes: SIGSEGV, SIGBUS, SIGFPE, SIGILL", at_some_moment(signal_rank(*CRASHES)), ANY,
          RANK_FAILED + "killed by signal", restarts=True),
    Fault("Ranks", "a rank aborts (SIGABRT)", at_some_moment(signal_rank(signal.SIGABRT)), 134,
          r"rank \d of .* failed: killed by signal 6", restarts=True),
    Fault("Ranks", "a rank raises an exception", in_training(signal_rank(signal.SIGUSR2)), 1,
          RANK_FAILED + "exit code 1", on_signal="raise", restarts=True),
    Fault("Ranks", "a rank calls sys.exit(3)", in_training(signal_rank(signal.SIGUSR2)), 3,
          RANK_FAILED + "exit code 3", on_signal="3", restarts=True),
    Fault("Ranks", "a rank calls sys.exit(0)", in_training(signal_rank(signal.SIGUSR2)), 124,
          "rank RANK of . has (run to its end|ended)", on_signal="0", silent=True, speakers="hit", cards=1),
    Fault("Ranks", "a rank is stopped (SIGSTOP)", in_training(signal_rank(signal.SIGSTOP)), 124,
          "rank RANK of . is stopped", silent=True, speakers="hit", cards=1),
    Fault("Ranks", "a rank is stopped for 1 to 3 s", at_some_moment(do.pause_rank), 0),
    Fault("Ranks", "a rank gets no more memory (RLIMIT_AS)", at_some_moment(do.no_more_memory), ANY, RANK_FAILED,
          may_continue=True, within=None),
    Fault("Ranks", "a rank can open no more files (RLIMIT_NOFILE)", at_some_moment(do.no_more_files), ANY, RANK_FAILED,
          may_continue=True, within=None),
]  # fmt: skip

LAUNCHERS = [
    *(Fault("launch.sh", f"launch.sh {name}", at_some_moment(signal_launcher(number)), 128 + number, ends_all(number))
      for name, number in {"gets Ctrl-C (SIGINT)": signal.SIGINT, "gets SIGTERM": signal.SIGTERM,
                           "gets SIGHUP": signal.SIGHUP, "gets SIGQUIT": signal.SIGQUIT}.items()),
    Fault("launch.sh", "launch.sh gets SIGUSR1", at_some_moment(signal_launcher(signal.SIGUSR1)), 0,
          "most recent call first", speakers="hit"),
    Fault("launch.sh", "launch.sh is killed (SIGKILL)", at_some_moment(signal_launcher(signal.SIGKILL)), 1, GONE,
          gone=True),
    Fault("launch.sh", "launch.sh is stopped for 1 to 3 s", at_some_moment(do.pause_launcher), 0),
]  # fmt: skip

HOSTS = [
    Fault("Hosts", "a host dies", in_training(do.kill_node), 1, "NODE is gone", hosts=(2,), gone=True),
    Fault("Hosts", "a host freezes for 13 s", in_training(do.freeze_node), 1, GONE, hosts=(2,), cards=1, within=30),
    Fault("Hosts", "a host never comes", nothing, 2, "did not come within --timeout", hosts=(2,), cards=1, within=None,
          prepare=do.alone),
    Fault("Hosts", "a host comes 3 to 6 s late", do.start_the_other, 0, "waiting for node|node 0 at", hosts=(2,),
          prepare=do.late, speakers="any"),
    Fault("Hosts", "a host is started twice", do.start_again, 0, hosts=(2,), cards=1),
    Fault("Hosts", "a host starts another version of the script, or other arguments", nothing, 2,
          "type the same on each node|did not come within --timeout", hosts=(2,), prepare=do.differ, within=None,
          shows="type the same on each node"),
    Fault("Hosts", "a host starts a second job on the same port", do.start_another_job, 0),
    Fault("Hosts", "a host has no loopback interface", nothing, 2, "loopback", prepare=do.no_loopback, within=None,
          speakers="hit"),
]  # fmt: skip

NETWORK = [
    Fault("Network", "the link goes down", in_training(do.pull_link), 1, GONE, hosts=(2,)),
    Fault("Network", "the link goes down for 2 s", in_training(do.pull_link_for_a_moment), 0, hosts=(2,)),
    Fault("Network", "the link is cut in one direction", in_training(do.cut_one_direction), 1, GONE, hosts=(2,)),
    Fault("Network", "the link is slow from then on (4 Mbit/s)", at_some_moment(do.slow_link), 0, hosts=(2,)),
]  # fmt: skip

RESOURCES = [
    Fault("Disk, memory, files", "the disk is full at a checkpoint", nothing, 1, RANK_FAILED + "exit code 1",
          prepare=do.small_disk, within=None, shows=ERROR),
    Fault("Disk, memory, files", "the disk is read-only at a checkpoint", at_some_moment(do.make_read_only), 1,
          RANK_FAILED + "exit code 1", prepare=do.disk_that_will_be_read_only, within=None, shows=ERROR),
    Fault("Disk, memory, files", "/dev/shm is full or read-only", nothing, 0, prepare=do.no_shared_memory, cards=1),
    Fault("Disk, memory, files", "few files can be open (ulimit -n 10 to 100)", nothing, ANY, r"launch\.sh: ",
          prepare=do.few_files, may_continue=True, within=None),
    Fault("Disk, memory, files", "little memory is allowed (ulimit -v)", nothing, 2, "ulimit -v allows",
          prepare=do.few_addresses, within=None, cards=1),
]  # fmt: skip

CHECKPOINTS = [
    Fault("Checkpoints", "an unfinished checkpoint is beside the last", nothing, 0, "resumes after step 30",
          speakers="first", prepare=from_a_checkpoint(do.leave_unfinished)),
    Fault("Checkpoints", "all checkpoints are gone", nothing, 0, "starts with step 1", speakers="first",
          prepare=from_a_checkpoint(do.remove_all)),
    *(Fault("Checkpoints", name, nothing, 1, RANK_FAILED + "exit code 1", within=None, keeps=False,
            prepare=from_a_checkpoint(damage), shows=ERROR)
      for name, damage in {
          "a file of the checkpoint is truncated": do.truncate,
          "a file of the checkpoint is missing": do.remove_a_file,
          "a file of the checkpoint is overwritten": do.overwrite,
          "the checkpoint is of the other mode, eager or graph": do.take_that_of_the_other_mode,
          "the checkpoint is of another model": do.take_that_of_another_model,
          "the last checkpoint is an empty folder": do.add_an_empty_folder,
          "a file is in place of the folder of checkpoints": do.put_a_file_there}.items()),
    Fault("Checkpoints", "numbers in a checkpoint are changed", nothing, 1, "Not equal to tolerance", within=None,
          keeps=False, prepare=from_a_checkpoint(do.change_numbers), speakers="any",
          shows="Not equal to tolerance"),
]  # fmt: skip

FAULTS = [*RANKS, *LAUNCHERS, *HOSTS, *NETWORK, *RESOURCES, *CHECKPOINTS]
