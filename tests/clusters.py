"""Slurm, Open MPI and ssh for the tests: installs Debian's packages, starts the daemons on two hosts of this machine.

All files of the daemons are in one folder. Needs root and, where a package is missing, apt-get.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import uuid
from pathlib import Path

from tests.cases import ROOT
from tests.environments import apt_install
from tests.hosts import Hosts
from tests.jobs import MARK, Run, free_port, marked, wait_until

PROGRAMS = {  # program -> the package of Debian and Ubuntu that has it
    "srun": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "mpirun": "openmpi-bin",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
NAMES = ("host0", "host1")  # the hosts as docs/clusters.md calls them
CPUS = 8  # of each host in Slurm's settings: more than there may be, so that several jobs run at once
SBIN = os.pathsep.join((os.environ["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"))


def program(name):
    return shutil.which(name, path=SBIN)


def install():
    """Install the packages that are missing."""
    missing = sorted({package for name, package in PROGRAMS.items() if not program(name)})
    assert os.geteuid() == 0, "slurmd and sshd of the tests run as root only"
    if missing:
        apt_install(missing)


class Cluster:
    """Two hosts with sshd and Slurm on both; a context manager. `real` is False where both are this host.

    folder: for all files of the daemons.
    """

    def __init__(self, folder):
        self.folder, self.mark = Path(folder), uuid.uuid4().hex
        self.daemons = []
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        with self.stack:
            self.hosts = self.stack.enter_context(Hosts(len(NAMES), as_root=True))
            self.stack.callback(self._stop)
            self.real = self.hosts.real
            self.names = NAMES if self.real else ("127.0.0.1", "127.0.0.2")  # which mean this host on every Linux
            self._prepare()
            self._start_ssh()
            self._start_slurm()
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def run(self, command, host=0, cwd=ROOT, **variables):
        """Start a line of shell on a host, as a user of the cluster types it; returns a Run."""
        variables = {**self.variables, **variables}
        return Run(*self.hosts.on(host), "bash", "-c", f"cd {cwd} && {self.named(command)}", **variables)

    def named(self, text):
        """A text of the page with the names of these hosts."""
        for name, own in zip(NAMES, self.names):
            text = text.replace(name, own)
        return text

    def left(self):
        """The running processes of the daemons and of their children."""
        return marked(f"{MARK}_DAEMON={self.mark}")

    def log(self):
        """The end of each daemon's log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs)

    def _write(self, name, lines, mode=0o644):
        path = self.folder / name
        path.write_text(lines)
        path.chmod(mode)
        return path

    def _prepare(self):
        """Write /etc/hosts for these hosts, and the environment of users."""
        shims = self.folder / "bin"
        shims.mkdir()
        self._write("bin/ssh", f'#!/bin/sh\nexec {program("ssh")} -F {self.folder}/ssh_config "$@"\n', 0o755)
        self.variables = {
            "PATH": f"{shims}{os.pathsep}{SBIN}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            # Open MPI as root, and on more ranks than there are cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        here = "mkdir -p /run/sshd"  # sshd's directory for privilege separation
        if self.real:
            lines = "".join(f"{address} {name}\n" for address, name in zip(self.hosts.addresses, self.names))
            names = self._write("hosts", f"127.0.0.1 localhost\n{lines}")
            here += f" && mount --bind {names} /etc/hosts"
        inside = self.hosts.inside() if self.real else []
        subprocess.run([*inside, "sh", "-euc", here], check=True)

    def _start(self, name, *command, host=None):
        """Start a daemon that stays in the foreground, on a host; its log is NAME.log."""
        on = [] if host is None else self.hosts.on(host)
        variables = {**os.environ, **self.variables, f"{MARK}_DAEMON": self.mark}
        with (self.folder / f"{name}.log").open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            command = [*on, program(command[0]), *map(str, command[1:])]
            self.daemons.append(subprocess.Popen(command, env=variables, **streams))

    def _stop(self):
        print(self.log())  # which pytest shows where they did not start
        for daemon in reversed(self.daemons):  # munged last, as the others need it to end
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(60)
            daemon.kill()
            daemon.wait()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _start_ssh(self):
        """sshd on each host. It accepts one key, which is made here."""
        for name in ("user_key", "host_key"):
            command = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        port = free_port()
        variables = f"{MARK} {MARK}_DAEMON SLURM_CONF"  # with the mark the tests find what a job leaves behind
        daemon = f"""
            Port {port}
            HostKey {self.folder}/host_key
            AuthorizedKeysFile {self.folder}/user_key.pub
            StrictModes no
            PermitRootLogin prohibit-password
            PasswordAuthentication no
            UsePAM no
            PidFile none
            AcceptEnv {variables}
        """
        client = f"""
            Port {port}
            IdentityFile {self.folder}/user_key
            IdentitiesOnly yes
            StrictHostKeyChecking no
            UserKnownHostsFile /dev/null
            LogLevel ERROR
            SendEnv {variables}
        """
        self._write("sshd_config", daemon)
        self._write("ssh_config", client)
        for host in range(len(NAMES) if self.real else 1):
            self._start(f"sshd{host}", "sshd", "-D", "-e", "-f", self.folder / "sshd_config", host=host)
        for name in self.names:
            wait_until(lambda name=name: self.run(f"ssh {name} true").wait().code == 0, f"sshd on {name}")

    def _start_slurm(self):
        """munged, slurmctld on the first host, slurmd on each: without systemd, cgroups and accounting."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = [free_port() for _ in range(1 + len(NAMES))]
        nodes = ""
        for name, address, port in zip(self.names, self.hosts.addresses, ports[1:]):
            (self.folder / name).mkdir()
            nodes += f"NodeName={name} NodeAddr={address} Port={port} CPUs={CPUS}\n"
        # cred_expire is how long a job that is requeued has to wait at least.
        settings = f"""
            ClusterName=cookbook
            SlurmctldHost={socket.gethostname().split(".")[0]}({self.hosts.addresses[0]})
            SlurmctldPort={ports[0]}
            SlurmUser=root
            AuthType=auth/munge
            AuthInfo=socket={self.folder}/munge.socket,cred_expire=5
            StateSaveLocation={self.folder}
            SlurmctldPidFile={self.folder}/slurmctld.pid
            SlurmdPidFile={self.folder}/%n.pid
            SlurmdSpoolDir={self.folder}/%n
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SwitchType=switch/none
            MpiDefault=none
            MailProg=/bin/true
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU
            SlurmdParameters=config_overrides
            SchedulerParameters=sched_min_interval=0
            ReturnToService=2
            KillWait=5
            MessageTimeout=60
            {nodes}
            PartitionName=all Nodes=ALL Default=YES State=UP
        """
        self._write("slurm.conf", settings)
        self._write("cgroup.conf", "CgroupPlugin=cgroup/v1\n")  # never used, so cgroups need not exist
        paths = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in paths.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        wait_until((self.folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "slurmctld", "-D", "-i", host=0)
        for host, name in enumerate(self.names):
            self._start(f"slurmd{host}", "slurmd", "-D", "-N", name, host=host)
        wait_until(lambda: "idle 2" in self.run("sinfo --noheader --format='%T %D'").wait().out, "Slurm")
