# shellcheck shell=bash disable=SC2154
# Sourced by launch.sh: makes .venv with everything in requirements.txt, once, and knows when it is broken.
# Needs $here, the checkout. All it says goes to standard error; what cannot be helped ends with exit code 2.

venv=$here/.venv
disk_needed_kb=$((6 * 1024 * 1024)) # 3.9 GB installed, and the downloaded wheels while pip unpacks them

say() { printf 'launch.sh: %s\n' "$*" >&2; }
refuse() { say "$1"; shift; [[ $# -eq 0 ]] || printf '  %s\n' "$@" >&2; exit 2; }

# The files whose loss breaks an environment: compiled libraries, package entries, and pip's own records.
vital_files() { (cd "$venv" && find lib \( -name '*.so*' -o -path '*/site-packages/*/__init__.py' \
    -not -path '*/site-packages/*/*/__init__.py' -o -name RECORD \) -type f -print0 | sort -z); }

sizes() { xargs -0 stat -L -c '%s %n' --; }

# Whether .venv is whole: made from these very requirements, its Python runs, and no vital file is gone or cut short.
# The file .venv/made is written last of all and holds the requirements' checksum, then a line for each vital file.
environment_is_whole() {
    [[ -x $venv/bin/python && -f $venv/made ]] || return 1
    local recorded
    recorded=$(<"$venv/made")
    [[ $recorded == "$(cksum <"$here/requirements.txt")"$'\n'* ]] || return 1
    "$venv/bin/python" -ISc 'import os, sys; os.chdir("%s/lib/python%d.%d" % (sys.argv[1], *sys.version_info[:2]))' "$venv" \
        2>/dev/null || return 1
    recorded=${recorded#*$'\n'}
    [[ $recorded == "$(cd "$venv" && cut -d ' ' -f 2- <<<"$recorded" | tr '\n' '\0' | sizes 2>/dev/null)" ]]
}

# Prints every Python that might do, the most likely first; whether it runs is seen later.
candidates() {
    local name root
    for name in python3.10 python3.9 python3.8 python3 python; do type -ap "$name" || true; done
    for root in "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME-}/.local/share}/uv/python}" \
        "${HOME-}"/{mini,ana,mini}{conda3,forge3}{,/envs} /opt/{conda,miniconda3,anaconda3}{,/envs} "${CONDA_PREFIX:-/nowhere}"; do
        for name in "$root"/{,*3.10*/,*3.9*/,*3.8*/,*/}bin/python3; do
            if [[ -x $name ]]; then printf '%s\n' "$name"; fi
        done
    done
}

# Prints "ok VERSION" if the Python $1 can carry OneFlow 0.9.0, else why it cannot. A pyenv shim fails when it is run.
judge() {
    timeout 20 "$1" -c '
import platform, sys
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, 8) <= sys.version_info[:2] <= (3, 10) or platform.python_implementation() != "CPython":
    sys.exit(print("is " + platform.python_implementation() + " " + version))
if sys.maxsize < 2**32:
    sys.exit(print("is a 32-bit Python"))
try:
    import ctypes, ensurepip, ssl, venv
except ImportError as error:
    sys.exit(print("is %s without the module %s (Debian, Ubuntu: apt install python%d.%d-venv)"
                   % (version, error.name, *sys.version_info[:2])))
print("ok " + version)' 2>/dev/null </dev/null || printf 'does not run\n'
}

# Sets $python and $version to the first Python that will do; ends with a list of what was tried when there is none.
find_python() {
    local candidate verdict
    local -A seen=()
    local -a tried=()
    if [[ -n ${PYTHON-} ]]; then
        python=$(type -p "$PYTHON") || refuse "PYTHON=$PYTHON: no such program; name a Python 3.8, 3.9 or 3.10, or unset it"
        verdict=$(judge "$python")
        [[ $verdict == ok* ]] || refuse "PYTHON=$PYTHON $verdict; name a Python 3.8, 3.9 or 3.10, or unset it"
        version=${verdict#ok }
        return
    fi
    while IFS= read -r candidate; do
        [[ -z ${seen[$candidate]-} ]] || continue
        seen[$candidate]=1
        verdict=$(judge "$candidate")
        if [[ $verdict == ok* ]]; then
            python=$candidate version=${verdict#ok }
            return
        fi
        tried+=("tried $candidate: $verdict")
    done < <(candidates)
    if [[ -z ${asked_uv-} ]] && type -p uv >/dev/null; then
        asked_uv=1
        say "no Python 3.8, 3.9 or 3.10 here; asking uv for one"
        uv python install 3.10 >&2 && python=$(uv python find --no-project 3.10) && verdict=$(judge "$python") \
            && [[ $verdict == ok* ]] && version=${verdict#ok } && return
    fi
    refuse "no Python 3.8, 3.9 or 3.10 found, and OneFlow 0.9.0 exists for no newer one; install one and run this again:" \
        "uv:     curl -LsSf https://astral.sh/uv/install.sh | sh; then uv python install 3.10" \
        "conda:  conda create -y -n py310 python=3.10; conda activate py310" \
        "pyenv:  pyenv install 3.10" \
        "Ubuntu: sudo add-apt-repository ppa:deadsnakes/ppa; sudo apt install python3.10-venv" \
        "or name one: PYTHON=/path/to/python3.10 ./launch.sh ..." \
        "${tried[@]}"
}

check_system() {
    local system
    system="$(uname -s) $(uname -m)"
    [[ $system == "Linux x86_64" ]] || refuse "OneFlow 0.9.0 exists for Linux on x86_64 only; this is $system"
}

# What went wrong while pip ran, from its log, in one line.
diagnose() {
    local free
    free=$(df -Ph "$here" | awk 'NR == 2 {print $4}')
    if grep -qE 'No space left|Errno 28|ENOSPC' "$1"; then
        echo "the disk is full: set-up needs 6 GB at $here, and $free are free; make room and run this again"
    elif grep -qE 'NewConnectionError|ConnectTimeout|Temporary failure|Name or service|ProxyError|Max retries|ReadTimeout|Connection (broken|refused|reset)|Network is unreachable' "$1"; then
        echo "no package index was reached: check the network, or name a mirror with PIP_INDEX_URL, and run this again"
    else
        echo "pip failed: $(grep -o 'ERROR: .*' "$1" | tail -n 1 | cut -c 8-); its output is above"
    fi
}

# Runs a command in the background and waits for it: for one in the foreground, bash would not heed a signal.
heed() { "$@" & wait $!; }

make_environment() {
    local free log reason
    check_system
    find_python
    rm -rf "$venv"
    free=$(df -Pk "$here" | awk 'NR == 2 {print $4}')
    ((free >= disk_needed_kb)) || refuse "set-up needs 6 GB at $here, and only $((free / 1024)) MB are free"
    say "setting up .venv with $python ($version), once: about 1.8 GB to download, 3.9 GB on disk"
    # shellcheck disable=SC2064 # the path of today
    trap "rm -rf '$venv'" EXIT
    trap 'kill $(jobs -p) 2>/dev/null || true; wait; say "set-up was interrupted; run this again"; exit 130' INT TERM HUP
    heed "$python" -m venv "$venv" >&2 || refuse "$python -m venv failed; see above"
    log=$venv/set-up.log
    mkdir "$venv/tmp" # pip downloads 1 GB wheels into TMPDIR, and /tmp is often small
    # pip's own output stays on the terminal, where it draws progress bars; the log is for diagnose
    if ! TMPDIR=$venv/tmp PIP_DISABLE_PIP_VERSION_CHECK=1 heed "$venv/bin/python" -m pip install \
        -r "$here/requirements.txt" --log "$log" >&2; then
        reason=$(diagnose "$log")
        refuse "$reason"
    fi
    rm -rf "$venv/tmp"
    heed "$venv/bin/python" -c 'import oneflow' >"$log" 2>&1 || refuse "OneFlow does not start: $(tail -n 1 "$log")"
    heed "$venv/bin/python" "$here/harness/start/blas.py" >"$log" 2>&1 \
        || say "ranks will compute with OneFlow's own, older OpenBLAS: $(tail -n 1 "$log")"
    { cksum <"$here/requirements.txt" && (cd "$venv" && vital_files | sizes); } >"$venv/made.part"
    mv "$venv/made.part" "$venv/made"
    trap - EXIT INT TERM HUP
    say "ready: .venv took $SECONDS s"
}

# Makes .venv unless it is whole. Two callers at once: one works, the other waits and then finds it whole.
ensure_environment() {
    environment_is_whole && return
    exec 9>"$here/.venv.lock" || refuse "cannot write to $here; clone the cookbook to a folder of your own"
    if ! flock -n 9; then
        say "another launch.sh is setting up .venv; waiting for it"
        flock 9
    fi
    environment_is_whole || make_environment
    exec 9>&-
}
