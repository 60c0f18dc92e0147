"""BigFace's chain in toys: teacher, masked student, semi-supervised student, export."""

import contextlib
import io

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.cli.main import main

TOY = {
    "data.sources.labeled.num_identities": 12,
    "data.sources.unlabeled.num_identities": 4,
    "data.sources.unseen.num_identities": 6,
    "partition.num_unseen_ids": 6,
    "model.blocks": (1, 1),
    "model.embedding_dim": 8,
    "pretrain.epochs": 1,
    "pretrain.batch_size": 16,
}
PEOPLE = {"teacher": 8, "student": 8, "semi": 12}  # public ones
WIDTHS = {"teacher": (6, 12), "student": (4, 8), "semi": (4, 8)}


def fedfr(*words):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            assert main([*map(str, words)]) == 0
    return output.getvalue()


def train(word, folder):
    changes = {**TOY, "partition.num_public_ids": PEOPLE[word]}
    changes["model.widths"] = WIDTHS[word]
    if word != "teacher":
        changes["pretrain.distill.teacher.weights"] = folder / "teacher"
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    place = f"--workdir={folder / word}"
    return fedfr("train", f"--config=bigface/chain:{word}", place, *flags)


@pytest.mark.slow
def test_a_chain_ends_in_a_folded_student_that_gives_the_runs_embeddings(tmp_path):
    for word in PEOPLE:
        train(word, tmp_path)
    file = tmp_path / "student.stablehlo"
    fedfr("export", f"--weights={tmp_path / 'semi'}", f"--output={file}")
    exported = jax.export.deserialize(bytearray(file.read_bytes()))
    assert "rsqrt" not in exported.mlir_module()  # no batch normalization is left
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    found = exported.call((images / 127.5 - 1).astype(np.float32))
    network = ff.load_model(tmp_path / "semi")
    np.testing.assert_allclose(found, network.embed(images), rtol=1e-3, atol=1e-4)
    kernels = [
        x for k, x in network.weights.arrays.items() if k.endswith("stem/conv/kernel")
    ]
    assert [x.shape[-1] for x in kernels] == [4]  # the student's, not the teacher's
