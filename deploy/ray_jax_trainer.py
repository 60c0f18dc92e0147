"""A run on a Ray cluster, by Ray Train's JaxTrainer, a process per host.

WORKDIR=gs://bucket/runs/smoke python deploy/ray_jax_trainer.py

It needs Ray 2.53 or later (before, JaxTrainer knew no GPUs), and on all nodes
fedfr_jax[remote] with the JAX of their devices. NUM_WORKERS are hosts: of GPUS each, or
with TOPOLOGY and ACCELERATOR_TYPE those of TPU slices, of TPUS each. Ray connects the
workers before the loop: `fedfr train` needs no flags for it. It ends workers without
notice: a run that is preempted resumes from its last checkpoint. Ray knows no exit
codes, so that a mistake is tried again ten times, too.
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
    """The workers that the variables ask for: one on each host, with all its devices.

    Ray numbers a worker's GPUs from 0, so that two on one host would share them.
    """
    num_workers = int(os.environ.get("NUM_WORKERS", "2"))
    topology = os.environ.get("TOPOLOGY")
    if not topology:
        gpus = int(os.environ.get("GPUS", "8"))
        return ScalingConfig(
            num_workers=num_workers,
            use_gpu=True,
            resources_per_worker={"GPU": gpus},
            placement_strategy="STRICT_SPREAD",
        )
    return ScalingConfig(
        num_workers=num_workers,
        use_tpu=True,
        topology=topology,
        accelerator_type=os.environ.get("ACCELERATOR_TYPE", "TPU-V6E"),
        resources_per_worker={"TPU": int(os.environ.get("TPUS", "4"))},
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
