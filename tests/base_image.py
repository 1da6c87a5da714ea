"""A stand-in for the base image python:3.10-slim-bookworm, made of this machine's files: no registry is asked.

It has the packages that every Debian has, those that the real image adds, and what these need. It has the Python of
.venv, under the path that it has here.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

NAME = "docker.io/library/python:3.10-slim-bookworm"
# What the real image has beyond a minimal Debian.
ADDED = "apt ca-certificates libbz2-1.0 libffi8 liblzma5 libncursesw6 libreadline8 libsqlite3-0 libssl3 netbase zlib1g"
NOT_IN_SLIM = re.compile(r"/usr/share/(doc|info|locale|man)/.")
# Of no package; the last two say how this machine reaches its package index.
MADE_AT_INSTALLATION = ("/usr/bin/awk", "/etc/alternatives/awk", "/etc/ssl/certs", "/etc/pip.conf")
PYTHON = Path(sys.base_prefix)
VERSION = "python{}.{}".format(*sys.version_info)


def write(path):
    """Write the image's files into a tar."""
    taken = {}  # by name: Podman takes no name twice

    def first(entry):
        return entry if taken.setdefault(entry.name, entry) is entry else None

    with tarfile.open(path, "w") as tar:
        for folder in ("bin", "sbin", "lib", "lib64"):  # since Debian 12, all of them links into /usr
            tar.add(f"/{folder}", recursive=False, filter=first)
        add_python(tar, first)
        for name in ("passwd", "group"):
            tar.add(f"/usr/share/base-passwd/{name}.master", f"etc/{name}", filter=first)
        tar.dereference = True  # certificates of this machine's own are often links
        for file in filter(os.path.exists, MADE_AT_INSTALLATION):
            tar.add(file, filter=first)
        tar.dereference = False
        for file in sorted({as_linked(file) for file in files_of_packages()}):
            tar.add(file, recursive=False, filter=first)


def packages():
    """The names of the packages, of those that are installed here: the required ones, ADDED, and what these need."""
    fields = r"${Package}\t${Priority}\t${Pre-Depends}, ${Depends}\n"
    text = subprocess.check_output(["dpkg-query", "--show", f"--showformat={fields}"], text=True)
    rows = [line.split("\t") for line in text.splitlines()]
    needs = {name: re.findall(r"(?:^|[,|] *)([\w.+-]+)", depends) for name, _, depends in rows}
    wanted = [name for name, priority, _ in rows if priority == "required"] + ADDED.split()
    found = set()
    while wanted:
        name = wanted.pop()
        if name in needs and name not in found:
            found.add(name)
            wanted += needs[name]
    return found


def files_of_packages():
    """What these have on this machine: files, folders and links."""
    text = subprocess.check_output(["dpkg-query", "--listfiles", *packages()], text=True)
    for path in text.splitlines():
        if path.startswith("/") and path != "/." and os.path.lexists(path) and not NOT_IN_SLIM.match(path):
            yield path


def as_linked(path):
    """/bin/bash is a file of /usr/bin, where /bin is a link to that."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def add_python(tar, first):
    """Add the Python of .venv, under its path, where every user may go; and links to it on the PATH."""
    for parent in [*reversed(PYTHON.parents[:-1]), PYTHON, PYTHON / "bin", PYTHON / "lib"]:
        folder = tarfile.TarInfo(str(parent)[1:])
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(first(folder))
    program, library = PYTHON / "bin" / VERSION, PYTHON / "lib" / VERSION
    left_out = [str(library / name)[1:] for name in ("test", "site-packages")]
    tar.add(library, filter=lambda entry: None if entry.name in left_out or entry.name.endswith(".a") else first(entry))
    for file in (program, *PYTHON.glob("lib/libpython*.so*")):
        tar.add(file, filter=first)
    for name in (VERSION, "python3", "python"):
        link = tarfile.TarInfo(f"usr/local/bin/{name}")
        link.type, link.linkname = tarfile.SYMTYPE, str(program)
        if first(link):
            tar.addfile(link)
