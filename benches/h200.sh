#!/usr/bin/env bash
# Measures a GPU with everything that README and the pages quote of an H200: this package, the published kernels, whole training
# steps, and candle and burn, in one run on one machine.
#
#     bash benches/h200.sh FOLDER [PART..]
#
# Results go to $OUT, or to FOLDER/results. Each part ends within LIMIT seconds (580), so that it fits a call of limited time, and a
# part that fails leaves the others their turn. Without PART all of these run, in this order:
#
#     first        how long first calls take in PyTorch, compiled or from the wheel     first-without.json, first-with.json
#     ours         CUDA: all operations on floats, bf16                                 ours.json
#     codes        CUDA: all kinds of quantized norms                                   codes.json
#     peers        every published kernel but torch.compile's, floats and codes         peers.json, peers-codes.json
#     compile      torch.compile, floats, and
#     compile-codes  quantized norms: compiling takes most of the time                  compile.json, compile-codes.json
#     again        `ours` once more: how far the machine has drifted                    again.json
#     training     training steps of two models                                         training.json
#     wgpu         Vulkan: all operations on floats and codes, bf16                     wgpu.json
#     python       functions of PyTorch and JAX, and the host's time of small calls     torch.json, calls.json, jax.json
#     frameworks   candle's and burn's norms beside ours                                candle.txt, burn.txt, and ..-cpu.txt
#     f32          CUDA and the peers: plain norms, f32                                 f32.json, peers-f32.json
#     targets      CUDA: the shapes of targets.toml, and other reductions, f16          targets.json, reductions.json
#     lengths      CUDA: 73 row lengths                                                 lengths.json, lengths.svg
#
# FOLDER holds the programs, built where there is cargo, and the Python packages (of the Python that runs here):
#
#     cargo build --release --locked -p rmsnorm-cli --all-features                      target/release/rmsnorm
#     cargo build --release --locked -p rmsnorm-candle --features cuda --example compare          as FOLDER/candle
#     cargo build --release --locked -p rmsnorm-burn --features wgpu,burn/vulkan,burn/autotune --example compare   as FOLDER/burn
#     pip install --no-deps --target FOLDER/site . liger-kernel==0.8.5 quack-kernels==0.6.5 flashinfer-python==0.7.2.post1 \
#         nvidia-cudnn-frontend==1.32.0 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1 \
#         apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 einops
#
# PyTorch, transformers and JAX are those of the machine, and flashinfer needs its nvcc and ninja. A program or package that is
# missing is named, and what needs it is not measured. RMSNORM_COMMIT names the commit where there is no repository.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 2; }
benches=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "$1" && pwd)
shift
out=${OUT:-$folder/results} limit=${LIMIT:-580}
mkdir -p "$out" "$folder/cache"
export PYTHONUNBUFFERED=1 RMSNORM_CACHE_DIR=$folder/cache FLASHINFER_WORKSPACE_BASE=$folder/cache QUACK_CACHE_DIR=$folder/cache/quack
export TORCHINDUCTOR_CACHE_DIR=$folder/cache/inductor TRITON_CACHE_DIR=$folder/cache/triton
export PYTHONPATH=$folder/site:$folder/site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}
RMSNORM_COMMIT=${RMSNORM_COMMIT:-$(git -C "$benches" describe --always --dirty=+ --abbrev=12 --match= 2>/dev/null || echo unknown)}
export RMSNORM_COMMIT

# SHAPES and CODE_SHAPES name others. The shapes of README and the pages: few rows, the two of README's table, rows of no power of two, long rows.
shapes=${SHAPES:-128x4096,4096x1024,1500x3200,4096x4096,16384x4096,2048x16384,20000x6400}
code_shapes=${CODE_SHAPES:-16384x4096,4096x1024}
floats=forward,backward,add_forward,forward_add,forward_add_forward
code_ops=rms_static,rms_delayed,rms_static_t,rms_current,rms_row,rms_block128,rms_mx,add_rms_static,ln_static
others=torch,cudnn,liger,quack,flashinfer-cute,flashinfer-cuda

# Runs a command until the part's deadline; its last lines go to the terminal, all of it to a file.
run() {
    local log=$out/$1 left=$((deadline - SECONDS)) status=0 start=$SECONDS
    shift
    if [ "$left" -lt 10 ]; then
        echo "no time left for: $*"
        return
    fi
    timeout --kill-after=5 "$left" "$@" >"$log" 2>&1 || status=$?
    tail -n "${LINES_SHOWN:-4}" "$log" | cut -c1-200
    echo "-- $(basename "$log"): $((SECONDS - start)) s, exit status $status"
}

# bench NAME BACKEND [flags]: ours.
bench() { run "$1.txt" "$folder/rmsnorm" bench --backend "$2" --json "$out/$1.json" "${@:3}"; }

# peers NAME [flags]
peers() { run "$1.txt" python3 "$benches/peers.py" --out "$out/$1.json" --budget $((deadline - SECONDS - 15)) "${@:2}"; }

measure() {
    deadline=$((SECONDS + limit))
    case $1 in
    first)
        local first=$benches/../rmsnorm-python/benches/torch_first_calls.py
        RMSNORM_CACHE_DIR='' run first-without.txt python3 "$first" --out "$out/first-without.json"
        run first-with.txt python3 "$first" --out "$out/first-with.json"
        ;;
    ours) bench ours cuda --dtype bf16 --op "$floats" --shapes "$shapes" --seconds 0.3 ;;
    again) bench again cuda --dtype bf16 --op "$floats" --shapes "$shapes" --seconds 0.3 ;;
    codes)
        bench codes cuda --dtype bf16 --op quantized_forward,add_quantized_forward --shapes "$code_shapes" --seconds 0.2
        ;;
    peers)
        peers peers --only "$others" --shapes "$shapes"
        peers peers-codes --only triton,cudnn,flashinfer-cute,flashinfer-cuda --ops "$code_ops" --shapes "$code_shapes"
        ;;
    compile)
        peers compile --only compile --shapes "$shapes"
        ;;
    compile-codes)
        peers compile-codes --only compile --ops "$code_ops" --shapes "$code_shapes"
        ;;
    training) run training.txt python3 "$benches/training.py" --out "$out/training.json" ;;
    wgpu)
        bench wgpu wgpu --dtype bf16 --op "$floats" --shapes "$shapes" --seconds 0.1
        bench wgpu-codes wgpu --dtype bf16 --norm rms_norm --op quantized_forward --shapes "$code_shapes" --seconds 0.1
        ;;
    python)
        local scripts=$benches/../rmsnorm-python/benches
        run torch.txt python3 "$scripts/torch_speed.py" --device cuda --shapes 8192x4096 --dtypes bfloat16 --out "$out/torch.json"
        run calls.txt python3 "$scripts/torch_calls.py" --device cuda --out "$out/calls.json"
        XLA_PYTHON_CLIENT_PREALLOCATE=false run jax.txt python3 "$scripts/jax_speed.py" --shapes 8192x4096,32768x4096 --dtypes bfloat16 --ops rms_norm \
            --out "$out/jax.json"
        ;;
    frameworks)
        for name in candle burn; do
            [ -x "$folder/$name" ] || { echo "no program $folder/$name"; continue; }
            if [ $name = candle ]; then run candle.txt "$folder/candle" --device cuda; else run burn.txt "$folder/burn" --wgpu; fi
            run "$name-cpu.txt" env MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 "$folder/$name"
        done
        ;;
    f32)
        bench f32 cuda --dtype f32 --shapes "$shapes" --seconds 0.2
        peers peers-f32 --dtype float32 --only "$others" --ops rms_fwd,rms_bwd,ln_fwd,ln_bwd --shapes 4096x1024,16384x4096
        ;;
    targets)
        local list
        for list in forward backward small layer residual; do
            run "targets-$list.txt" "$folder/rmsnorm" bench --backend cuda --dtype bf16 --shapes "@h200-$list" --append "$out/targets.json"
        done
        run reductions.txt "$folder/rmsnorm" bench --backend cuda --dtype bf16,f16 --norm rms_norm --op backward --shapes @h200-reductions \
            --reduction partials,locks,atomics --json "$out/reductions.json"
        "$folder/rmsnorm" compare "$out/targets.json" --targets "$benches/targets.toml"
        ;;
    lengths)
        bench lengths cuda --dtype bf16 --op forward,add_forward,backward --shapes @h200-lengths --seconds 0.05
        "$folder/rmsnorm" compare "$out/lengths.json" --plot "$out/lengths.svg" >"$out/lengths.md"
        ;;
    esac
}

[ $# -gt 0 ] || set -- first ours codes peers compile compile-codes again training wgpu python frameworks f32 targets lengths
for part in "$@"; do
    case $part in
    first | ours | codes | peers | compile | compile-codes | again | training | wgpu | python | frameworks | f32 | targets | lengths) ;;
    *) echo "no such part: $part"; exit 2 ;;
    esac
done
for part in "$@"; do
    printf '\n== %s, %s: %s\n' "$part" "$RMSNORM_COMMIT" "$(nvidia-smi --format=csv,noheader \
        --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used)"
    measure "$part"
done
printf '\n%s s in all\n' "$SECONDS"
