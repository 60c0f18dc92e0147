"""What is played: a case is a scenario and the rows that are played in it."""

from market_parts import parts_of

ROWS = ("fedpav", "standalone", "fedprox", "kd", "cdw", "kd_cdw", "clustering")
MERGED, STRONG = "merged", "merged_strong"
CAMERA, IDENTITY, PARTS = "by_camera", "by_identity", "by_dataset"
OWN_STATISTICS, CENTRE = "own_statistics", "strong_centre"
# case: its rows, in the order of the tables
CASES = {
    CAMERA: (*ROWS, MERGED),
    IDENTITY: ROWS,
    PARTS: (*ROWS, MERGED, "fedpav_first", "kd_first"),
    OWN_STATISTICS: ("fedpav_local", "kd_local"),
    CENTRE: (STRONG,),
}
# Rows of another case that a case is compared with: all clients together hold the same
# images by camera and by identity, and the centre sees those of by_camera.
ALSO = {
    IDENTITY: (CAMERA, (MERGED,)),
    CENTRE: (CAMERA, (MERGED,)),
    PARTS: (OWN_STATISTICS, CASES[OWN_STATISTICS]),
}
IN_PARTS = (PARTS, OWN_STATISTICS)
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
        if case == OWN_STATISTICS:  # there is no network for everybody to be judged
            config.evaluation.personalised_in_rounds = True
        if case == CENTRE:
            config.model.update({"neck": "bnneck", "last_stride": 1})
        rows = {name: config.methods[name].to_dict() for name in CASES[case]}
        for row in rows.values():
            if row.get("kind") == "central":
                row["epochs"] = config.federation.rounds
        config.methods = rows
    return config
