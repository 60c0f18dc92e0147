"""BigFace's chain, scaled down: teacher, masked student, semi-supervised student.

fedfr train --config=configs/bigface/chain.py:teacher --workdir=runs/chain/teacher
fedfr train --config=configs/bigface/chain.py:student --workdir=runs/chain/student
fedfr train --config=configs/bigface/chain.py:semi --workdir=runs/chain/semi
fedfr export --weights=runs/chain/semi --output=runs/chain/student.onnx

Rendered faces of 32 pixels, masks on 0.35 of them: 300 people with labels, 300 whose
labels nobody has, 150 to evaluate. `:scratch` is the student without a teacher. The
export is folded: no batch normalization is left.

2 CPU cores: 270, 223 and 268 core seconds, each 12 minutes with much other work. MFR
score at FAR 0.01, lower is better: teacher 0.484, student 0.457, semi 0.409, which sees
twice the images, and scratch 0.466 (2026-11-26, one seed, jax 0.10.2). The ONNX file is
off by 4e-7.
"""

from fedfr_jax.configs import base

# word: width of the first stage, whether a teacher and images without labels are there
DATA = {
    "teacher": (20, False, False),
    "student": (8, True, False),
    "semi": (8, True, True),
    "scratch": (8, False, False),
}
PEOPLE = {
    "labeled": 304,
    "unlabeled": 300,
    "unseen": 150,
}  # four are of clients


def get_config(network="student"):
    """Masks and lambda of the slides; SGD, s = 30, ten epochs, for few images."""
    word = "the word after chain.py:"
    width, has_teacher, is_semi = base.chosen(word, network, DATA)
    config = base.get_config()
    config.data = {
        "name": "concat",
        "sources": {
            name: faces(of, seed) for seed, (name, of) in enumerate(PEOPLE.items())
        },
    }
    config.partition = {
        "num_clients": 2,
        "ids_per_client": 2,
        "client_ids_from": "labeled",
        "num_public_ids": 600 if is_semi else 300,
        "num_unseen_ids": PEOPLE["unseen"],
        "unseen_ids_from": "unseen",
        "seed": config.get_ref("seed"),
    }
    if not is_semi:
        config.partition.public_ids_from = "labeled"
    config.model = {
        "name": "iresnet",
        "blocks": (1, 1, 1, 1),
        "widths": tuple(width * 2**stage for stage in range(4)),
        "embedding_dim": 64,
    }
    config.pretrain = {
        "epochs": 10,
        "batch_size": 64,
        "learning_rate": 0.1,
        "loss": {"name": "cosface", "margin": 0.4},
        "augment": (
            {"name": "face_mask", "probability": 0.35, "fixed_per_image": True},
        ),
    }
    if has_teacher:
        teacher = {"weights": "runs/chain/teacher"}
        config.pretrain.distill = {"teacher": teacher, "weight": 9.0}
    if is_semi:
        config.pretrain.distill.unlabeled_source = "unlabeled"
    config.evaluation = {"fars": (1e-3, 1e-2), "masked_fars": 1e-2}
    config.methods = {}
    return config.lock()


def faces(people, seed):
    """Section of rendered people, others for another seed."""
    return {
        "name": "synthetic_faces",
        "num_identities": people,
        "images_per_identity": 10,
        "image_size": 32,
        "difficulty": 0.8,
        "seed": seed,
    }
