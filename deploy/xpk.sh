#!/bin/bash
# A run on slices of TPUs in a cluster that xpk has made (pip install xpk).
#   CLUSTER=my-cluster IMAGE=.../fedfr:tpu WORKDIR=gs://bucket/runs/smoke deploy/xpk.sh
# It is started again after code 75 and after signals (128 and above), xpk's default.
set -eu

xpk workload create \
  --cluster="${CLUSTER:?set CLUSTER, a cluster of xpk}" \
  --workload="${NAME:-fedfr}" \
  --tpu-type="${TPU_TYPE:-v5litepod-16}" \
  --num-slices="${NUM_SLICES:-1}" \
  --docker-image="${IMAGE:?set IMAGE, built with DEVICE=tpu}" \
  --max-restarts=10 \
  --restart-on-exit-codes=75 \
  --termination-grace-period-seconds=120 \
  --command="fedfr train --distributed --config=${CONFIG:-smoke} \
--workdir=${WORKDIR:?set WORKDIR, a bucket} --grace_seconds=90"
