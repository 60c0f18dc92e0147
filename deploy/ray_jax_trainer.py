"""A run on a Ray cluster, by Ray Train's JaxTrainer, a process per worker.

WORKDIR=gs://bucket/runs/smoke python deploy/ray_jax_trainer.py

NUM_WORKERS are the hosts of TPU slices (with TOPOLOGY and ACCELERATOR_TYPE), or GPUs.
Ray connects the workers before the loop: `fedfr train` needs no flags for it.
"""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def train(config):
    """What every worker runs."""
    from fedfr_jax.cli.main import main

    words = [f"--config={config['config']}", f"--workdir={config['workdir']}"]
    code = main(["train", *words])
    if code:
        raise RuntimeError(f"fedfr train ended with code {code}.")


def scaling() -> ScalingConfig:
    """The workers that the variables ask for."""
    num_workers = int(os.environ.get("NUM_WORKERS", "2"))
    topology = os.environ.get("TOPOLOGY")
    if not topology:
        return ScalingConfig(num_workers=num_workers, use_gpu=True)
    return ScalingConfig(
        num_workers=num_workers,
        use_tpu=True,
        topology=topology,
        accelerator_type=os.environ.get("ACCELERATOR_TYPE", "TPU-V6E"),
        resources_per_worker={"TPU": 4},
    )


if __name__ == "__main__":
    run = {
        "config": os.environ.get("CONFIG", "smoke"),
        "workdir": os.environ["WORKDIR"],
    }
    JaxTrainer(
        train,
        train_loop_config=run,
        scaling_config=scaling(),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ).fit()
