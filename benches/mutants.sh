#!/usr/bin/env bash
# A fixed sample of one-line bugs in the real sources, each of which some test must see: 20 minutes on two cores.
#     bash benches/mutants.sh
# Hand-made bugs first (benches/mutants.py, benches/mutants/rust.toml), two of every crate, then some of those that `cargo
# mutants` makes of validation and of the cache, if it is installed (cargo install cargo-mutants). docs/internals/proof.md has the figures
# of all of them, and how the kernels' texts are tried on a GPU.
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
