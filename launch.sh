#!/usr/bin/env bash
# Makes the environment on first use, then hands over to harness/.
set -euo pipefail
here=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

usage() {
    cat <<'END'
Run a OneFlow script on several ranks of this machine.

  ./launch.sh SCRIPT           run a script: a file, or the name of a recipe
  ./launch.sh list             list the recipes
  ./launch.sh show SCRIPT      draw what each rank holds, and what moves
  ./launch.sh bytes SCRIPT     list the bytes that each step sends
  ./launch.sh verify SCRIPT    compare the values with those on one rank
  ./launch.sh shell -n 2       type statements that every rank runs
  ./launch.sh plan ...         choose a layout for a model and a cluster
  ./launch.sh test             run the tests; test --all: the slow ones too

Options go before the script, and the script's own arguments after it.

examples
  ./launch.sh recipes/data_parallel.py       on the recipe's own number of ranks
  ./launch.sh -n 4 data_parallel --graph     on 4 ranks, inside an nn.Graph
  ./launch.sh -n 3 ~/mine.py --my-option     your own script
  ./launch.sh show --memory -n 2 ~/mine.py   and the peak memory of each rank
  ./launch.sh test -k pipeline               tests with this word in their names

options
  -n N                number of ranks (default: the first of the script's
                      WORLD_SIZES, or 2 if it has none)
  --timeout SECONDS   end the job after that time, and show where each rank is
                      (default: no limit)
  --silent SECONDS    show where each rank is after SECONDS without output (300)
  --grace SECONDS     time for the ranks to end after SIGTERM (25)
  --log-dir DIR       append the output of rank K to DIR/rank_K.log, and show
                      only that of the first rank
  -m MODULE           in place of SCRIPT: run a module as python -m does
  -h, --help          this text; SCRIPT --help shows the options of a script

Each line of output begins with the number of its rank. The first rank that
fails ends the job. The first run makes .venv here (3.9 GB on disk).
Several hosts, all options, exit codes: docs/clusters.md
END
}

usage_of_shell() {
    cat <<'END'
Type Python statements, and every rank runs each of them.

  ./launch.sh shell [-n N] [--timeout SECONDS] [--echo] [SCRIPT [ARG ...]]

An answer that is the same on every rank is shown once, after [all]; others
follow the number of their rank. Of a global tensor you see its SBP and what
each rank holds, and after each statement what moved between the ranks.

  SCRIPT              run a file or a recipe first, and keep its names; its
                      __name__ is not "__main__", so its main does not start
  -n N                number of ranks (default: the first of the script's
                      WORLD_SIZES, or 2)
  --timeout SECONDS   end a statement after that time, and show where each
                      rank is (default: 60; 0: no limit)
  --echo              show statements that come from a pipe or a file
  -m MODULE           in place of SCRIPT: a module, as in python -m

Ctrl-C ends a statement and starts new ranks; all names are lost. Ctrl-D or
exit() ends the shell. A tutorial: docs/shell.md
END
}

usage_of_verify() {
    cat <<'END'
Compare what a script computes on n ranks with what it computes on one.

  ./launch.sh verify [-n N] [OPTIONS] SCRIPT [ARG ...]

Both runs begin with the same weights and batches, and train for three steps.
You see the first value that differs by more than rounding, with its line.

  -n N                number of ranks (default: the first of the script's
                      WORLD_SIZES, or 2)
  --steps N           training steps to compare (default: 3)
  --against "FILE [ARG ...]"
                      compare with a script for a single device, whose
                      parameters have the same names
  --json              print the result as JSON
  --timeout SECONDS   for each run of the script (default: 600; 0: no limit)
  -m MODULE           in place of SCRIPT: a module, as in python -m

Exit code 0: all agree; 1: a value differs; 2: it cannot be verified, and why;
124: a run took too long.
How to read it, and what it cannot see: docs/verify.md
END
}

list() {
    echo "The recipes, by chapter. Run one by its name: ./launch.sh data_parallel"
    local title path line
    while IFS='|' read -r title path; do
        if [[ -n $title ]]; then
            printf '\n%s\n' "$title"
        else
            read -r line <"$here/recipes/$path"
            printf '  %-25s %s\n' "$(basename "$path" .py)" "${line#\"\"\"}"
        fi
    done < <(sed -n 's/^\*\*\[\(.*\)](.*)\*\*$/\1|/p; s/^- \[.*](\(.*\.py\)): .*/|\1/p' "$here/recipes/README.md")
    printf '\n./launch.sh --help shows the options, and how to run your own script.\n'
}

[[ -d /proc/self ]] || { echo "launch.sh: /proc is not mounted, and OneFlow needs it" >&2; exit 2; }

case ${1-} in
    -h | --help)
        usage
        exit 0
        ;;
    shell)
        case ${2-} in -h | --help)
            usage_of_shell
            exit 0
            ;;
        esac
        ;;
    verify)
        case ${2-} in -h | --help)
            usage_of_verify
            exit 0
            ;;
        esac
        ;;
    '' | list)
        [[ $# -le 1 ]] || { echo "launch.sh: list takes no arguments, got ${*:2}" >&2; exit 2; }
        list
        exit 0
        ;;
esac

# shellcheck source=harness/oneflow_cookbook/start/environment.sh
source "$here/harness/oneflow_cookbook/start/environment.sh"
if [[ $1 == plan ]]; then
    find_any_python 3 8
    exec "$python" "$here/harness/oneflow_cookbook/plan" "${@:2}"
fi
case $1 in # a typing error must not set up 3.9 GB
    -* | shell | show | bytes | verify | test | docs | bench | meshes | mutate) ;;
    *)
        name=${1%.py}
        [[ -f $1 ]] || (cd "$here" && { compgen -G "recipes/$name.py" || compgen -G "recipes/*/$name.py"; } >/dev/null) \
            || refuse "$1: no such file and no recipe: ./launch.sh lists the recipes, and --help the commands"
        ;;
esac
addresses=$(ulimit -v) # kB
[[ $addresses == unlimited || $addresses -ge 5000000 ]] \
    || refuse "ulimit -v allows $((addresses / 1000)) MB of addresses, and a rank needs 5000: type ulimit -v unlimited"
open_files=$(ulimit -n) # with a handful, a look at .venv finds it broken, and it would be set up again
[[ $open_files == unlimited || $open_files -ge 64 ]] \
    || refuse "ulimit -n allows $open_files open files, and a rank needs 64: type ulimit -n 1024"
ensure_environment
exec "$venv/bin/python" "$here/harness" "$@"
