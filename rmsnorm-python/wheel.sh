#!/usr/bin/env bash
# Builds the wheel for any Linux of the last decade (manylinux_2_17), and tests it in fresh environments, without frameworks
# and with the named ones: bash rmsnorm-python/wheel.sh [torch] [jax]. The wheel is written to dist/. It has the compiled kernels of
# the commonest calls, so that these need not wait for the compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
programs=$PWD/rmsnorm-python/python/rmsnorm/programs
trap 'rm -rf "$work" "$programs"' EXIT
python=${PYTHON:-python3}

# An environment with these packages.
environment() {
    "$python" -m venv "$work/$1"
    "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

environment build 'maturin>=1.9.4,<2' ziglang

# RMS norm in bf16, for H200 and H100 SXM; no other GPU was measured. NVRTC is that of PyTorch for CUDA 13.0, and of PyTorch 2.15.
rm -rf "$programs"
for version in 13.0.88 13.2.86; do
    nvrtc=$(.ci/nvrtc $version)
    RMSNORM_NVRTC=$nvrtc RMSNORM_CACHE_DIR=$programs cargo run --release --locked --quiet -- \
        warm --gpu h200 --norm rms_norm --form plain,before_weight --dtype bf16 \
        --cols 64,128,256,512,1024,1536,2048,2560,2880,3072,3584,3840,4096,5120,6144,7168,8192
done

mkdir -p "$work/out"
# The wheel must not contain paths of this machine, such as its cargo home or this checkout.
RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo --remap-path-prefix=$PWD=rmsnorm" \
    PATH="$work/build/bin:$PATH" "$work/build/bin/maturin" build --release --locked --zig --compatibility manylinux_2_17 \
    --out "$work/out"
wheel=$(echo "$work"/out/rmsnorm-*-cp310-abi3-*manylinux_2_17_x86_64.whl)
ls -l "$wheel"

mkdir "$work/content"
"$python" -m zipfile -e "$wheel" "$work/content"
diff -r "$programs" "$work/content/rmsnorm/programs"
du -sh "$work/content/rmsnorm/programs"
library=$(echo "$work"/content/rmsnorm/_native*.so)
needed=$(objdump -p "$library" | sed -n 's/^ *NEEDED *//p')
echo "needs:" $needed
if echo "$needed" | grep -vE '^(libc|libm|libdl|libpthread|librt|libgcc_s|ld-linux-x86-64)\.so'; then
    echo 'the library above is not part of libc'
    exit 1
fi
if grep -rlaF -e "$HOME" -e "$PWD" "$work/content"; then
    echo 'the files above have paths of this machine'
    exit 1
fi

# Without any framework it imports, and NumPy is enough to use it.
environment bare "$wheel"
(cd "$work" && "$work/bare/bin/python" -c 'import rmsnorm; print(rmsnorm.devices())')
environment tested "$wheel[test]" "$@"
(cd rmsnorm-python/tests && RMSNORM_REQUIRE=$(IFS=,; echo "$*") "$work/tested/bin/python" -m pytest -q -p no:cacheprovider .)

mkdir -p dist
cp "$wheel" dist/
echo "dist/$(basename "$wheel")"
