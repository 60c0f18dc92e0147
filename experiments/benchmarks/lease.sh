#!/usr/bin/env bash
# Everything that a first hour on a GPU should answer, in ten minutes on one H100 or H200.
#
#   experiments/benchmarks/lease.sh            # on the machine with the GPU
#   experiments/benchmarks/lease.sh --smoke    # tiny, on a CPU, in seconds
#
# Needs Python 3.12 with JAX, flax, optax, orbax and (for the loops beside ours) PyTorch;
# nothing is installed but wheels that lie in .whl/ (ml-collections). Results go to
# $OUT, or experiments/benchmarks/results/, after every case.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if compgen -G ".whl/*.whl" > /dev/null; then
  site=$(mktemp -d)
  python3 -m pip install --quiet --no-index --no-deps --target "$site" .whl/*.whl
fi
export PYTHONPATH="$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec python3 experiments/benchmarks/lease.py ${OUT:+--folder="$OUT"} "$@"
