#!/usr/bin/env bash
# A fixed sample of one-line bugs in the real sources, each of which some test must see: 20 minutes on two cores.
#     bash benches/mutants.sh [SECONDS]
# Hand-made bugs first (benches/mutants.py, benches/mutants/rust.toml), then those that `cargo mutants` makes of validation
# and of the cache, if it is installed (cargo install cargo-mutants). docs/proof.md has the figures of all of them, and how
# the kernels' texts are tried on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-1200}

python3 benches/mutants.py --check
python3 benches/mutants.py --sample 40 --seconds $((seconds * 2 / 3)) --out target/mutants/sample.json

if cargo mutants --version >/dev/null 2>&1; then
    # A sixteenth of them; 2 is what it answers where one is missed, which is what this is about.
    timeout $((seconds / 3)) cargo mutants --no-shuffle --shard 0/16 --output target/mutants --all-features \
        --package rmsnorm-spec --package rmsnorm-gpu --package rmsnorm-cpu \
        --file '**/problem.rs' --file rmsnorm-gpu/src/cache.rs --file rmsnorm-cpu/src/plan.rs --file rmsnorm-cpu/src/launch.rs ||
        [ $? = 2 ] || [ $? = 124 ]
else
    echo 'not run: cargo mutants, which is not installed'
fi
