#!/usr/bin/env bash
# Tries a fixed sample of one-line bugs, each of which a test must catch: 20 minutes on two cores.
#     bash benches/mutants.sh
# First hand-made bugs (benches/mutants.py, benches/mutants/rust.toml), two of every crate. Then, if
# it is installed (cargo install cargo-mutants), some bugs of `cargo mutants` in the validation and
# the cache. docs/internals/proof.md has the results of all bugs, and describes the trials of kernels on a
# GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 benches/mutants.py --check
python3 benches/mutants.py --sample 14 --quick --out target/mutants/sample.json

if cargo mutants --version >/dev/null 2>&1; then
    cargo mutants --no-shuffle --shard 0/16 --output target/mutants --baseline skip --timeout 120 \
        --package rmsnorm-spec --package rmsnorm-gpu --file '**/problem.rs' --file rmsnorm-gpu/src/cache.rs -- --lib
else
    echo 'not run: cargo mutants, which is not installed'
fi
