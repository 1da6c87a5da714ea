"""What can be done to a job of elastic_training.py: before it starts (`prepare`), and while it runs (`inject`).

Each takes a faults.Trial. What it draws comes from trial.draw, so that a try can be repeated. An `inject` returns False
if it came too late, when the job or the rank had all but ended.
"""

import contextlib
import resource
import shutil
import signal
import time
from pathlib import Path

from benchmarks.elastic_jobs import ELASTIC, EVERY, STEPS, Job, Setting, newest, signal_process

HALF = STEPS // 2


def nothing(trial):
    return True


def chosen(trial, things):
    """One of these things, as drawn."""
    return things[int(trial.draw.amount * len(things))]


# when


def at_some_moment(do):
    """At a random moment between the start and the end of the job."""

    def inject(trial):
        time.sleep(max(0, trial.moment() - (time.monotonic() - trial.job.begun)))
        return do(trial)

    return inject


def while_it_trains(do):
    """After any checkpoint but the last ones."""

    def inject(trial):
        step = EVERY * (1 + int(trial.draw.moment * (STEPS // EVERY // 2)))
        while newest(trial.job.checkpoints) < step and trial.job.goes_on():
            time.sleep(0.002)
        return do(trial)

    return inject


# to ranks


def victim(trial, others=()):
    """The rank that is hit, and its process; None if there is none any more. Waits until there is one."""
    running = {}
    while not running:
        goes_on = trial.job.goes_on()
        running = {rank: pid for rank, pid in trial.job.ranks().items() if rank not in others}
        if not goes_on:
            return None
    rank = sorted(running)[int(trial.draw.victim * len(running))]
    trial.hit(rank)
    return rank, running[rank]


def signal_rank(*numbers):
    """One of these signals to any of the ranks."""

    def send(trial):
        found = victim(trial)
        number = chosen(trial, numbers)
        trial.detail = number.name
        return bool(found) and signal_process(found[1], number)

    return send


def signal_two_ranks(number):
    def send(trial):
        first = victim(trial)
        second = first and victim(trial, others=[first[0]])
        trial.hit_rank = None
        sent = [signal_process(found[1], number) for found in (first, second) if found]
        return sent == [True, True]

    return send


def kill_again_after_the_restart(trial):
    job = trial.job
    if not signal_rank(signal.SIGKILL)(trial):
        return False
    while job.goes_on() and not job.when("restart 1 of 2"):
        time.sleep(0.01)
    time.sleep(trial.draw.amount * trial.seconds)
    trial.again = "restart 2 of 2"
    return signal_rank(signal.SIGKILL)(trial)


def pause_rank(trial):
    """Stop a rank for some seconds."""
    found = victim(trial)
    if not found or not signal_process(found[1], signal.SIGSTOP):
        return False
    trial.detail = f"{1 + 2 * trial.draw.amount:.1f} s"
    time.sleep(1 + 2 * trial.draw.amount)
    return signal_process(found[1], signal.SIGCONT)


def no_more_memory(trial):
    """A rank gets no more addresses than it has now."""
    found = victim(trial)
    if found:
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{found[1]}/statm").read_text().split()[0])
            limit(found[1], resource.RLIMIT_AS, pages * resource.getpagesize())
            return True
    return False


def no_more_files(trial):
    """A rank can open no more files than it has open now."""
    found = victim(trial)
    if found:
        with contextlib.suppress(OSError):
            limit(found[1], resource.RLIMIT_NOFILE, len(list(Path(f"/proc/{found[1]}/fd").iterdir())))
            return True
    return False


def limit(pid, which, soft):
    _, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, hard))


# to launch.sh


def any_node(trial):
    nodes = sorted(trial.job.runs)
    trial.hit_node = nodes[int(trial.draw.victim * len(nodes))]
    return trial.hit_node


def signal_launcher(number):
    """As a terminal does, or a scheduler: to launch.sh, not to its ranks."""

    def send(trial):
        node = any_node(trial)
        launchers = trial.job.launchers(node)
        for pid in launchers:
            signal_process(pid, number)
        return bool(launchers)

    return send


def pause_launcher(trial):
    launchers = trial.job.launchers(any_node(trial))
    return pause(launchers, 1 + 2 * trial.draw.amount)


def pause(pids, seconds):
    stopped = [pid for pid in pids if signal_process(pid, signal.SIGSTOP)]
    time.sleep(seconds)
    for pid in stopped:
        signal_process(pid, signal.SIGCONT)
    return bool(stopped)


# to hosts and the network


def kill_node(trial):
    node, there = any_node(trial), trial.job.ranks()
    for pid in trial.job.runs[node].alive():
        signal_process(pid, signal.SIGKILL)
    return bool(there)


def freeze_node(trial):
    """As a virtual machine that is suspended, for longer than launch.sh waits."""
    node, there = any_node(trial), trial.job.ranks()
    trial.begin = time.monotonic()
    pause(trial.job.runs[node].alive(), 13)
    return bool(there)


def pull_link(trial):
    there = trial.job.ranks()
    trial.hosts.link(any_node(trial), "down")
    return bool(there)


def pull_link_for_a_moment(trial):
    there, node = trial.job.ranks(), any_node(trial)
    trial.hosts.link(node, "down")
    time.sleep(2)
    trial.hosts.link(node, "up")
    return bool(there)


def cut_one_direction(trial):
    there, node = trial.job.ranks(), any_node(trial)
    trial.detail = f"from host {node}"
    trial.hosts.cut(node, 1 - node)
    return bool(there)


def slow_link(trial):
    trial.hosts.slow(any_node(trial), "4mbit")
    return trial.job.goes_on()


def alone(trial):
    """One host never comes."""
    trial.setting.nodes = [int(trial.draw.victim * 2)]
    trial.setting.timeout = 4


def late(trial):
    trial.setting.nodes = [int(trial.draw.victim * 2)]


def start_the_other(trial):
    time.sleep(2.5 + 4 * trial.draw.amount)
    trial.job.start(1 - trial.setting.nodes[0])
    return True


def start_again(trial):
    """Start a host's part of the job a second time."""
    time.sleep(trial.draw.moment * trial.seconds / 2)
    trial.job.launchers(0)  # waits until the ranks are there: all hosts have come
    node = int(trial.draw.victim * 2)
    setting = Setting(port=trial.job.port, nodes=[node])
    trial.second = Job(trial.hosts, 2, trial.draw.graph, trial.folder, setting)
    return True


def start_another_job(trial):
    """Start a second job on the same port, with checkpoints of its own."""
    at_some_moment(nothing)(trial)
    trial.job.launchers(0)  # waits until the ranks are there
    folder = trial.folder / "second"
    folder.mkdir()
    setting = Setting(port=trial.job.port)
    trial.second = Job(trial.hosts, trial.draw.hosts, trial.draw.graph, folder, setting)
    return trial.job.goes_on()


def differ(trial):
    """The launchers of two hosts do not start the same."""
    trial.detail = chosen(trial, ("version of the script", "arguments"))
    trial.setting.timeout = 8
    if trial.detail == "arguments":
        trial.setting.more = {1: ["--device", "cpu"]}
        return
    other = trial.folder / "other" / ELASTIC.name
    other.parent.mkdir()
    other.write_text(ELASTIC.read_text() + "# changed on one host\n")
    trial.setting.scripts = {1: other}


def no_loopback(trial):
    """On one of the hosts."""
    node = int(trial.draw.victim * trial.draw.hosts)
    trial.hit_node, trial.detail = node, f"on host {node}"
    trial.setting.timeout = 20
    trial.hosts.loopback(node, "down")


# to what a host has


def shell(script, *arguments):
    """Words that run a line of bash before launch.sh, which is "$@" there."""
    return ["bash", "-c", script, "before", *arguments]


def in_a_namespace(script):
    return ["unshare", "--mount", *shell(script)]


def on_a_disk(trial, size, meanwhile=""):
    """Checkpoints go to a disk of their own, whose files are kept when it is gone with the job."""
    disk, kept = trial.folder / "checkpoints", trial.folder / "kept"
    kept.mkdir()
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={size} none {disk}"
    script = f'{mount}; {meanwhile} "$@"; code=$?; {"kill $!;" if meanwhile else ""} cp -r {disk}/. {kept}; exit $code'
    trial.setting.before = in_a_namespace(script)


def small_disk(trial):
    """It has room for no checkpoint, for one of 44 KB (eager) or 52 KB, or for two."""
    trial.detail = chosen(trial, ("24k", "56k", "72k", "80k"))
    on_a_disk(trial, trial.detail)


def disk_that_will_be_read_only(trial):
    now = trial.folder / "now"
    remount = f"mount -o remount,ro {trial.folder / 'checkpoints'} 2>/dev/null"
    wait = f"until [[ -e {now} ]] && {remount}; do sleep 0.02; done"
    on_a_disk(trial, "1m", meanwhile=f"{{ {wait}; }} &")


def make_read_only(trial):
    (trial.folder / "now").touch()
    return True


def no_shared_memory(trial):
    """/dev/shm has no room, or nothing can be written there."""
    options = chosen(trial, ("size=4k", "ro"))
    trial.detail = "full" if options == "size=4k" else "read-only"
    fill = "head -c 4096 /dev/zero >/dev/shm/full;" if options == "size=4k" else ""
    trial.setting.before = in_a_namespace(f'mount -t tmpfs -o {options} none /dev/shm; {fill} exec "$@"')


def few_files(trial):
    """ulimit -n before the start."""
    trial.detail = str(10 + int(trial.draw.amount * 90))
    trial.setting.before = shell(f'ulimit -n {trial.detail}; exec "$@"')


def few_addresses(trial):
    """ulimit -v before the start."""
    trial.detail = f"{500 + int(trial.draw.amount * 4400)} MB"
    trial.setting.before = shell(f'ulimit -v {trial.detail.split()[0]}000; exec "$@"')


# to checkpoints, before a start


def from_a_checkpoint(damage):
    """The job starts from the checkpoint of step HALF, to which something was done."""

    def prepare(trial):
        shutil.copytree(trial.known.half, trial.folder / "checkpoints")
        damage(trial, trial.folder / "checkpoints" / str(HALF))

    return prepare


def its_files(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def leave_unfinished(trial, checkpoint):
    """As a death during a save does."""
    shutil.copytree(checkpoint, checkpoint.with_name("unfinished"))
    chosen(trial, its_files(checkpoint.with_name("unfinished"))).unlink()


def truncate(trial, checkpoint):
    path = chosen(trial, its_files(checkpoint))
    trial.detail = path.name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * trial.draw.moment)])


def remove_a_file(trial, checkpoint):
    path = chosen(trial, its_files(checkpoint))
    trial.detail = path.name
    path.unlink()


def overwrite(trial, checkpoint):
    """With bytes that mean nothing."""
    path = chosen(trial, [path for path in its_files(checkpoint) if path.name != "out"])
    trial.detail = path.name
    path.write_bytes(b"\xff" * path.stat().st_size)


def change_numbers(trial, checkpoint):
    tensors = [path for path in its_files(checkpoint) if path.name == "out" and path.stat().st_size > 4096]
    path = chosen(trial, tensors)  # weight or momentum: a graph also saves single numbers
    data = path.read_bytes()
    path.write_bytes(b"\x41" * 256 + data[256:])  # 64 numbers become 12.1


def take_that_of_the_other_mode(trial, checkpoint):
    shutil.rmtree(checkpoint)
    shutil.copytree(trial.known_otherwise.half / str(HALF), checkpoint)


def take_that_of_another_model(trial, checkpoint):
    shutil.rmtree(checkpoint)
    shutil.copytree(trial.known.foreign / str(HALF), checkpoint)


def add_an_empty_folder(trial, checkpoint):
    checkpoint.with_name(str(HALF + EVERY)).mkdir()


def remove_all(trial, checkpoint):
    shutil.rmtree(checkpoint.parent)


def put_a_file_there(trial, checkpoint):
    """In place of the folder of all checkpoints."""
    shutil.rmtree(checkpoint.parent)
    checkpoint.parent.write_text("")
