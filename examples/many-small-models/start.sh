#!/bin/sh
# Starts N models on one GPU, on ports from 8001 on: start.sh [N [GIB]]. Ctrl-C ends them all.
set -eu
count=${1:-8} gib=${2:-12}
here=$(dirname "$0")
trap 'kill $(jobs -p) 2>/dev/null' EXIT
for n in $(seq "$count"); do
    gpumux run --name "model$n" --class latency --sleep-after 10s -- \
        python3 "$here/serve.py" --port $((8000 + n)) --gib "$gib" &
done
wait
