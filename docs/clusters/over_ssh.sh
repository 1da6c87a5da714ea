#!/usr/bin/env bash
# usage: [HOSTS="host0 host1"] [PORT=29500] bash docs/clusters/over_ssh.sh [option of launch.sh ...] SCRIPT [its arguments ...]
set -uo pipefail
read -ra hosts <<<"${HOSTS:-host0 host1}"
launchers="--nnodes ${#hosts[@]} --master_addr ${hosts[0]} --master_port ${PORT:-29500}"
pids=() code=0
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM HUP
for k in "${!hosts[@]}"; do
    # With a terminal (-tt), the end of ssh is SIGHUP to the launcher there, which ends its ranks; stty keeps the lines.
    # A host that does not answer for 10 s counts as ended.
    ssh -tt -o ServerAliveInterval=5 -o ServerAliveCountMax=2 "${hosts[k]}" \
        "stty -onlcr; cd ${PWD@Q} && exec ./launch.sh $launchers --node_rank $k ${*@Q}" </dev/null &
    pids+=($!)
done
for _ in "${pids[@]}"; do
    wait -n && continue
    code=$? # of the first that fails; then the others are ended
    kill "${pids[@]}" 2>/dev/null
    break
done
wait
exit "$code"
