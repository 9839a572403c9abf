#!/usr/bin/env bash
# What one GPU can show of polyshard, in minutes; docs/gpu-check.md says how to read it.
#   PYTHON=python3.12   the interpreter, which needs torch; OUT=build/gpu  where the report goes
#   POLYSHARD_REQUIRE_GPU=1   what is skipped counts as failed
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu_check "$@"
