#!/usr/bin/env bash
# Ours and the published GPU kernels, one after the other on the same machine, in groups that each fit one call:
#     bash benches/h200.sh FOLDER SECONDS PART...
# FOLDER holds the binary `rmsnorm`; parts are forward backward small layer residual f32 (with peers), half reductions
# lengths (ours alone; lengths: CUDA at many row lengths, some of which no tile was chosen by) and sweeps (row lengths and
# numbers of rows, CUDA beside wgpu through Vulkan, then the peers). The shapes of each are lists of shapes.toml. Writes
# ours-PART.json and peers-PART.json to $OUT (else the current folder), then the tables; for sweeps rms, layer and add.json,
# and for each a table and a picture, as for lengths.
# PEERS is the path of a Python script that times the peers, as docs/benchmarks.md describes it; PYTHONPATH must lead to their
# packages. Without it ours is measured alone.
set -euo pipefail

benches=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 3 ] || { sed -n '2,11s/^# //p' "$0"; exit 2; }
rmsnorm=$1/rmsnorm deadline=$((SECONDS + $2)) out=${OUT:-.}
shift 2
export PYTHONUNBUFFERED=1

machine() {
    nvidia-smi --format=csv,noheader \
        --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used || true
}

# Runs a command until the deadline. One that fails or is late leaves a line, and the next one its turn.
within_budget() {
    local left=$((deadline - SECONDS)) status=0 start=$SECONDS
    if [ "$left" -lt 25 ]; then
        echo "no time left for: $*"
        return
    fi
    timeout --kill-after=5 "$left" "$@" || status=$?
    echo "-- $((SECONDS - start)) s, exit status $status"
}

# ours PART DTYPE NORM OPS [flags]
ours() {
    printf '\n== ours, %s: %s\n' "$1" "$(machine)"
    within_budget "$rmsnorm" bench --backend cuda --dtype "$2" --norm "$3" --op "$4" --shapes "@h200-$1" "${@:5}" \
        --json "$out/ours-$1.json"
}

# shapes LIST: those of a list, one a line.
shapes() { "$rmsnorm" bench --shapes "@h200-$1" --list; }

# published PART LIST DTYPE OPS [flags]
published() {
    [ -n "${PEERS:-}" ] || return 0
    printf '\n== peers, %s: %s\n' "$1" "$(machine)"
    # It looks at its budget between operations, each of which may take a while to compile.
    within_budget python3 "$PEERS" --dtype "$3" --ops "$4" --shapes "$(shapes "$2" | paste -sd,)" "${@:5}" \
        --budget-s $((deadline - SECONDS - 20)) --out "$out/peers-$1.json"
}

# each NAME NORM OPS LIST..: both backends', a shape a process, so that none finds memory as another has left it.
each() {
    local shape backend
    for shape in $(for list in "${@:4}"; do shapes "$list"; done); do
        for backend in cuda wgpu; do
            within_budget "$rmsnorm" bench --backend "$backend" --dtype bf16 --norm "$2" --op "$3" --seconds 0.1 \
                --shapes "$shape" --append "$out/$1.json" >>"$out/$1.txt" 2>&1
        done
    done
}

# compare FLAG VALUE FILE..: a table of those files that there are.
compare() {
    local file files=()
    for file in "${@:3}"; do
        [ ! -e "$file" ] || files+=("$file")
    done
    [ ${#files[@]} -eq 0 ] || "$rmsnorm" compare "${files[@]}" "$1" "$2" || echo "no table of ${files[*]}"
}

# picture NAME FILE..: a table and a picture, if there is the first file, ours.
picture() { [ ! -e "$2" ] || compare --plot "$out/$1.svg" "${@:2}" >"$out/$1.md"; }

sweeps() {
    # Of an earlier call.
    rm -f "$out"/{rms,layer,add}.{json,md,svg,txt} "$out"/peers-sweeps*.json
    printf '\n== ours, wgpu beside cuda: %s\n' "$(machine)"
    each rms rms_norm forward,backward sweeps sweeps-rows
    each layer layer_norm forward,backward sweeps
    each add rms_norm add_forward sweeps
    # Few shapes first: what the budget cuts off is the end.
    published sweeps_layer peers-sweeps-layer bfloat16 ln_fwd,ln_bwd --only compile,quack,liger
    published sweeps_add peers-sweeps-layer bfloat16 add_rms_fwd --only compile,quack
    published sweeps peers-sweeps bfloat16 rms_fwd,rms_bwd --only compile,quack,liger
    picture rms "$out"/{rms,peers-sweeps}.json
    picture layer "$out"/{layer,peers-sweeps_layer}.json
    picture add "$out"/{add,peers-sweeps_add}.json
    measured+=("$out"/{rms,layer,add}.json)
}

measure() {
    case $1 in
    forward | small)
        ours "$1" bf16 rms_norm forward
        published "$1" "$1" bfloat16 rms_fwd
        ;;
    backward)
        ours "$1" bf16 rms_norm backward
        published "$1" "$1" bfloat16 rms_bwd
        ;;
    layer)
        ours "$1" bf16 layer_norm forward,backward
        published "$1" "$1" bfloat16 ln_fwd,ln_bwd
        ;;
    residual)
        ours "$1" bf16 rms_norm add_forward
        published "$1" "$1" bfloat16 add_rms_fwd
        ;;
    f32)
        ours "$1" f32 rms_norm forward,backward
        published "$1" "$1" float32 rms_fwd,rms_bwd
        ;;
    half) ours "$1" f16 rms_norm forward,backward ;;
    reductions) ours "$1" bf16 rms_norm backward --reduction partials,locks,atomics ;;
    lengths)
        # Of an earlier call.
        rm -f "$out/ours-lengths.json"
        ours "$1" bf16 rms_norm,layer_norm forward,add_forward,backward --seconds 0.05
        picture "$1" "$out/ours-lengths.json"
        ;;
    sweeps) sweeps ;;
    esac
}

for part in "$@"; do
    case $part in
    forward | backward | small | layer | residual | f32 | half | reductions | lengths | sweeps) ;;
    *) echo "no such part: $part"; exit 2 ;;
    esac
done
# Of this call; an earlier call's files may lie in the same folder.
measured=()
for part in "$@"; do
    measure "$part"
    # Those two have tables of their own.
    [[ $part == sweeps || $part == lengths ]] || measured+=("$out/ours-$part.json" "$out/peers-$part.json")
done
printf '\n%s\n' "$(machine)"
compare --targets "$benches/targets.toml" "${measured[@]}"
printf '%s s in all\n' "$SECONDS"
