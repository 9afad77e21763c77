#!/bin/sh
# Build benchmarks/peers/.venv, a separate environment with Avalanche. Safe to run again: a finished build is not changed.
#   sh benchmarks/peers/setup.sh            (PYTHON=python3.12 to choose the interpreter)
set -eu
cd "$(dirname "$0")"

VENV=.venv
STAMP=$VENV/.stamp
# Installed without their dependencies: those of torchvision would replace the CPU torch by gigabytes of CUDA.
NO_DEPS="torchvision==0.28.0 avalanche-lib==0.6.0"

wanted=$(cat requirements.txt; echo "$NO_DEPS")
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
    echo "benchmarks/peers/$VENV is ready" >&2
    exit 0
fi

rm -f "$STAMP"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
echo "installing into benchmarks/peers/$VENV (a few minutes the first time)" >&2
pip() { "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet "$@"; }
pip --requirement requirements.txt
# shellcheck disable=SC2086  # two words on purpose
pip --no-deps $NO_DEPS
"$VENV/bin/python" avalanche_mas.py --check
# Written last, so that an interrupted build is continued the next time.
printf '%s\n' "$wanted" > "$STAMP"
