"""Cases: a scenario and its rows."""

import backbone
from market_parts import part_of, parts_of

ROWS = ("fedpav", "standalone", "fedprox", "kd", "cdw", "kd_cdw", "clustering")
MERGED, STRONG = "merged", "merged_strong"
CAMERA, IDENTITY, PARTS = "by_camera", "by_identity", "by_dataset"
PRETRAINED = "pretrained"
OWN_STATISTICS, CENTER = "own_statistics", "strong_center"
# case: its rows, in the order of the tables
CASES = {
    CAMERA: (*ROWS, MERGED),
    IDENTITY: ROWS,
    PARTS: (*ROWS, MERGED, "fedpav_first", "kd_first"),
    OWN_STATISTICS: ("fedpav_local", "kd_local"),
    CENTER: (STRONG,),
    PRETRAINED: ("fedpav", "kd", "cdw", "kd_cdw"),
}
# Rows of another case that a case is compared with: all clients together hold the same
# images by camera and by identity, and the center sees those of by_camera.
ALSO = {
    IDENTITY: (CAMERA, (MERGED,)),
    CENTER: (CAMERA, (MERGED,)),
    PARTS: (OWN_STATISTICS, CASES[OWN_STATISTICS]),
}
IN_PARTS = (PARTS, OWN_STATISTICS)
# Of the case PRETRAINED: rounds, identities that are public, and those to train on.
ROUNDS, PUBLIC = 30, (120, 150)
FEWER = {"c26": (80, 20), "c35": (56, 12), "c14": (24, 9)}
BELOW = {
    "learning_rate_multipliers": {"^(stem|stage)": 0.1}
}  # the released rate below the neck
LONGER = 2  # so many times the rounds in parts, which have a third of the images


def config_of(config, case: str, seed: int):
    """`config`, configs/fedreid/tables.py or one like it, as a case with a seed."""
    with config.unlocked():
        config = config.copy_and_resolve_references()
        config.seed = config.data.seed = config.partition.public.seed = seed
        if case == IDENTITY:
            given = {"name": "by_identity", "num_clients": 6, "seed": seed}
            config.partition = {**given, "public": config.partition.public}
        if case in IN_PARTS:
            path, size = config.data.path, tuple(config.data.image_size)
            config.data = parts_of(path, size, seed)
            config.partition = {
                "name": "by_dataset",
                "public": config.partition.public,
            }
            config.federation.rounds *= LONGER
        if case == PRETRAINED:
            path, size = config.data.path, tuple(config.data.image_size)
            everywhere = (1, 2, 3, 4, 5, 6)
            public = part_of(path, size, seed, everywhere, PUBLIC, (0, 0))
            config.data = parts_of(path, size, seed, FEWER, PUBLIC[1])
            most = {"max_images": config.partition.public.max_images, "seed": seed}
            config.partition = {
                "name": "by_dataset",
                "public": {"source": public, **most},
            }
            config.federation.rounds = ROUNDS
            config.evaluation.local_training.update(BELOW)
        if case == OWN_STATISTICS:  # there is no network for everybody to be judged
            config.evaluation.personalized_every_evaluation = True
        if case == CENTER:
            config.model.update({"neck": "bnneck", "last_stride": 1})
        rows = {name: config.methods[name].to_dict() for name in CASES[case]}
        for row in rows.values():
            if case == PRETRAINED:  # as released, the statistics too
                row.update({**BELOW, "batch_stats": "random_client"})
            if row.get("kind") == "central":
                row["epochs"] = config.federation.rounds
        config.methods = rows
    return config


def prepared(config, case: str, folder):
    """A case's config, with a trained backbone where it starts from one."""
    return backbone.with_backbone(config, folder) if case == PRETRAINED else config
