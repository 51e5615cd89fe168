#!/bin/sh
# Checks vramscope on a machine with an NVIDIA GPU: run as root, prints one JSON report on standard
# output and what it is doing on standard error. Needs python3; PyTorch for some checks. It takes
# under 4 minutes, needs no network, and reads the card's settings without changing any.
#
# Exit code: 0 no check failed, 1 one did, 2 it could not run at all (the report says why).
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
    printf '{"tool": "vramscope gpu-check", "checks": {}, "error": "%s"}\n' \
        "no python3 on the path; set PYTHON to one"
    exit 2
fi
exec "$python" "$here/gpu_check.py" --agent "$here/vramscope-agent" "$@"
