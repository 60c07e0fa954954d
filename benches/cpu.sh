#!/usr/bin/env bash
# Ours and a published CPU library, one after the other on the same machine, then sweeps:
#     bash benches/cpu.sh FOLDER [COMMAND..]
# FOLDER holds the binary `rmsnorm`. COMMAND prints a list of the peers' rows, as docs/benchmarks.md describes it; they are to
# visit several input sets in turn, as ours do, or they find their data in a cache. Without one ours is measured alone.
# Writes before.json, peers.json, after.json and sweeps.json to $OUT (else the current folder), a table of each and a
# picture of the sweeps. Nothing else should run meanwhile: about five minutes on two cores.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,8s/^# //p' "$0"; exit 2; }
rmsnorm=$1/rmsnorm out=${OUT:-.}
shift

measure() {
    "$rmsnorm" bench --backend cpu --json "$out/$1.json" "${@:2}"
}

measure before --seconds 0.6
if [ $# -gt 0 ]; then
    "$@" >"$out/peers.json"
    measure after --seconds 0.6
    for run in before after; do
        "$rmsnorm" compare "$out/$run.json" "$out/peers.json" >"$out/$run.md"
    done
fi
measure sweeps --sweep cols,rows --norm rms_norm --op forward,backward --seconds 0.3
"$rmsnorm" compare "$out/sweeps.json" --plot "$out/sweeps.svg" >"$out/sweeps.md"
