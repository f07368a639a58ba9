#!/bin/sh
# Slurm's Epilog (root, on the compute node): removes the job's tenant. See docs/recipes.md.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${GPUMUX_SLURM_PATH:+:$GPUMUX_SLURM_PATH}
secret=${GPUMUX_SLURM_DIR:-/run/gpumux-slurm}/$SLURM_JOB_ID
[ -e "$secret" ] || exit 0
rm -f "$secret"
api=${GPUMUX_RUNTIME_DIR:-/run/gpumux}/api.sock
curl -fsS --max-time 20 --unix-socket "$api" -X DELETE "http://gpumux/v1/tenants/job-$SLURM_JOB_ID" >/dev/null || echo "gpumux: job-$SLURM_JOB_ID is not removed" >&2
