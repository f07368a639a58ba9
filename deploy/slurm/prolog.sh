#!/bin/sh
# Slurm's Prolog (root, on the compute node): makes one tenant of a job that has GPUs. See docs/recipes.md.
# Edit `spec` for the site: by partition here. GPUMUX_RUNTIME_DIR and GPUMUX_SLURM_DIR are for tests and unusual places.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${GPUMUX_SLURM_PATH:+:$GPUMUX_SLURM_PATH}
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0

case ${SLURM_JOB_PARTITION:-} in
  serve*) spec='{"class": "latency", "guaranteed": 0.3}' ;;
  debug*) spec='{"class": "standard"}' ;;
  *) spec='{"class": "batch"}' ;;
esac

api=${GPUMUX_RUNTIME_DIR:-/run/gpumux}/api.sock
folder=${GPUMUX_SLURM_DIR:-/run/gpumux-slurm}
new=$folder/$SLURM_JOB_ID.new
# A Prolog that fails would drain the node: the job runs unmanaged instead.
unmanaged() {
  rm -f "$new"
  echo "gpumux: job $SLURM_JOB_ID runs unmanaged: $1" >&2
  exit 0
}
[ -S "$api" ] || unmanaged "no daemon at $api"

# The devices by UUID, in the order in which Slurm names them.
uuids=$(nvidia-smi --query-gpu=uuid --format=csv,noheader -i "$SLURM_JOB_GPUS") || unmanaged "nvidia-smi: $uuids"
[ -n "$uuids" ] || unmanaged "nvidia-smi names no device of $SLURM_JOB_GPUS"
uuids=$(printf '%s\n' "$uuids" | sed 's/.*/"&"/' | paste -sd,)
token=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
umask 077
{
  mkdir -p "$folder" && chmod 711 "$folder" &&
    printf %s "$token" >"$new" && chown "$SLURM_JOB_UID" "$new"
} || unmanaged "cannot write in $folder"
body="{\"name\": \"job-$SLURM_JOB_ID\", \"spec\": $spec, \"kept\": true, \"token\": \"$token\", \"devices\": [$uuids]}"
# The secret is not an argument: arguments can be read by all users.
answer=$(printf %s "$body" | curl -sS --max-time 20 --unix-socket "$api" -w '\n%{http_code}' -H 'content-type: application/json' --data-binary @- http://gpumux/v1/tenants) ||
  unmanaged "the daemon at $api does not answer"
case $answer in
  *20[0-9]) ;;
  *) unmanaged "$answer" ;;
esac
mv "$new" "$folder/$SLURM_JOB_ID"
