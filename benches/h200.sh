#!/usr/bin/env bash
# Ours and the published GPU kernels, one after the other on the same machine, in groups that each fit one call:
#     bash benches/h200.sh FOLDER SECONDS PART...
# FOLDER holds the binary `rmsnorm`; parts are forward backward small layer residual f32 (with peers), half reductions
# lengths (ours alone; lengths: CUDA at many row lengths, some of which no tile was chosen by) and sweeps (row lengths and
# numbers of rows, CUDA beside wgpu through Vulkan, then the peers). Writes ours-PART.json and peers-PART.json to $OUT
# (else the current folder), then the tables; for sweeps rms, layer and add.json, and for each a table and a picture, as for
# lengths.
# PEERS is the path of bench_peers.py; PEERS=none measures ours alone. PYTHONPATH must lead to the peers' packages.
set -euo pipefail

benches=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 3 ] || { sed -n '2,9s/^# //p' "$0"; exit 2; }
rmsnorm=$1/rmsnorm deadline=$((SECONDS + $2))
shift 2
out=${OUT:-.}
peers=${PEERS:-$benches/../../shared/peers/bench_peers.py}
export PYTHONUNBUFFERED=1

# The shapes of the targets, those that matter most first: what the budget cuts off is the end.
declare -A shapes=(
    [forward]='32768x4096,32768x1024,8192x16384,16384x8192,4096x32768,2048x65536,1024x131072,1048576x128,4096x4096'
    [backward]='32768x4096,32768x1024,8192x16384,2048x65536,4096x4096,4096x1024,16384x8192,4096x32768,1024x131072'
    [small]='1x4096,8x4096,128x4096,128x8192,1024x4096'
    [layer]='32768x4096,32768x1024,8192x16384,2048x65536'
    [residual]='32768x4096,32768x1024,8192x16384'
    [f32]='32768x1024,16384x4096'
    [half]='32768x4096,32768x1024,8192x16384'
    [reductions]='32768x4096,32768x1024,8192x16384,2048x65536,4096x4096,4096x1024'
)
shapes[backward]+=',1048576x128,576000x384,4096x8192'
# Row lengths at 256 MiB a matrix, that of the targets at 64 MiB, and numbers of rows; the peers' shapes are some of them.
lengths='32768x4096,131072x1024,8192x16384,16384x8192,1048576x128,4096x32768,2048x65536,262144x512,174720x768,87360x1536'
lengths+=',65536x2048,52416x2560,26176x5120,18688x7168,10880x12288,1024x131072,524288x256,32768x1024'
counts='1x4096,2x4096,4x4096,8x4096,16x4096,32x4096,64x4096,128x4096,256x4096,512x4096,1024x4096,2048x4096,4096x4096'
counts+=',8192x4096,16384x4096'
shapes[sweeps]='32768x4096,131072x1024,8192x16384,2048x65536,1048576x128,1x4096,4096x4096,16384x8192,4096x32768,256x4096'
shapes[sweeps]+=',16x4096,1024x4096'
shapes[sweeps_layer]='32768x4096,131072x1024,8192x16384,2048x65536'
shapes[sweeps_add]=${shapes[sweeps_layer]}
# Rows in multiples of 64, 256 MiB or a little less.
many='64 72 80 96 112 128 160 192 208 256 288 320 384 416 448 512 576 608 640 704 736 768 864 896 960 1024 1088 1152 1280 1344 1408'
many+=' 1536 1600 1664 1792 1920 2048 2176 2304 2432 2560 2688 2816 2880 3072 3328 3584 3840 4096 4352 4608 5120 5376 5632 6144'
many+=' 6656 7168 7680 8192 9216 9728 10240 11264 12288 13312 14336 15360 16384 18432 20480 24576 28672 32768'
for cols in $many; do
    shapes[lengths]+=${shapes[lengths]:+,}$(((1 << 27) / cols / 64 * 64))x$cols
done

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
    within_budget "$rmsnorm" bench --backend cuda --dtype "$2" --norm "$3" --op "$4" --shapes "${shapes[$1]}" \
        "${@:5}" --json "$out/ours-$1.json"
}

# published PART DTYPE OPS
published() {
    [ "$peers" != none ] || return 0
    printf '\n== peers, %s: %s\n' "$1" "$(machine)"
    # It looks at its budget between operations, each of which may take a while to compile.
    within_budget python3 "$peers" --dtype "$2" --ops "$3" --shapes "${shapes[$1]}" "${@:4}" \
        --budget-s $((deadline - SECONDS - 20)) --out "$out/peers-$1.json"
}

# each NAME NORM OPS SHAPE..: both backends', a shape a process, so that none finds memory as another has left it.
each() {
    local name=$1 norm=$2 ops=$3 shape backend
    for shape in "${@:4}"; do
        for backend in cuda wgpu; do
            within_budget "$rmsnorm" bench --backend "$backend" --dtype bf16 --norm "$norm" --op "$ops" --seconds 0.1 \
                --shapes "$shape" --json "$parts/$name-$backend-$shape.json" >>"$out/$name.txt" 2>&1
        done
    done
    # The first backend's first.
    shopt -s nullglob
    python3 -B "$benches/join.py" "$out/$name.json" "$parts/$name"-{cuda,wgpu}-*.json || echo "nothing of $name"
    shopt -u nullglob
}

sweeps() {
    local parts
    parts=$(mktemp -d)
    # Of an earlier call.
    rm -f "$out"/{rms,layer,add}.{json,md,svg,txt} "$out"/peers-sweeps*.json
    printf '\n== ours, wgpu beside cuda: %s\n' "$(machine)"
    # shellcheck disable=SC2086
    each rms rms_norm forward,backward ${lengths//,/ } ${counts//,/ }
    # shellcheck disable=SC2086
    each layer layer_norm forward,backward ${lengths//,/ }
    # shellcheck disable=SC2086
    each add rms_norm add_forward ${lengths//,/ }
    rm -r "$parts"
    # Few shapes first: what the budget cuts off is the end.
    published sweeps_layer bfloat16 ln_fwd,ln_bwd --only compile,quack,liger
    published sweeps_add bfloat16 add_rms_fwd --only compile,quack
    published sweeps bfloat16 rms_fwd,rms_bwd --only compile,quack,liger
    picture rms "$out"/{rms,peers-sweeps}.json
    picture layer "$out"/{layer,peers-sweeps_layer}.json
    picture add "$out"/{add,peers-sweeps_add}.json
    [ ! -e "$out/rms.md" ] || cat "$out/rms.md"
}

# existing FILE..: `files` is then those that there are.
existing() {
    local file
    files=()
    for file in "$@"; do
        [ ! -e "$file" ] || files+=("$file")
    done
}

# picture NAME FILE..: a table and a picture of those files that there are, if there is the first, ours.
picture() {
    [ -e "$2" ] || return 0
    existing "${@:2}"
    "$rmsnorm" compare "${files[@]}" --plot "$out/$1.svg" >"$out/$1.md" || echo "no table or picture of $1"
}

measure() {
    case $1 in
    forward | small)
        ours "$1" bf16 rms_norm forward
        published "$1" bfloat16 rms_fwd
        ;;
    backward)
        ours "$1" bf16 rms_norm backward
        published "$1" bfloat16 rms_bwd
        ;;
    layer)
        ours "$1" bf16 layer_norm forward,backward
        published "$1" bfloat16 ln_fwd,ln_bwd
        ;;
    residual)
        ours "$1" bf16 rms_norm add_forward
        published "$1" bfloat16 add_rms_fwd
        ;;
    f32)
        ours "$1" f32 rms_norm forward,backward
        published "$1" float32 rms_fwd,rms_bwd
        ;;
    sweeps) sweeps ;;
    half) ours "$1" f16 rms_norm forward,backward ;;
    lengths)
        # Of an earlier call.
        rm -f "$out/ours-lengths.json"
        ours "$1" bf16 rms_norm,layer_norm forward,add_forward,backward --seconds 0.05
        picture "$1" "$out/ours-lengths.json"
        ;;
    reductions) ours "$1" bf16 rms_norm backward --reduction partials,locks,atomics ;;
    esac
}

for part in "$@"; do
    [[ -n ${shapes[$part]:-} && $part != sweeps_* ]] || { echo "no such part: $part"; exit 2; }
done
for part in "$@"; do
    measure "$part"
done
printf '\n'
machine
# Those of this call; an earlier call's files may lie in the same folder.
measured=()
for part in "$@"; do
    # They have tables of their own.
    [[ $part == sweeps || $part == lengths ]] || measured+=("$out/ours-$part.json" "$out/peers-$part.json")
done
existing "${measured[@]}"
[ ${#files[@]} -eq 0 ] || python3 -B "$benches/compare_gpu.py" "${files[@]}"
case " $* " in
*' sweeps '*)
    existing "$out"/{rms,layer,add}.json
    [ ${#files[@]} -eq 0 ] || python3 -B "$benches/compare_wgpu.py" "${files[@]}"
    ;;
esac
printf '%s s in all\n' "$SECONDS"
