#!/usr/bin/env bash
# Makes the environment on first use, then hands over to harness/.
set -euo pipefail
here=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

usage() {
    cat <<'END'
Run a OneFlow script on several ranks, on this host or on several, or the tests of the cookbook.

  ./launch.sh                                          list the recipes
  ./launch.sh [option ...] SCRIPT [its arguments ...]  SCRIPT: a file, or the bare name of a recipe
  ./launch.sh show [option ...] SCRIPT [its arguments ...]
                                                       draw what each rank holds, and what moves in between
  ./launch.sh bytes [option ...] SCRIPT [its arguments ...]
                                                       list the bytes that each step sends
  ./launch.sh test [--all] [pytest's arguments ...]    --all: what CI runs, the slow tests too
  ./launch.sh mutate [recipe ...]                      break a recipe in every way; the tests must notice each
  ./launch.sh faults [--tries K]                       kill, stop and damage jobs in every way: docs/faults.md
  ./launch.sh docs                                     measure again: docs/sbp-atlas.md
  ./launch.sh meshes                                   train gpt.py on each mesh of up to 4 ranks: docs/gpt.md
  ./launch.sh bench [--short] [PART ...]               measure beside PyTorch and JAX: docs/performance.md

examples
  ./launch.sh recipes/data_parallel.py                 on the recipe's own number of ranks
  ./launch.sh -n 4 data_parallel --graph               on 4 ranks, inside an nn.Graph
  ./launch.sh -n 3 ~/mine.py --my-option               a script of yours
  ./launch.sh --nnodes 2 --node_rank 0 --master_addr 10.0.0.1 --master_port 29500 recipes/hybrid_parallel.py
                                                       host 0 of 2; on the other the same with --node_rank 1
  ./launch.sh bytes -n 4 ~/mine.py --graph
  ./launch.sh test -k pipeline                         tests with this word in their names, slow ones too

options
  -n, --nproc_per_node N   number of ranks on each host (default: such that all hosts together have the first of the
                           script's WORLD_SIZES that fits; 2 if it has none)
  --timeout SECONDS        end the job after that time, and show where each rank is (default 600; 0: no limit)
  --master_port PORT       port at which the ranks meet (default: a free one), or on several hosts the launchers
  --nnodes N, --node_rank K, --master_addr HOST
                           run on N hosts: start the same command on each, with its own K from 0 to N-1; HOST is the
                           name or address of node 0
  --max-restarts R         after a failure start all ranks again, on every node, up to R times (default 0)
  --log-dir DIR            append all that rank K writes to DIR/rank_K.log; the terminal shows only the first rank of
                           this host
  -h, --help               this text; SCRIPT --help shows a script's own options
                           (- and _ within the name of an option are the same)

The first run makes .venv here by uv (1.8 GB to download, 3.9 GB on disk; the next clone links to uv's cache) with a
Python 3.8-3.10 found on this machine or fetched, or with the one that PYTHON names. Each line of output begins with the
number of its rank. The first rank that fails ends the job. Each rank is bound to its share of the cores that launch.sh
may use; taskset chooses others. Ranks compute with OpenBLAS 0.3.34, and under COOKBOOK_BLAS=builtin with the older one
inside OneFlow. Under srun or mpirun each task is a node with one rank (-n: more), without another option: see
docs/clusters.md.

exit code: 0 all ranks ended well; 2 bad input or no environment; 124 time limit; 128 + N ended by signal N;
           else that of the first rank that failed
END
}

list() {
    echo "The recipes. Run one by its name: ./launch.sh data_parallel"
    for chapter in '' layouts/ training/ memory/ transformer/ by_hand/ data_and_state/ starting/; do
        printf '\nrecipes/%s\n' "$chapter"
        files=("$here/recipes/$chapter"*.py)
        [[ $chapter ]] || files=("$here"/recipes/{single_device,{data,model,row,pipeline,hybrid}_parallel}.py)
        for file in "${files[@]}"; do
            read -r line <"$file"
            printf '  %-25s %s\n' "$(basename "$file" .py)" "${line#\"\"\"}"
        done
    done
    printf '\n./launch.sh --help shows the options, and how to run a script of yours.\n'
}

[[ -d /proc/self ]] || { echo "launch.sh: /proc is not mounted, and OneFlow needs it" >&2; exit 2; }

case ${1-} in
    -h | --help) usage; exit 0 ;;
    '') list; exit 0 ;;
esac

# shellcheck source=harness/start/environment.sh
source "$here/harness/start/environment.sh"
addresses=$(ulimit -v) # kB
[[ $addresses == unlimited || $addresses -ge 5000000 ]] \
    || refuse "ulimit -v allows $((addresses / 1000)) MB of addresses, and a rank needs 5000: type ulimit -v unlimited"
ensure_environment
exec "$venv/bin/python" "$here/harness" "$@"
