#!/usr/bin/env bash
# Measures this project and a published CPU library, one after the other on the same machine, then
# sweeps:
#     bash benches/cpu.sh FOLDER [COMMAND..]
# FOLDER has the binary `rmsnorm`. COMMAND prints a list of the peers' rows, as described in
# docs/benchmarks.md. It must visit several input sets in turn, as `rmsnorm bench` does, or its data
# is in a cache. Without COMMAND only this project is measured. Writes before.json, peers.json,
# after.json and sweeps.json to $OUT (default: the current folder), a table of each and a plot of
# the sweeps. Nothing else should run meanwhile: about five minutes on two cores.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,9s/^# //p' "$0"; exit 2; }
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
