"""Rendezvous: how ranks find each other, by variables, by a TCP address or by a file, before OneFlow is imported.

                       rank 0        rank 1        SBP
    number    (2, 1)   row 0         row 1         S(0)
    partial   (1, 1)   of its rows   of its rows   P
    sum       (1, 1)   whole         whole         B

OneFlow knows one way: MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in the environment of each rank. The other two end
there as well, so they help where something is not known beforehand:

    --meet                   known to each rank        not known              who is asked
    env://                   all four                  nothing                nobody: a launcher has set them
    tcp://10.0.0.1:29400     address, WORLD_SIZE       which rank is where    the first rank that runs there
    file:///shared/job-17    file, WORLD_SIZE, RANK    where rank 0 is        rank 0, whose address is in the file

Stale: a file that an earlier job has left names a port at which nobody has its secret, so it is read again until rank 0
       has put its own there. Each job needs an address or a file of its own all the same.
Lost:  who has met is told so at once, and waits for the others until --wait is over. A rank that dies after that, while
       OneFlow starts, leaves the others in their import; they show where they are and end when --wait is over again.
Moves: to meet, a few lines of text; then an all-reduce of one number, 2 (n-1)/n of it from each of n ranks.
Run:   ./launch.sh recipes/starting/rendezvous.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/starting/rendezvous.py [--graph]
       WORLD_SIZE=2 python recipes/starting/rendezvous.py --meet tcp://10.0.0.1:29400     (once for each rank, on any host)
Use it where a scheduler places ranks and does not say where rank 0 went. Else a launcher that sets them is simpler.
Source: OneFlow documentation, "Launching distributed training"; PyTorch's init_process_group has the same three.
"""

import argparse
import contextlib
import faulthandler
import fcntl
import importlib.util
import json
import os
import re
import secrets
import socket
import struct
import sys
import time

WAYS = r"env://|tcp://([\w-]+(?:\.[\w-]+)*):(\d{1,5})|file://(/.*[^/])"
STRANGER, SILENT = 2, 6  # seconds for who has come to say hello, and for who receives to answer it


def stop(why):
    print(f"{sys.argv[0]}: {why}", file=sys.stderr)
    sys.exit(2)


def own_addresses():
    """The IPv4 addresses of this host, the loopback's last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this interface has none
                answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def is_here(address):
    """Whether an address is one of this host."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def say(connection, **words):
    with contextlib.suppress(OSError):  # who has left hears nothing
        connection.settimeout(5)
        connection.sendall((json.dumps(words) + "\n").encode())


def hear(connection, deadline):
    """What the other side says, {} if it is nothing that we understand."""
    try:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        words = json.loads(connection.makefile("rb", 0).readline())  # a later line stays there
        return words if isinstance(words, dict) else {}
    except (OSError, ValueError):
        return {}


def waits(connection):
    """Whether the other side is still there."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except OSError as error:
        return isinstance(error, BlockingIOError)  # it is, and says nothing


def let_in(connection, address, own, secret):
    """The rank that has come, in a list, or an empty list if it is not one of ours."""
    hello = hear(connection, time.monotonic() + STRANGER)
    if hello.get("secret") != secret or not {"via", *own} <= set(hello):
        return []
    theirs, ours = hello["world_size"], own["world_size"]
    if theirs != ours:
        where = "at the rank that receives us: set the same for each rank"
        say(connection, refused=f"WORLD_SIZE is {theirs} here, and {ours} {where}")
        return []
    say(connection, met=True)
    return [{**hello, "connection": connection, "address": None if is_here(address[0]) else address[0]}]


def receive_all(listener, own, secret, deadline):
    """Wait for all other ranks, number those that have no number, and tell each its own and where rank 0 is."""
    guests, n = [], own["world_size"]
    listener.settimeout(0.1)
    while len(guests) < n - 1:
        if time.monotonic() > deadline:
            stop(f"only {len(guests) + 1} of {n} ranks came: start the others as well, or --wait longer")
        with contextlib.suppress(OSError):  # nobody has come
            guests += let_in(*listener.accept(), own, secret)
        guests = [one for one in guests if waits(one["connection"])]  # others have given up
    here = next((one["via"] for one in guests if one["address"]), "127.0.0.1")  # as other hosts see us
    everyone = [{**one, "address": one.get("address") or here} for one in [own, *guests]]
    hosts = list(dict.fromkeys(one["address"] for one in everyone))  # each once, our own first
    free = [number for number in range(n) if number not in [one["rank"] for one in everyone]]
    for one in sorted(everyone, key=lambda one: hosts.index(one["address"])):  # neighbours on each host
        one["rank"] = free.pop(0) if one["rank"] is None else one["rank"]
    numbers, told = sorted(one["rank"] for one in everyone), {}
    if numbers != list(range(n)):
        told["refused"] = f"the ranks must be 0 to {n - 1}, each once, not {numbers}: set RANK right"
    elif n % len(hosts):
        told["refused"] = f"OneFlow 0.9.0 would hang: {n} ranks cannot be divided by {len(hosts)} hosts"
    else:
        told["leader"] = {one["rank"]: (one["address"], one["port"]) for one in everyone}[0]
    for one in everyone[1:]:
        say(one["connection"], rank=one["rank"], **told)
    if "refused" in told:
        stop(told["refused"])
    return {"rank": everyone[0]["rank"], **told}


def ask(places, own, secret, deadline):
    """Ask whoever receives at one of these (address, port), and wait until all have come; else why nobody did."""
    found = {}
    for place in places:
        try:
            with socket.create_connection(place, timeout=2) as connection:
                say(connection, secret=secret, via=connection.getpeername()[0], **own)
                answer = hear(connection, min(deadline, time.monotonic() + SILENT))
                met = "met" in answer
                answer = hear(connection, deadline) if met else answer
        except OSError:
            continue
        if "refused" in answer:
            stop(answer["refused"])
        if "leader" in answer:
            return answer
        found = {"met": True} if met else {"why": "; another program may have the port"}
    return found


def by_tcp(host, port, own, deadline):
    """Whoever runs on that host and comes first receives the others."""
    try:
        places = [place for *_, place in socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        return {"why": f"; no address of {host} is known ({error})"}
    if not is_here(min(places)[0]):  # one host of those that share the name
        return ask(places, own, "", deadline)
    try:
        listener = socket.create_server(("", port))
    except PermissionError:
        stop(f"--meet tcp://{host}:{port}: port {port} is not for all users: take one from 1024 up")
    except OSError:  # somebody has come before
        return ask(places, own, "", deadline)
    with listener:
        return receive_all(listener, own, "", deadline)


def by_file(path, own, deadline):
    """Rank 0 receives the others, who find it by the file."""
    if own["rank"] != 0:
        try:
            with open(path) as file:
                there = json.load(file)
            return ask([(one, there["port"]) for one in there["addresses"]], own, there["secret"], deadline)
        except (OSError, ValueError, KeyError, TypeError):  # not there yet, or of something else
            return {}
    secret = secrets.token_hex(16)
    with socket.create_server(("", 0)) as listener:
        try:
            with open(f"{path}.{secret}", "w") as file:
                json.dump({"addresses": own_addresses(), "port": listener.getsockname()[1], "secret": secret}, file)
            os.replace(file.name, path)  # whole, and in place of an earlier job's
        except OSError as error:
            with contextlib.suppress(OSError):
                os.remove(f"{path}.{secret}")
            stop(f"--meet file://{path}: {error.strerror}: name a file in a folder that all hosts share")
        try:
            return receive_all(listener, own, secret, deadline)
        finally:
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                if secret in file.read():  # else it is another job's by now
                    os.remove(path)


def refuse(scheme, world_size, rank):
    """Stop if these can never meet, whoever else comes."""
    if not world_size.isdecimal() or int(world_size) < 2 or (scheme == "file" and not rank):
        needed = "a RANK and " * (scheme == "file") + "a WORLD_SIZE of 2 or more"
        stop(f"--meet {scheme}:// needs {needed} in the environment of each rank")
    if rank and not (rank.isdecimal() and int(rank) < int(world_size)):
        stop(f"RANK must be a number from 0 to {int(world_size) - 1}, not {rank}: WORLD_SIZE is {world_size}")


def meet():
    """Put into the environment what OneFlow looks for there: MASTER_ADDR, MASTER_PORT, RANK; nothing for env://."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--meet", default="env://")
    parser.add_argument("--wait", type=int, default=60)
    args, _ = parser.parse_known_args()
    if {"-h", "--help"} & set(sys.argv) or not importlib.util.find_spec("oneflow"):
        return  # main() has the help, and the import below the words
    way = re.fullmatch(WAYS, args.meet)
    if not way or not 0 < int(way[2] or 1) < 65536:
        takes = "env://, tcp://HOST:PORT with a name or an IPv4 address, or file:///PATH"
        stop(f"--meet takes {takes}, not {args.meet}: type --meet tcp://127.0.0.1:29400")
    host, port, path = way.groups()
    if args.meet == "env://":
        return
    if not 1 <= args.wait <= 10**6:
        stop(f"--wait takes 1 to 1000000 seconds, not {args.wait}: type --wait 60")
    world_size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    refuse("tcp" if host else "file", world_size, rank)
    meet.port = socket.socket()  # stays open, so that nobody else gets the port before OneFlow takes it
    meet.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    meet.port.bind(("", 0))
    own = {"rank": int(rank) if rank else None, "port": meet.port.getsockname()[1], "world_size": int(world_size)}
    answer, met, deadline = {}, False, time.monotonic() + args.wait
    while "leader" not in answer:
        met = met or "met" in answer
        if time.monotonic() > deadline:
            who = f"only some of {world_size} ranks came to" if met else "nobody received us at"
            why = "start the others as well, or --wait longer" + answer.get("why", "")
            stop(f"{who} {args.meet} in {args.wait} s: {why}")
        answer = by_tcp(host, int(port), own, deadline) if host else by_file(path, own, deadline)
        time.sleep(0.05)
    leader, deadline = tuple(answer["leader"]), time.monotonic() + args.wait  # anew: rank 0 imports OneFlow only now
    os.environ.update(MASTER_ADDR=leader[0], MASTER_PORT=str(leader[1]), RANK=str(answer["rank"]))
    os.environ.pop("LOCAL_RANK", None)
    while answer["rank"]:  # until OneFlow's rank 0 listens: who is earlier would sleep for 10 s
        try:
            socket.create_connection(leader, timeout=1).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                stop(f"rank 0 met us and then did not start OneFlow on {leader[0]}")
            time.sleep(0.02)
    faulthandler.dump_traceback_later(args.wait, exit=True)  # the import waits for all


if __name__ == "__main__":
    meet()

import argparse
import inspect
import os
import sys

import numpy as np

os.environ.setdefault("no_grpc_proxy", ",")  # matches all: ranks do not meet through an http_proxy
try:
    import oneflow as flow
except (ImportError, RuntimeError) as error:  # RuntimeError: the empty placeholder that pip installs on Python 3.11+
    print(f"{sys.argv[0]}: no OneFlow ({error}): it needs Python 3.8-3.10 and requirements.txt", file=sys.stderr)
    sys.exit(2)

WORLD_SIZES = range(2, 65)
FITS = {}


class Count(flow.nn.Module):
    def forward(self, number):
        partial = number.sum(0, keepdim=True)  # of the rows of this rank: P
        return partial, partial.to_global(sbp=flow.sbp.broadcast)


class CountGraph(flow.nn.Graph):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def build(self, number):
        return self.module(number)


def run(graph=False, device="cpu", meet="env://", wait=60):
    """Every rank gives its number; returns by name number (n, 1), partial and sum (1, 1)."""
    faulthandler.cancel_dump_traceback_later()  # OneFlow has started on all ranks
    rank = flow.env.get_rank()
    leader = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    run.says = [f"by {meet} rank {rank} has found rank 0 at {leader}"]

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    number = flow.tensor([[float(rank)]], device=device).to_global(placement=ranks, sbp=flow.sbp.split(0))
    module = Count()
    model = run.kept = CountGraph(module) if graph else module  # a freed graph may abort OneFlow
    partial, total = model(number)
    return {"number": number, "partial": partial, "sum": total}


def single_device(values, given):
    """What must come out if each rank is there once."""
    numbers = np.arange(len(values["number"]), dtype=np.float64)[:, None]
    return {"number": numbers, "sum": numbers.sum(0, keepdims=True)}


# The lesson ends here. What follows stands in every recipe: what a rank holds, when a run is refused, the options.
def held(tensor):
    """The block of a tensor that this rank holds, in words."""
    blocks, rank = [np.arange(size) for size in tensor.shape], flow.env.get_rank()
    where = "" if tensor.is_global else f"local, on {tensor.device}"
    if tensor.is_global:
        names = {flow.sbp.broadcast: "B", flow.sbp.partial_sum: "P"}
        names.update({flow.sbp.split(dim): f"S({dim})" for dim in range(tensor.ndim)})
        ranks = tensor.placement.ranks
        where = f"{', '.join(names[sbp] for sbp in tensor.sbp):4} on ranks {ranks.tolist()}"
        if rank not in ranks:
            return f"nothing                   {where}"
        for sbp, n, position in zip(tensor.sbp, ranks.shape, np.argwhere(ranks == rank)[0]):
            if names[sbp].startswith("S"):
                dim = int(names[sbp][2])
                blocks[dim] = np.array_split(blocks[dim], n)[position]
        if [len(block) for block in blocks] != list(tensor.to_local().shape):
            raise RuntimeError(f"rank {rank} holds {tuple(tensor.to_local().shape)}, not what its SBP says")
    words = [f"{word} {f'{block[0]}-{block[-1]}':5}" for word, block in zip(("rows", "columns"), blocks)]
    return f"{' '.join(words):24}  {where}"


def astray():
    """How the ranks were started wrongly, or None. OneFlow would go on, and print wrong values."""
    import zlib

    world_size, rank = flow.env.get_world_size(), flow.env.get_rank()
    ranks = flow.placement("cpu", list(range(world_size)))
    own = flow.tensor(np.arange(world_size), placement=ranks, sbp=flow.sbp.split(0)).to_local().numpy().tolist()
    if own != [rank]:  # a LOCAL_RANK that two ranks of one address share
        return f"rank {rank} holds {own} in place of [{rank}]: unset LOCAL_RANK, it is {os.environ.get('LOCAL_RANK')}"
    words = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    number = flow.tensor([zlib.crc32(os.fsencode(words))]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
    if len(set(number.tolist())) > 1:
        return "ranks of two jobs have met: start all with the same options, each job on a MASTER_PORT of its own"
    return None


def refusal(args):
    """Why this run cannot start, or None; known to every rank before any waits for another."""
    world_size, gpus = flow.env.get_world_size(), range(flow.cuda.device_count())
    if world_size not in WORLD_SIZES:
        return f"cannot run on {world_size} ranks: type -n {WORLD_SIZES[0]}, or --nproc_per_node {WORLD_SIZES[0]}"
    n = vars(args).get("ranks") or world_size  # those that the program starts, or its own
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, list) and not (set(value) <= set(range(world_size)) and len(set(value)) == len(value)):
            return f"{option} takes ranks from 0 to {world_size - 1}, each once: type {option} 0"
        if isinstance(value, str) and callable(FITS.get(name)):  # any text: the function says what is wrong with it
            wrong = FITS[name](args, world_size)
            if wrong:
                return f"{option} {value}: {wrong}"
        elif isinstance(value, str) and value not in FITS.get(name, (value,)):
            return f"{option} takes {', '.join(FITS[name])}, not {value}: type {option} {FITS[name][0]}"
        if type(value) is int:
            given = argparse.Namespace(**{**vars(args), name: max(value, int(name != "seed"))})
            while name in FITS and not FITS[name](given, world_size):
                setattr(given, name, getattr(given, name) + 1)
            if getattr(given, name) != value:
                return f"{option} {value} does not fit on {n} ranks: type {option} {getattr(given, name)}"
    usable = [gpu for gpu in gpus if (6, 0) <= flow.cuda.get_device_capability(gpu) < (9, 0)]
    enough = len(usable) == len(gpus) >= n // flow.env.get_node_size()
    if args.device == "cuda" and not enough:
        return f"each rank needs a GPU of compute capability 6.0 to 8.9, got {len(usable)}: type --device cpu"
    args.device = args.device or ("cuda" if enough else "cpu")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    for name, default in ((name, one.default) for name, one in inspect.signature(run).parameters.items()):
        option, kind = f"--{name.replace('_', '-')}", int if isinstance(default, tuple) else type(default)
        if name == "graph":
            parser.add_argument(option, action="store_true", help="run the module inside an nn.Graph")
        elif name == "device":
            words = "default: cuda if each rank has a supported GPU"
            parser.add_argument(option, choices=["cpu", "cuda"], help=words)
        else:
            many = "+" if isinstance(default, tuple) else None
            parser.add_argument(option, type=kind, nargs=many, default=default, help="default: %(default)s")
    args = parser.parse_args()
    wrong = astray()
    if wrong:
        print(f"{parser.prog}: {wrong}", file=sys.stderr, flush=True)
        os._exit(2)  # not sys.exit, which waits for the ranks that have not noticed
    reason = refusal(args)
    if reason:
        parser.exit(2, f"{parser.prog}: {reason}\n")

    tensors = run(**vars(args))
    width = max(8, *(len(name) + 2 for name in tensors))
    for rank in range(flow.env.get_world_size()):
        if rank == flow.env.get_rank():
            for name, tensor in tensors.items():
                print(f"rank {rank}: {name:{width}}{held(tensor)}", flush=True)
            for line in getattr(run, "says", ()):
                print(f"rank {rank}: {line}", flush=True)
        flow.comm.barrier()

    values = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}  # collective: all ranks
    expected = single_device(values, args)
    error = max(np.abs(values[name] - expected[name]).max() / np.abs(expected[name]).max() for name in expected)
    equal = error < (1e-5 if "steps" in vars(args) else 1e-6)  # float32 rounds by up to 6e-8, again in each step
    if flow.env.get_rank() == 0:
        if "losses" in values:
            print(f"loss {values['losses'][0]:.4f} -> {values['losses'][-1]:.4f} in {len(values['losses'])} steps")
        print(f"{'equal to' if equal else 'DIFFERS FROM'} the single-device values: largest difference {error:.1e}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
