#!/bin/bash
# A run in a GKE cluster of Google's Cluster Toolkit.
#   IMAGE=.../fedfr:tpu WORKDIR=gs://bucket/runs/smoke deploy/gcluster.sh
set -eu

gcluster job submit \
  --name="${NAME:-fedfr}" \
  --image="${IMAGE:?set IMAGE, built for the compute type}" \
  --compute-type="${COMPUTE_TYPE:-v5litepod-16}" \
  --restarts=10 \
  --restart-on-exit-codes=75,143 \
  --grace-period=120s \
  --command="fedfr train --distributed --config=${CONFIG:-smoke} \
--workdir=${WORKDIR:?set WORKDIR, a bucket} --grace_seconds=90"
