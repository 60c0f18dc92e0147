"""FedReID's tables in small: Market-1501 by camera, by identity and in unequal parts.

python experiments/fedreid_tables/run.py --config=configs/fedreid/tables.py \
    --workdir=runs/fedreid_tables

The rows of all cases; experiments/fedreid_tables/reid_cases.py says which are played
where. By itself it is the by-camera case. For two CPU cores. Results and time:
experiments/fedreid_tables/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """A thin ResNet on images of 64 x 32, every round judged."""
    rounds = 16
    config = base.fedreid_market({"name": "by_camera"}, rounds=rounds)
    config.data.image_size = (64, 32)
    config.data.seed = config.get_ref("seed")
    config.partition.public = {"fraction": 0.1, "max_images": 320, "seed": 0}
    config.federation.update({"evaluate_every": 1, "checkpoint_every": 5})
    config.evaluation.num_visualized = 0
    crop = ({"name": "pad_and_crop", "padding": 3},)
    config.federation.augment = crop
    config.methods = rows(config.evaluation.local_training.to_dict(), rounds, crop)
    return config.lock()


def rows(after, rounds, crop):
    """FedReID's rows, two of them with other statistics, and a strong center.

    Args:
      after: the local training that makes a local model, which is that of every round.
    """
    local = {key: value for key, value in after.items() if key != "epochs"}
    plain = {"epochs": rounds, "batch_size": 32, "augment": crop}
    # As algorithm 3 of arXiv:2205.12144 has it, and as every tested round was there.
    made = base.fedreid_rows(local, every=1, learning_rate=0.05, **plain)
    for row in ("fedpav", "kd"):
        for name, how in (("first", "random_client"), ("local", "local")):
            made[f"{row}_{name}"] = {**made[row], "batch_stats": how}
    made["merged_strong"] = {
        "kind": "central",
        **{
            **plain,
            "augment": (*crop, {"name": "random_erasing"}),
        },
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "loss": {"label_smoothing": 0.1, "triplet_weight": 1.0},
        "identities_per_batch": 8,
    }
    return made
