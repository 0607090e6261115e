#!/usr/bin/env bash
# DDP on all devices here, or on NPROC of them: scripts/run_ddp.sh C.yaml [KEY=VALUE]...
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: [NPROC=4] $0 C.yaml [KEY=VALUE]..." >&2; exit 2; }
exec "${PYTHON:-python}" "$(dirname "$0")/../run.py" "$@" strategy=ddp ${NPROC:+"launch.nproc=$NPROC"}
