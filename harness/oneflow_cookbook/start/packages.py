"""For environment.sh: pip's settings, which uv does not read, and uv itself where it is not installed.

    python packages.py settings      prints them as commands for bash
    python packages.py fetch FOLDER  puts uv into FOLDER/bin

Runs with any Python 3, even without pip, such as that of a bare Debian.
"""

import configparser
import hashlib
import html
import io
import os
import re
import shlex
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile

UV = "0.13.9"
WHEEL = f"uv-{UV}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
SHA256 = "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19"
NAMES = {  # pip's name of a setting -> the environment variable of uv
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}


def pip_settings():
    """{name: value} of pip's settings; the environment comes first, then the section of `pip install`, then global."""
    configuration = os.environ.get("XDG_CONFIG_HOME", "~/.config")
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", f"{configuration}/pip/pip.conf"]
    files += [f"{sys.prefix}/pip.conf", os.environ.get("PIP_CONFIG_FILE", "")]
    parser = configparser.RawConfigParser()
    parser.read(map(os.path.expanduser, files if files[-1] != os.devnull else []))
    settings = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            settings.update(parser.items(section))
    for name in (*NAMES, "no-index"):
        value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
        if value:
            settings[name] = value
    return settings


def print_settings():
    """Print bash commands for a function of environment.sh that has the installing command in the array `command`."""
    # the best version of all indexes, as pip does
    print("local -x UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}")
    settings = pip_settings()
    for name, variable in NAMES.items():
        if name in settings and variable not in os.environ:
            values = settings[name].split()
            value = (",".join if name == "find-links" else " ".join)(values)
            print(f"local -x {variable}={shlex.quote(value)}")
    if no_index(settings):
        print("command+=(--no-index)")


def no_index(settings):
    return settings.get("no-index", "").lower() in ("1", "yes", "true", "on")


def from_index(folder):
    """Download uv's wheel and unpack uv; needs no pip. Raises ValueError, OSError."""
    settings = pip_settings()
    if no_index(settings):
        raise ValueError("pip's settings say no-index")
    index = settings.get("index-url", "https://pypi.org/simple").rstrip("/") + "/uv/"
    page = urllib.request.urlopen(index, timeout=60).read().decode()
    link = re.search(f'href="([^"#]*/{re.escape(WHEEL)}[^"]*)"', page)
    if not link:
        raise ValueError(f"{index} has no {WHEEL}")
    wheel = urllib.request.urlopen(urllib.parse.urljoin(index, html.unescape(link.group(1))), timeout=60).read()
    if hashlib.sha256(wheel).hexdigest() != SHA256:
        raise ValueError(f"{WHEEL} at {index} has an unexpected checksum")
    os.makedirs(folder + "/bin")
    with open(folder + "/bin/uv", "wb") as file:
        file.write(zipfile.ZipFile(io.BytesIO(wheel)).read(f"uv-{UV}.data/scripts/uv"))
    os.chmod(folder + "/bin/uv", 0o755)


def fetch(folder):
    """Get uv from the index that pip would use, or else with pip, which knows passwords and certificates."""
    try:
        from_index(folder)
    except Exception as error:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        if subprocess.call([*pip, "uv==" + UV]):
            sys.exit(f"launch.sh: no uv: {error}; nor did pip install it")


if __name__ == "__main__":
    if sys.argv[1] == "settings":
        print_settings()
    else:
        fetch(sys.argv[2])
