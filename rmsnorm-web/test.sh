#!/usr/bin/env bash
# Builds the page, opens it in headless Chromium on its software adapter, and judges what it shows and saves:
#   bash rmsnorm-web/test.sh           with the quick test, 20 minutes on two cores
#   bash rmsnorm-web/test.sh core      with the full test, more than an hour
# For Debian. Installs what is missing: Chromium by apt-get, playwright-core by npm into the target folder. Report and pictures are left there.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${1:-smoke}
bash rmsnorm-web/build.sh
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/web
if ! command -v chromium; then
    apt-get update -q
    apt-get install -yq --no-install-recommends chromium fonts-dejavu-core
fi
if ! command -v npm; then
    apt-get install -yq --no-install-recommends nodejs npm
fi
if [[ ! -e $target/node_modules/playwright-core ]]; then
    npm install --loglevel=error --no-audit --no-fund --prefix "$target" playwright-core@1.65.1
fi
cp rmsnorm-web/test.mjs "$target"
node "$target/test.mjs" rmsnorm-web/dist "$profile" "$target"
cargo run --quiet --package rmsnorm-cli -- report check "$target/$profile.jsonl"
