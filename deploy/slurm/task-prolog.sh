#!/bin/sh
# Slurm's TaskProlog (the job's user, before each task): what it prints as `export NAME=value` is the task's environment.
# See docs/recipes.md. A job without a tenant is left alone.
set -eu
secret=${GPUMUX_SLURM_DIR:-/run/gpumux-slurm}/$SLURM_JOB_ID
[ -r "$secret" ] || exit 0
library=${GPUMUX_LIB_DIR:-/usr/lib/gpumux}/libgpumux.so
echo "export GPUMUX_TENANT=$(cat "$secret")"
echo "export GPUMUX_SOCKET=${GPUMUX_RUNTIME_DIR:-/run/gpumux}/session.sock"
echo "export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}"
