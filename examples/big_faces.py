"""A large face network on several devices: classes and parameters are sharded.

    python examples/big_faces.py

The script makes four virtual devices of the CPU. On a machine with four GPUs, delete
the lines about XLA_FLAGS and nothing else.
"""

import os
import sys
import tempfile

if "jax" not in sys.modules:  # before JAX is imported
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax

from fedfr_jax.config.build import build
from fedfr_jax.config.files import find, load
from fedfr_jax.runs.experiment import run_experiment


def main(people=600, epochs=2, workdir=None):
    """Train on rendered people; returns the accuracy on pairs of unseen people."""
    config = load(find("bigface/rendered"))
    with config.unlocked():
        config.data.num_identities = people + 204
        config.partition.num_public_ids = people
        config.pretrain.epochs = epochs
    # What the config says about devices:
    #   class_parallel  every device holds a part of the class vectors of the softmax
    #   class_sample_rate      a step draws a third of the classes, the last epoch all
    # of them
    #   sharding        gradients and optimizer state are split ("zero2")
    #   remat           activations of a block are computed again, not stored
    for key in ("class_parallel", "class_sample_rate", "sharding"):
        print(f"{key}: {config.pretrain[key]}")
    print(f"devices: {jax.device_count()}")
    workdir = workdir or tempfile.mkdtemp()
    summary = run_experiment(build(config), workdir)
    metrics = summary["methods"]["pretrained"]["generic"]
    rate = metrics["tar@far=1e-02"]
    print(f"{rate:.2f} of genuine pairs accepted at a false accept rate of 0.01")
    print(f"files: {workdir}")
    return rate


if __name__ == "__main__":
    main()
