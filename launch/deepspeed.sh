#!/usr/bin/env bash
# Trains under DeepSpeed's launcher, on the ranks of one machine: NPROC=4 launch/deepspeed.sh precision=bf16 engine=deepspeed
# For several machines, or other options of the launcher, call it yourself: docs/run/launchers.md.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# its default port is one for all jobs of a machine
port="$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')"

# A signal ends DeepSpeed's front end and leaves the ranks running. So it gets none: the first one goes to the ranks as
# SIGUSR1, on which they save and end with 75, and which the launcher's own processes inherit as ignored.
set -m # a process group of its own
trap '' USR1
deepspeed --num_accelerators "${NPROC:-2}" --master_port "$port" "$here/train.py" "$@" &
job=$!

# the second one ends all
signal=USR1
trap 'kill "-$signal" -- "-$job" 2>/dev/null || true; signal=TERM; stopped=1' TERM INT USR1

stopped=1
while ((stopped)); do # a signal ends `wait`, not the job
    stopped=0
    code=0
    wait "$job" || code=$?
done
while kill -0 -- "-$job" 2>/dev/null; do
    sleep 0.2
done
exit "$code"
