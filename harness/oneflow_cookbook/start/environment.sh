# shellcheck shell=bash disable=SC2154
# Sourced by launch.sh: creates .venv with everything in requirements.txt, once, with uv, and notices when it is broken.
# Needs $here, the checkout. All messages go to standard error; an error ends with exit code 2.

venv=$here/.venv

say() { printf 'launch.sh: %s\n' "$*" >&2; }
refuse() { say "$1"; shift; [[ $# -eq 0 ]] || printf '  %s\n' "$@" >&2; exit 2; }

# Runs a command in the background and waits for it: while one runs in the foreground, bash delays traps.
run_interruptibly() { "$@" >&2 & wait $!; }
run_interruptibly_into() { "${@:2}" >"$1" 2>&1 & wait $!; }

# Prints a checksum of the requirements, and size and path of each file whose loss breaks an environment. The file
# .venv/made, which is written last, holds these lines as they were when .venv was created.
contents() {
    cksum <"$here/requirements.txt"
    (cd "$venv" && find lib \( -name '*.so*' -o -name __init__.py -o -name RECORD \) -type f -printf '%s %p\n' 2>/dev/null)
}

# Prints the lines of .venv/made that no longer hold.
lost() { contents | grep -vxFf - "$venv/made"; }

# Whether .venv is whole: created from the present requirements, no file lost or cut short, and its Python runs.
environment_is_whole() {
    [[ -f $venv/made && -x $venv/bin/python && -z $(lost) ]] && "$venv/bin/python" -ISc \
        'import os, sys; os.chdir("%s/lib/python%d.%d" % (sys.argv[1], *sys.version_info[:2]))' "$venv" 2>/dev/null
}

# PATH, followed by the folders where pyenv, uv and conda keep Pythons.
path_of_pythons() {
    printf '%s' "$PATH"
    printf ':%s' "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions/*/bin "${CONDA_PREFIX:-/nowhere}/bin" \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME-}/.local/share}/uv/python}"/*/bin \
        {"${HOME-}",/opt}/{{mini,ana}conda3,{mini,mamba}forge{,3},conda}/{,envs/*/}bin
}

# Sets $python to the first Python here of version $1.$2 or newer: that of .venv, if it exists.
find_any_python() {
    local any
    while IFS= read -r any; do
        python=$any
        ! "$any" -c "import sys; sys.exit(sys.version_info < ($1, $2))" 2>/dev/null || return 0
    done < <(PATH="$venv/bin:$(path_of_pythons)" type -ap python3 python)
    refuse "no Python $1.$2 or newer here"
}

# Sets $python to the Python that PYTHON names.
take_named_python() {
    local what why="name a Python 3.8, 3.9 or 3.10, or unset it"
    python=$(type -p "$PYTHON") || refuse "PYTHON=$PYTHON: no such program; $why"
    what=$("$python" -c 'import platform as p; print(p.python_implementation(), p.python_version())' 2>&1) || true
    [[ $what =~ ^CPython\ 3\.(8|9|10)\. ]] || refuse "PYTHON=$PYTHON is ${what##*$'\n'}; $why"
}

# Sets $uv to the uv on PATH, if it is new enough to know this option, else to our own, which any Python can fetch.
find_uv() {
    local any
    for uv in "$(type -p uv)" "$here/.venv-uv/bin/uv"; do
        if [[ -n $uv ]] && "$uv" pip install --default-index x --help &>/dev/null; then return; fi
    done
    while IFS= read -r any; do
        rm -rf "$here/.venv-uv"
        if run_interruptibly "$any" "$here/harness/oneflow_cookbook/start/packages.py" fetch "$here/.venv-uv"; then return; fi
    done < <([[ -z $python ]] || echo "$python"; PATH=$(path_of_pythons) type -ap python3 python)
    refuse "no Python 3 of this machine could fetch uv: check the network, name a mirror (PIP_INDEX_URL), or install uv"
}

# Sets $python to the first suitable Python that uv finds here, else to one that uv fetches.
find_python() {
    local find=("$uv" python find --no-project --system)
    ! python=$(PATH=$(path_of_pythons) "${find[@]}" --no-python-downloads 'cpython>=3.8,<3.11' 2>/dev/null) || return 0
    say "no Python 3.8, 3.9 or 3.10 here; uv fetches one"
    local -x UV_PYTHON_INSTALL_BIN=0 # no link to it in ~/.local/bin
    { run_interruptibly "$uv" python install 3.10 && python=$("${find[@]}" --managed-python 3.10); } || refuse \
        "OneFlow 0.9.0 exists for Python 3.8 to 3.10 only, and uv could not fetch one, see above; install one, for example:" \
        "conda create -y -n py310 python=3.10; conda activate py310" \
        "pyenv install 3.10" \
        "sudo add-apt-repository ppa:deadsnakes/ppa; sudo apt install python3.10 (Ubuntu)" \
        "and run this again, or name one that you have: PYTHON=/path/to/python3.10 ./launch.sh ..."
}

# Installs everything with the command $@. If all is in uv's cache, no network is needed.
install_all() {
    local cache
    ! run_interruptibly_into /dev/null "$@" --offline || return 0
    { cache=$("$uv" cache dir) && mkdir -p "$cache"; } || refuse "uv has no cache, see above (UV_CACHE_DIR)"
    say "about 1.8 GB to download into uv's cache, 3.9 GB on disk; other clones then take theirs from there"
    run_interruptibly "$@" || refuse "uv failed, see above; set-up needs" \
        "a package index: PIP_INDEX_URL names a mirror" \
        "4 GB at $cache, where $(df -h "$cache" | awk 'NR == 2 {print $4}') are free: UV_CACHE_DIR names another folder"
}

make_environment() {
    local python='' uv settings packages command log=$venv/set-up.log
    [[ "$(uname -s) $(uname -m)" == "Linux x86_64" ]] \
        || refuse "OneFlow 0.9.0 exists for Linux on x86_64 only; this is $(uname -s) $(uname -m)"
    trap 'kill $(jobs -p) 2>/dev/null || :; wait; say "set-up was interrupted; run this again"; exit 130' INT TERM HUP
    [[ -z ${PYTHON-} ]] || take_named_python
    find_uv
    [[ -n $python ]] || find_python
    command=("$uv" pip install --python "$venv/bin/python" -r "$here/requirements.txt")
    settings=$("$python" "$here/harness/oneflow_cookbook/start/packages.py" settings) || refuse "pip's settings are bad, see above"
    eval "$settings" # local variables: ranks must not inherit them
    say "setting up .venv with $python"
    # The files of .venv are hard links into uv's cache: a file that is cut short here is cut short there too.
    if [[ -f $venv/made && $(lost | head -n 1) == *" lib/"* ]]; then
        mapfile -t packages < <(sed -n 's/==.*//p' "$here/requirements.txt")
        run_interruptibly "$uv" cache clean "${packages[@]}"
    fi
    rm -rf "$venv"
    trap 'rm -rf "$venv"' EXIT
    run_interruptibly "$uv" venv --quiet --no-project --python "$python" "$venv" || refuse "uv venv failed, see above"
    install_all "${command[@]}"
    # This also compiles OneFlow to bytecode, even where an image turns that off: ranks then start twice as fast.
    run_interruptibly_into "$log" env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c 'import oneflow' \
        || refuse "OneFlow does not start: $(tail -n 1 "$log")"
    run_interruptibly_into "$log" "$venv/bin/python" "$here/harness/oneflow_cookbook/start/blas.py" \
        || say "ranks will compute with OneFlow's own, older OpenBLAS: $(tail -n 1 "$log")"
    contents >"$venv/made.part"
    mv "$venv/made.part" "$venv/made"
    trap - EXIT INT TERM HUP
    say "ready: .venv took $SECONDS s"
}

# Creates .venv unless it is whole. Of two callers at once, one creates it, and the other waits for it.
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
