#!/usr/bin/env bash
# Trains on the ranks of one machine: NPROC=4 launch/torchrun.sh precision=bf16 train.steps=1000
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec torchrun --standalone --nproc_per_node="${NPROC:-2}" "$here/train.py" "$@"
