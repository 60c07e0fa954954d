#!/usr/bin/env bash
# On the GPU machine: runs random cases (the first CASES, default 300, of the full profile), seed
# after seed, until the time is up. Nearly every case is a separate program that must be compiled
# first.
#     bash benches/soak.sh FOLDER SECONDS [PROCESSES [FIRST_SEED]]
# A run prints nothing before its end, so no run is started that would not finish, judging by the
# last one. Summaries go to $OUT/soak.txt, the output of each failed run to $OUT/soak-failed.txt.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# //p' "$0"; exit 2; }
rmsnorm=$1/rmsnorm deadline=$((SECONDS + $2)) processes=${3:-6} first=${4:-1}
out=${OUT:-.} failed=$(mktemp -d)
export RMSNORM_CACHE_DIR=${RMSNORM_CACHE_DIR:-/tmp/rmsnorm-cache} RAYON_NUM_THREADS=2
: >"$out/soak.txt"

worker() {
    local seed=$1 took=0 start left status log
    while left=$((deadline - SECONDS)) && [ "$left" -gt 10 ] && [ $((took + took / 10)) -lt "$left" ]; do
        start=$SECONDS status=0 log=$failed/$seed
        timeout "$left" "$rmsnorm" conformance --backend cuda --profile full --most-cases "${CASES:-300}" \
            --seed "$seed" >"$log" 2>&1 || status=$?
        took=$((SECONDS - start))
        echo "seed $seed: exit status $status, $took s: $(tail -1 "$log" | cut -c1-120)" | tee -a "$out/soak.txt"
        [ "$status" -ne 0 ] || rm "$log"
        seed=$((seed + processes))
    done
}

for ((i = 0; i < processes; i++)); do
    worker $((first + i)) &
done
wait
# 124: not finished in time, which is not a failure.
complete=$(grep -c 'exit status 0' "$out/soak.txt") late=$(grep -c 'exit status 124' "$out/soak.txt")
bad=$(grep -vcE 'exit status (0|124),' "$out/soak.txt")
for log in "$failed"/*; do
    [ -e "$log" ] && { echo "== seed ${log##*/}"; head -c 200000 "$log"; } >>"$out/soak-failed.txt"
done
[ "$bad" -eq 0 ] || head -c 4000 "$out/soak-failed.txt"
awk -v c="$complete" -v l="$late" -v b="$bad" '{ for (i = 2; i <= NF; i++) if ($i ~ /^passed/) p += $(i - 1) }
    END { printf "%d seeds complete, %d cases passed, %d seeds late, %d seeds failed\n", c, p, l, b }' "$out/soak.txt"
[ "$bad" -eq 0 ] && [ "$complete" -gt 0 ]
