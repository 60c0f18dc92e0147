"""Smoke test of a set-up of several hosts: what each sees, and three tiny rounds.

fedfr train --distributed --config=configs/smoke.py --workdir=gs://bucket/smoke

As several processes it prints a line per process (host, devices, mesh, a sum over all
devices). Then 64 clients train an MLP with a last layer of their own, for a minute, so
that sums over devices, personal states, checkpoints and the work folder are all used.
Not measured: the images are black, and there is nothing to learn.
"""

from fedfr_jax.configs import base


def get_config():
    """Three rounds of 64 clients with ten images each."""
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "fake_data",
        "num_identities": 10,
        "images_per_identity": 80,
        "image_size": 16,
    }
    config.partition = {"name": "iid", "num_clients": 64, "seed": 0}
    config.model = {"name": "mlp"}
    config.federation = {
        "rounds": 3,
        "cohort_size": 32,
        "local_epochs": 1,
        "batch_size": 4,
        "flip_probability": 0.0,
        "evaluate_every": 1,
    }
    config.methods = {"fedper": {"learning_rate": 0.05, "personal": {"blocks": 1}}}
    return config.lock()
