#!/usr/bin/env bash
# On the GPU machine: runs the smoke profile under the four tools of compute-sanitizer, in parallel.
#     bash benches/sanitize.sh FOLDER SECONDS [TOOL...]         # FOLDER has `rmsnorm`; every tool gets SECONDS
# First runs the profile without a tool, which fills the kernel cache (compiling under a tool is
# slow), then for each tool a planted error, to check that the tool finds errors here. Logs:
# $OUT/san-TOOL.txt. Flags of the suite: SUITE (default "--profile smoke"). Exits with 1 if anything
# was found, or a tool did not finish.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# //p' "$0"; exit 2; }
rmsnorm=$1/rmsnorm limit=$2
shift 2
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)
out=${OUT:-.}
read -ra suite <<<"${SUITE:---profile smoke}"
export RMSNORM_CACHE_DIR=${RMSNORM_CACHE_DIR:-/tmp/rmsnorm-cache}
PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
compute-sanitizer --version | tail -1

# The flags of a tool. Racecheck checks shared memory only (in part for the other blocks of a
# cluster): repeated runs of the suite look for races between blocks in global memory, such as in
# the locks.
flags_of() {
    case $1 in
    memcheck) echo '--leak-check no --padding 256 --track-stream-ordered-races all' ;;
    racecheck) echo '--racecheck-report all --racecheck-detect-level warn' ;;
    *) echo ;;
    esac
}

# under TOOL PORT LOG SECONDS COMMAND...: the exit status is 9 if the tool found an error
under() {
    local flags
    read -ra flags <<<"$(flags_of "$1")"
    timeout --kill-after=10 "$4" compute-sanitizer --tool "$1" "${flags[@]}" --port "$2" --error-exitcode 9 \
        --launch-timeout 60 --num-callers-host 12 --print-limit 40 --log-file "$3" "${@:5}"
}

work=$(mktemp -d)
cat >"$work/planted.cu" <<'CU'
// One error for each tool: argument 1 chooses.
#include <cstdio>
#include <cstdlib>
__global__ void outside(float* p) { p[threadIdx.x + 1] = 1; }
__global__ void race(float* p) {
    __shared__ float s[64];
    s[threadIdx.x] = p[threadIdx.x];
    p[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void unset(float* p, float* q) { q[threadIdx.x] = p[threadIdx.x]; }
__global__ void half_sync(float* p) { if (threadIdx.x < 40) __syncthreads(); p[threadIdx.x] = 1; }
int main(int, char** argv) {
    float *p, *q;
    cudaMalloc(&p, 256); cudaMalloc(&q, 256);
    switch (atoi(argv[1])) {
    case 0: outside<<<1, 64>>>(p); break;
    case 1: cudaMemset(p, 0, 256); race<<<1, 64>>>(p); break;
    case 2: unset<<<1, 64>>>(p, q); break;
    case 3: half_sync<<<1, 64>>>(p); break;
    }
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
CU
declare -A planted=([memcheck]=0 [racecheck]=1 [initcheck]=2 [synccheck]=3)
nvcc -arch=sm_90 -lineinfo -o "$work/planted" "$work/planted.cu" || echo 'no planted errors: nvcc failed'

failed=0 start=$SECONDS
if ! timeout "$limit" "$rmsnorm" conformance --backend cuda "${suite[@]}" >"$out/san-none.txt" 2>&1; then
    echo 'FAILED with no tool:'
    failed=1
fi
tail -3 "$out/san-none.txt"
echo "with no tool: $((SECONDS - start)) s; kernels compiled: $(find "$RMSNORM_CACHE_DIR" -type f 2>/dev/null | wc -l)"

# one TOOL PORT: runs a tool on its planted error and on the suite, and prints a line
one() {
    local tool=$1 log=$out/san-$1.txt start=$SECONDS status=0 summary found=unknown
    if [ -x "$work/planted" ]; then
        under "$tool" "$2" "$work/$tool.txt" 60 "$work/planted" "${planted[$tool]}" >/dev/null 2>&1
        [ $? -eq 9 ] && found=yes || found="NO: $(tail -2 "$work/$tool.txt" | tr '\n' ' ')"
    fi
    under "$tool" "$2" "$log" "$limit" "$rmsnorm" conformance --backend cuda "${suite[@]}" \
        >"$work/$tool.out" 2>&1 || status=$?
    summary=$(grep -E 'SUMMARY' "$log" | tr '\n' ' ')
    { echo; tail -25 "$work/$tool.out"; } >>"$log"
    echo "$tool: exit status $status, $((SECONDS - start)) s; planted error found: $found;" \
        "$(tail -1 "$work/$tool.out"); ${summary:-no summary}"
    [ "$status" -eq 0 ] && grep -qE 'SUMMARY: 0 (errors|hazards)' "$log"
}

pids=() port=49200
for tool in "${tools[@]}"; do
    one "$tool" "$port" &
    pids+=($!)
    port=$((port + 20))
done
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
for tool in "${tools[@]}"; do
    grep -qE 'SUMMARY: 0 (errors|hazards)' "$out/san-$tool.txt" 2>/dev/null && continue
    printf '\n== %s begins with\n' "$tool"
    head -60 "$out/san-$tool.txt" | cut -c1-200
done
rm -rf "$work"
[ "$failed" -eq 0 ] && echo 'all clean' || echo 'NOT clean'
exit "$failed"
