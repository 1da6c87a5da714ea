"""The command line of launch.sh: parsed and checked before any rank starts."""

import argparse
import os
import re
import socket
import subprocess
from pathlib import Path

from oneflow_cookbook.start import recipe, schedulers
from oneflow_cookbook.start.errors import UsageError

# launch.sh has the same words, for a typing error before .venv is made
NO_SUCH_SCRIPT = "no such file and no recipe: ./launch.sh lists the recipes, and --help the commands"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageError."""

    def error(self, message):
        raise UsageError(f"{message}; see ./{self.prog} --help")


def parser():
    """The options of launch.sh; their help is in launch.sh, which can show it before Python is set up."""
    options = Parser(prog="launch.sh", add_help=False, allow_abbrev=False)
    options.add_argument("-n", "--nproc_per_node", "--nproc-per-node", type=int)
    options.add_argument("--nnodes", type=int)
    options.add_argument("--node_rank", "--node-rank", type=int)
    options.add_argument("--master_addr", "--master-addr")
    options.add_argument("--master_port", "--master-port", type=int, default=0)
    options.add_argument("--max-restarts", "--max_restarts", type=int, default=0)
    options.add_argument("--log-dir", "--log_dir")
    options.add_argument("--timeout", type=float)
    options.add_argument("--silent", type=float, default=300.0)
    options.add_argument("--grace", type=float, default=25.0)
    add_script(options)
    return options


def add_script(options):
    """Add to a parser what is to run: a script, or -m and a module, with arguments."""
    options.add_argument("-m", nargs=argparse.REMAINDER, dest="module")
    options.add_argument("script", nargs="?")
    options.add_argument("arguments", nargs=argparse.REMAINDER)


def find_script(options):
    """Find what is to run; sets `script`, its file, `arguments`, and `module`, None unless -m was typed.

    Returns the script's WORLD_SIZES, None if it has none. Raises UsageError.
    """
    if options.module is None:
        path = recipe.find(options.script)
        if path is None:
            raise UsageError(f"{options.script}: {NO_SUCH_SCRIPT}")
    else:
        if not options.module or options.script is not None:
            raise UsageError("after -m type the name of one module, and its arguments: -m package.train --steps 3")
        name, *options.arguments = options.module
        try:
            options.module, path = recipe.find_module(name)
        except ValueError as error:
            raise UsageError(str(error)) from None
    options.script = str(path)
    try:
        return recipe.world_sizes(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


OF_JOBS = ("node_rank", "master_addr", "master_port", "max_restarts", "log_dir", "silent", "grace")


def checked(arguments, command=None, flags=(), values=None):
    """The parsed command line: the script is looked up, and missing options are filled in. Raises UsageError.

    command: such as "show", which runs on one host and takes no options of jobs. flags: its options without a value;
    values: {option: (type, default)} of those that have one.
    """
    known = parser()
    for flag in flags:
        known.add_argument(flag, action="store_true")
    for option, (kind, default) in (values or {}).items():
        known.add_argument(option, type=kind, default=default)
    options = known.parse_args(arguments)
    if options.script is None and options.module is None:
        raise UsageError("name a Python script, such as recipes/data_parallel.py")
    on_one_host = f"{command} runs on one host: type no --nnodes, and -n 4 for four ranks"
    if command and options.nnodes not in (None, 1):
        raise UsageError(on_one_host)
    for name in OF_JOBS if command else ():
        if getattr(options, name) != known.get_default(name):
            raise UsageError(f"{command} has no --{name.replace('_', '-')}: it is an option of jobs")
    sizes = find_script(options)
    if options.timeout is not None and not options.timeout >= 0:
        raise UsageError(f"--timeout must be a number of seconds, or 0 for no limit, got {options.timeout:g}")
    if not options.silent >= 0:
        raise UsageError(f"--silent must be a number of seconds, or 0 for never, got {options.silent:g}")
    if not options.grace >= 0:
        raise UsageError(f"--grace must be a number of seconds, 0 or more, got {options.grace:g}")
    if options.master_port and not 1024 <= options.master_port <= 65535:
        raise UsageError(f"--master_port must be from 1024 to 65535, got {options.master_port}")
    fill_in_launchers(options)
    if command and options.nnodes > 1:
        raise UsageError(on_one_host)
    fill_in_ranks(options, sizes)
    # argparse takes --dev cuda too
    if sizes and re.search(r"(^| )--d(e(v(i(ce?)?)?)?)?[ =]cuda", " ".join(options.arguments)):
        check_gpus(options.nproc_per_node)
    return options


def file_of(options):
    """The absolute path of the script, as Python shows it in tracebacks."""
    return os.path.abspath(options.script) if options.module else str(Path(options.script).resolve())


def fill_in_launchers(options):
    """Fill in the launchers of the job: from the options, else from the variables of srun or mpirun.

    Raises UsageError.
    """
    typed = options.nnodes is not None or options.node_rank is not None
    options.task = task = None if typed else schedulers.task(os.environ)
    if task:
        options.nnodes, options.node_rank = task.count, task.number
        options.nproc_per_node = 1 if options.nproc_per_node is None else options.nproc_per_node
        options.master_addr = options.master_addr or task.address
        options.master_port = options.master_port or task.port
        if not options.master_addr:
            raise UsageError("mpirun does not say where task 0 runs: type --master_addr HOST")
        ranks = task.count * options.nproc_per_node
        if task.hosts and ranks % task.hosts:
            raise UsageError(f"OneFlow 0.9.0 would hang: {ranks} ranks cannot be divided by {task.hosts} hosts")
    options.nnodes = 1 if options.nnodes is None else options.nnodes
    options.node_rank = options.node_rank or 0
    if options.nnodes < 1:
        raise UsageError(f"--nnodes must be 1 or more, got {options.nnodes}")
    if not 0 <= options.node_rank < options.nnodes:
        allowed = f"from 0 to {options.nnodes - 1} with --nnodes {options.nnodes}"
        raise UsageError(f"--node_rank must be {allowed}, got {options.node_rank}")
    if options.nnodes == 1:
        options.master_addr = "127.0.0.1"
        return
    if not (options.master_addr and options.master_port):
        wanted = "--master_addr HOST --master_port 29500"
        raise UsageError(f"--nnodes needs host 0's address and a port, the same on each host: {wanted}")
    check_address(options)
    if options.max_restarts:
        loop = 'a loop around srun or mpirun can, as docs/clusters.md has it, "When a rank dies"'
        raise UsageError(f"--max-restarts cannot restart other launchers: {loop}")


def check_address(options):
    """Raises UsageError if ranks could not meet at --master_addr, so that they would wait forever."""
    address = options.master_addr
    if ":" in address:
        raise UsageError(f"--master_addr {address}: OneFlow 0.9.0 listens at IPv4 addresses only: type one")
    hosts = options.task.hosts if options.task else 0
    if options.node_rank == 0 and hosts != 1:
        try:
            meant = socket.gethostbyname(address)
        except OSError:  # its ranks say so, and wait until it is known
            return
        # Launchers that are all on this host may use such an address. Debian gives the host's own name one.
        if meant.startswith("127.") and (hosts or address not in (meant, "localhost")):
            reason = f"on host 0 it is {meant}, where ranks of other hosts look for themselves"
            raise UsageError(f"--master_addr {address}: {reason}: type its address")


def fill_in_ranks(options, sizes):
    """Fill in the number of ranks of each launcher. Raises UsageError if the script does not run on so many.

    sizes: the script's WORLD_SIZES, None if it has none.
    """
    if options.nproc_per_node is None:  # the first of WORLD_SIZES that the launchers divide
        fitting = [size for size in sizes or (2,) if size % options.nnodes == 0]
        options.nproc_per_node = fitting[0] // options.nnodes if fitting else 1
    if options.nproc_per_node < 1:
        raise UsageError(f"-n must be 1 or more, got {options.nproc_per_node}")
    world_size = options.nnodes * options.nproc_per_node
    if not sizes or world_size in sizes:
        return
    first, last = min(sizes), max(sizes)
    consecutive = 1 < len(sizes) == last - first + 1
    accepted = f"{first} to {last}" if consecutive else " or ".join(", ".join(map(str, sorted(sizes))).rsplit(", ", 1))
    several = f" ({options.nproc_per_node} of each of {options.nnodes} launchers)"
    hint = f": type -n {sizes[0]}" if options.nnodes == 1 else several
    raise UsageError(f"{Path(options.script).name} runs on {accepted} ranks, not on {world_size}{hint}")


def check_gpus(ranks):
    """Raises UsageError if this host shows fewer GPUs that OneFlow 0.9.0 has code for than it has ranks.

    Of CUDA_VISIBLE_DEVICES only the number of entries counts, and not which GPUs they are.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        usable = []
    else:
        if answer.returncode == 2:  # before CUDA 11.6, nvidia-smi does not know compute_cap
            return
        usable = re.findall(r"^[678]\.\d$", answer.stdout, flags=re.MULTILINE) if answer.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        usable = usable[: len([device for device in visible.split(",") if device.strip() not in ("", "-1")])]
    if len(usable) < ranks:
        wanted = "each rank needs a GPU of compute capability 6.0 to 8.9"
        raise UsageError(f"{wanted}, got {len(usable)} for {ranks}: type --device cpu")
