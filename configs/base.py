"""What every experiment shares; an experiment's file overrides it."""

import os

from ml_collections import ConfigDict

MCLR = {
    "name": "sgd",
    "weight_decay": 1e-3,
    "weight_decay_mask": "kernel$",
}  # of models/logistic
# FedFR's terms stand below its algorithm; see FaceTerms for the defaults, and for what
# the paper has otherwise. Without any of them it is FedAvg.
NO_TERMS = {"use_public_data": False, "contrastive_weight": 0.0, "branch": None}
FEDAVG = {"algorithm": {"name": "fedfr", **NO_TERMS}}
FEDFR = {"algorithm": "fedfr"}
# DINOv2's ViT-S/14 with registers, and the pixels that it and torchvision's were given.
DINOV2_SMALL = {
    "name": "vision_transformer",
    "patch_size": 14,
    "layer_scale": 1e-5,
    "registers": 4,
}
IMAGENET_PIXELS = {
    "name": "normalize",
    "mean": (123.675, 116.28, 103.53),
    "std": (58.395, 57.12, 57.375),
}


def get_config():
    """Sections are the keyword arguments of the functions that they configure."""
    config = ConfigDict()
    config.task = "faces"
    config.seed = 0
    config.data = ConfigDict()
    config.partition = ConfigDict()
    config.model = ConfigDict()
    config.pretrain = ConfigDict()
    config.federation = ConfigDict()
    # Of faces: EvaluationConfig of tasks/faces/evaluator.py. `fars` and `fpirs` are the
    # rates; a name that ends in "~" is of a rate that so few pairs cannot measure.
    # The others are off until they are set, here or as --config.evaluation.key=value;
    # their settings are in tasks/faces/evaluation_sets.py:
    #   pairs = "lfw.bin", or {"path" or "source", ...}: generic pairs_accuracy and
    #     pairs_tar@far=... by ten folds, or at the thresholds of the development list,
    #     as LFW's View 1; own images by {"name": "listed_pairs", "path", "pairs"}.
    #   identification = "tinyface/Testing_Set", or {"path", "probes", "gallery", ...}:
    #     generic identification_rank... of single images among mates and distractors.
    #   masked_fars = 1e-3, or several rates: generic mfr_score@far=... (0.25 masked +
    #     0.75 standard FNMR, lower is better) on the unseen identities with masks.
    #   templates = "IJBC", or {"path", "images", "media", "landmarks", ...}: generic
    #     ijb_tar@far=..., ijb_tpir@fpir=... and ijb_rank... of IJB-C style templates.
    #   negatives = "other_clients": of personalized 1:1; "all" counts pairs of two
    #     identities of the client too, as the released code.
    #   client_thresholds = "binned": the released evaluation's 2001 bins in
    #     personalized 1:1; "exact" order statistics otherwise.
    # Every generic evaluation embeds those files (federation.evaluate_every).
    config.evaluation = ConfigDict()
    # Any method, and `pretrain`, may have a teacher, see tasks/faces/distillation.py:
    #   distill = {"teacher": {"weights": "big.npz", "model": {...}}, "weight": 9.0}, or
    #     "teacher": {"weights": "runs/big"}, the run directory of the teacher;
    #     "cache": "big.safetensors", embeddings that are kept (and made when missing);
    #     "teacher_input": "clean" for a teacher that sees no mask;
    #     "unlabeled_fraction": 0.5 for a share of images whose labels are not used, 1.0
    #     for clients without labels;
    #     "unlabeled_source": "name" of a joined part without labels, in `pretrain`.
    # Masks on faces are an augment: federation.augment or pretrain.augment =
    #   [{"name": "face_mask", "probability": 0.35, "surface_fraction": 0.5, ...}].
    config.methods = ConfigDict({"fedavg": FEDAVG, "fedfr": FEDFR})
    return config


def data_dir(name):
    """Folder or file `name` under $FEDFR_DATA."""
    return f"{os.environ.get('FEDFR_DATA', '../shared/data')}/{name}"


def chosen(what, word, table):
    """`table[word]`, where `word` is a config's argument and `what` its name."""
    if word not in table:
        raise ValueError(f"{what} must be one of {list(table)}, got {word!r}.")
    return table[word]


def small_network():
    """SphereFace of three blocks, for images of 28 to 48 pixels."""
    return {
        "name": "sphereface",
        "blocks": (1, 1, 1),
        "widths": (32, 64, 128),
        "embedding_dim": 128,
    }


def short_pretraining(epochs, **others):
    """Adam, which small sets need fewer epochs with."""
    return {"epochs": epochs, "optimizer": "adam", "learning_rate": 2e-3, **others}


def short_rounds(rounds, **others):
    """Rounds of few local epochs, each judged."""
    return {
        "rounds": rounds,
        "local_epochs": (4, 4, 3),
        "batch_size": 32,
        "evaluate_every": 1,
        **others,
    }


def small_methods():
    """FedAvg and FedFR with the rates and hard negatives of small sets."""
    rate = {"learning_rate": 1e-3, "decay_epochs": (3, 3, 2)}
    fedfr = {"hard_negative_threshold": 0.5, "max_hard_negatives": 120}
    fedfr = {"algorithm": {"name": "fedfr", **fedfr}, **rate}
    return {"fedavg": {**FEDAVG, **rate}, "fedfr": fedfr}


def table_rows(adapt, *, equal_epochs, terms, images=None, central=None, **common):
    """Every row of FedFR's tables 1 and 2, beside the pretrained network.

    Besides the paper's: what each of FedFR's three terms does without the others, and
    rows that take about as many steps as FedFR, whose hard negatives lengthen an epoch.

    Args:
      adapt: `epochs` and `learning_rate` of the adaptation after the last round.
      equal_epochs: local epochs of the rows *_equal.
      terms: of FedFR in all rows that do not set them, such as the threshold.
      images: settings of the rows that train on images of others, over `common`.
      common: keys that all federated rows share.
      central: what the central row sets otherwise than `pretrain`.
    """
    no_images, no_term = {"use_public_data": False}, {"contrastive_weight": 0.0}
    no_branch, alone = {"branch": None}, {"personal": "."}
    equal = {"local_epochs": equal_epochs}

    def fedfr(*changed, **keys):
        algorithm = {"name": "fedfr", **terms}
        for change in changed:
            algorithm |= change
        is_on_images = algorithm.get("use_public_data", True)
        shared = {**common, **(images or {})} if is_on_images else common
        return {"algorithm": algorithm, **shared, **keys}

    def adapted(kind):
        return fedfr(no_branch, {"adaptation": {**adapt, "kind": kind}})

    fedface = {
        "init_head_from_class_means": True,
        "spreadout": {"threshold": 0.3, "steps": 10},
    }
    return {
        "local": fedfr(NO_TERMS, **alone),
        "local_equal": fedfr(NO_TERMS, **alone, **equal),
        # Public class embeddings are the server's at the start of every round.
        "local_negatives": fedfr(
            no_branch,
            no_term,
            {"public_classes_update": "frozen"},
            personal="^(?!params/phi)",
        ),
        "fedavg": fedfr(NO_TERMS),
        "fedavg_equal": fedfr(NO_TERMS, **equal),
        "fedface": fedfr(
            NO_TERMS,
            fedface,
            loss={"name": "class_hinge", "margin": 0.1},  # a cosine of 0.9
        ),
        "spreadout": fedfr(NO_TERMS, {"spreadout": 0.4}),
        "moon": fedfr(no_images, no_branch),
        "branch_only": fedfr(no_images, no_term),
        "no_images": fedfr(no_images),
        "hard_negatives": fedfr(no_branch, no_term),
        "contrastive": fedfr(no_branch),
        "no_contrastive": fedfr(no_term),
        "finetune": adapted("finetune"),
        "distill": adapted("distill"),
        # The same loss as the main term has, so the same weight; 10 is for BCE.
        "cosface_branch": fedfr({"branch": {"name": "cosface", "weight": 1.0}}),
        "fedfr": fedfr(),
        "central": {"kind": "central", **(central or {})},
    }


def fedper_rows(rate, *, epochs, **central):
    """Rows of FedPer's figures: K_P 0 (FedAvg) to 4 and what they are compared with.

    Args:
      rate: learning rate and other settings of a client's training.
      epochs: of central training, best rounds x local epochs, with its other settings
        in `central`.
    """
    own = {**rate, "init_per_client": True}
    layers = {f"fedper_{k}": {**own, "personal": {"blocks": k}} for k in range(1, 5)}
    return {
        "fedavg": rate,
        **layers,
        "finetune": {**layers["fedper_2"], "personal_epochs": 1},
        "local": {**rate, "personal": "."},
        "central": {"kind": "central", "epochs": epochs, **central},
    }


def fedper_paper(dataset, classes_per_client, model):
    """FedPer's experiments on CIFAR at the paper's size: 10 clients, 100 rounds.

    Half of the images are mirrored, of which the paper says nothing. The central row
    has central training's own schedule and weight decay. A linear base has the one row
    of the paper's section 4.4.

    Args:
      dataset: of TensorFlow Datasets, cifar10 or cifar100.
      model: section of the network.
    """
    config = get_config()
    config.task = "classification"
    splits = {"split": "train", "test_split": "test"}
    config.data = {"name": "tfds", "dataset": dataset, **splits}
    config.partition = {
        "name": "by_class",
        "num_clients": 10,
        "classes_per_client": classes_per_client,
        "seed": config.get_ref("seed"),
    }
    config.model = model
    config.federation = {
        "rounds": 100,
        "local_epochs": 4,
        "batch_size": 128,
        "evaluate_every": 1,
    }
    rows = fedper_rows({"learning_rate": 0.01}, epochs=400, batch_size=128)
    if model["name"] == "linear_base":
        rows = {"fedper_2": rows["fedper_2"]}
    config.methods = rows
    return config


def fedmargin_rows(head_epochs, *, central=None, margins=None, **common):
    """The methods of FedMargin's table 1, on a network that ends in `classifier`.

    Args:
      head_epochs: of FedRep, before its epochs of the body.
      central: epochs and batch size of a row that owns all images; None for no such
        row. Its rate is the others'.
      margins: settings of FedMargin that its rows share.
      common: what all rows share, such as learning_rate.
    """
    uniform = {"name": "fedavg", "weighting": "uniform"}

    def fedmargin(**settings):
        settings = {**(margins or {}), **settings}
        return {"algorithm": {"name": "fedmargin", **settings}}

    rows = {
        "fedavg": {},
        "fairavg": {"algorithm": uniform},
        "local": {"personal": "."},
        # All heads start alike; "init_per_client": True would draw a client's own.
        "fedper": {"personal": {"blocks": 1}},
        "fedrep": {
            "algorithm": {
                "name": "fedrep",
                "head": "/classifier/",
                "head_epochs": head_epochs,
            }
        },
        "fesem": {"algorithm": {"name": "fesem", "num_clusters": 3}},
        "fedatt": {"aggregation": "attention", "algorithm": uniform},
        "fedatt_spectral": {
            "aggregation": {"name": "attention", "distance_norm": "spectral"},
            "algorithm": uniform,
        },
        "feddane": {"algorithm": {"name": "feddane", "mu": 1.0}},
        "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.1}},
        "fedmargin": fedmargin(),
        "fedmargin_counts": fedmargin(weighting="num_examples"),
        # The margin that falls with displacement; see the algorithm's file.
        "fedmargin_hypothesis": fedmargin(
            measure="hypothesis", normalize_features=False
        ),
        "fedmargin_hypothesis_unit": fedmargin(measure="hypothesis"),
    }
    rows = {name: {**common, **row} for name, row in rows.items()}
    if central:
        own = {"kind": "central", "flip_probability": 0.0, **central}
        rows["central"] = {**own, "learning_rate": common["learning_rate"]}
    return rows


def adapter_rows(targets, *, rank=8, head=None, **common):
    """A linear probe and LoRA, whose pairs are averaged, or stay with the clients.

    Args:
      targets: pattern of the layers that LoRA changes.
      head: pattern of what is trained beside it; None is the last layer.
      common: what all rows share, such as learning_rate.
    """
    head = {} if head is None else {"head": head}
    lora = {"name": "lora", "rank": rank, "alpha": 2.0 * rank, "targets": targets}
    rows = {
        "probe": {"adapter": {"name": "head", **head}},
        "lora": {"adapter": {**lora, **head}},
        # A stays as it was drawn: the mean of B is the mean of the products.
        "ffa_lora": {"adapter": {**lora, **head, "train_a": False}},
        "personal_lora": {"adapter": {**lora, **head}, "personal": "lora_"},
    }
    return {name: {**common, **row} for name, row in rows.items()}


def fedreid_rows(local, *, every, epochs, **central):
    """FedReID's rows, where clients keep their classifier unless they train alone.

    Args:
      local: learning rate and other settings of a client's training.
      every: rounds between distillations.
      epochs: of central training, with its other settings in `central`.
    """
    kd = {"name": "kd", "distill_every": every}
    rows = {
        "fedpav": {},
        "standalone": {"personal": "."},
        "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.01}},
        "cdw": {"algorithm": "cdw"},
        "kd": {"algorithm": kd},
        "kd_cdw": {"algorithm": {**kd, "weighting": "distance"}},
        "clustering": {"algorithm": "finch"},
    }
    rows = {name: {**local, **row} for name, row in rows.items()}
    return {**rows, "merged": {"kind": "central", "epochs": epochs, **central}}


def fedreid_market(scenario, rounds=60):
    """Market-1501 in small: a ResNet of four basic blocks on images of 128 x 64.

    The 501 people for developers: 100 are tested, a tenth of the others are public.

    Args:
      scenario: section of the partition.
    """
    config = get_config()
    config.task = "reid"
    config.data = {
        "name": "market1501",
        "path": data_dir("market1501_dev/market1501_dev.zip"),
        "image_size": (128, 64),
        "test_identities": 100,
    }
    config.partition = {**scenario, "public": {"fraction": 0.1}}
    config.model = {
        "name": "reid",
        "depth": 18,
        "blocks": (1, 1, 1, 1),
        "widths": (16, 32, 64, 128),
        "neck_dim": 128,
        "dropout": 0.0,
    }
    augment = ({"name": "pad_and_crop", "padding": 5},)
    config.federation = {
        "rounds": rounds,
        "local_epochs": 1,
        "batch_size": 32,
        "augment": augment,
        "evaluate_every": 5,
    }
    local = {
        "learning_rate": 0.05,
        "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
        "weight_decay": 5e-4,
    }
    config.evaluation = {"local_training": {**local, "epochs": 1}}
    central = {"batch_size": 32, "learning_rate": 0.05, "augment": augment}
    config.methods = fedreid_rows(local, every=5, epochs=rounds, **central)
    return config
