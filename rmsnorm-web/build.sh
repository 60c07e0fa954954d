#!/usr/bin/env bash
# Builds the page into rmsnorm-web/dist: static files for any web server. Installs wasm-bindgen into the target folder. Where Rust has
# no standard library for WebAssembly (`rustup target add wasm32-unknown-unknown` installs it), Debian's compiler for it by apt-get.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$HOME/.cargo/bin"
mkdir -p "${CARGO_TARGET_DIR:-target}/web"
target=$(cd "${CARGO_TARGET_DIR:-target}/web" && pwd)
triple=wasm32-unknown-unknown
export CARGO_TARGET_DIR=$target CARGO_INCREMENTAL=0

version=$(grep -A1 '^name = "wasm-bindgen"$' Cargo.lock | sed -n 's/^version = "\(.*\)"$/\1/p')
bindgen=$target/tools/bin/wasm-bindgen
if [[ $("$bindgen" --version 2>/dev/null) != "wasm-bindgen $version" ]]; then
    # Without --locked: the lock names versions that are no longer there.
    cargo install --quiet --root "$target/tools" wasm-bindgen-cli --version "$version"
fi

sysroot=$(rustc --print sysroot)
options=(--release --package rmsnorm-web --target "$triple")
if [[ ! -d $sysroot/lib/rustlib/$triple ]]; then
    linker=$(find "$sysroot/lib/rustlib" -name rust-lld -print -quit)
    if ! command -v apt-get >/dev/null || [[ -z $linker ]]; then
        echo "Rust has no standard library for $triple; fix: rustup target add $triple" >&2
        exit 1
    fi
    if [[ ! -d /usr/lib/rustlib/src/rust/library ]]; then
        apt-get update -q
        apt-get install -yq --no-install-recommends rustc-web rust-web-src
    fi
    # Debian's compiler for the web comes with the sources of its standard library, which is built first.
    export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$linker
    options+=(-Zbuild-std=std,panic_abort)
fi
cargo build "${options[@]}"

rm -rf rmsnorm-web/dist
"$bindgen" --target web --no-typescript --out-dir rmsnorm-web/dist "$target/$triple/release/rmsnorm_web.wasm"
cp rmsnorm-web/page/* rmsnorm-web/dist
tar -cC rmsnorm-web/dist . | gzip -9 | wc -c | sed 's|.*|rmsnorm-web/dist: & bytes compressed|'
