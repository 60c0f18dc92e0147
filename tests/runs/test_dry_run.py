"""A dry run reads no image, and its numbers are those of hand-made counts."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from fedfr_jax.__main__ import main
from fedfr_jax.build import sections
from fedfr_jax.commands.dry_run import dry_run as dry_run_config
from fedfr_jax.data.partition import ms1m
from fedfr_jax.data.sources.recordio import write_stand_in
from fedfr_jax.federated.settings import Federation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs import dry_run
from fedfr_jax.tasks.faces.methods import federated_faces
from fedfr_jax.tasks.faces.stages import plan
from fedfr_jax.types import Model

SIDE, DIM, BATCH = 8, 16, 8
SPLIT = {
    "num_clients": 2,
    "ids_per_client": 3,
    "num_global_ids": 5,
    "client_images": (10, 20),
    "global_images": (6, 10),
    "num_test_images": 4,
}
ROOT = pathlib.Path(__file__).parent.parent.parent
ROWS = """local local_equal local_negatives fedavg fedavg_equal fedface spreadout moon
          branch_only no_images hard_negatives contrastive no_contrastive finetune
          distill cosface_branch fedfr central""".split()
FORWARD = 2 * BATCH * SIDE * SIDE * DIM


def apply(variables, x, train, key=None):
    del train
    return x.reshape(len(x), -1) @ variables["params"]["kernel"], {}


def init(key):
    kernel = jax.random.normal(key, (SIDE * SIDE, DIM), jnp.float32)
    return {"params": {"kernel": kernel}, "batch_stats": {}}


MODEL = Model(init, apply, (SIDE, SIDE, 1), DIM)


@pytest.fixture(scope="module")
def partition():
    """Two clients of 3 identities x 11 training images, 5 public ones x 8."""
    labels = dry_run.made_up_labels(**SPLIT)
    return ms1m(labels, **SPLIT)


def test_made_up_labels_have_the_counts_of_the_split(partition):
    np.testing.assert_array_equal(np.diff(partition.train_offsets), [33, 33])
    np.testing.assert_array_equal(np.diff(partition.test_offsets), [12, 12])
    assert len(partition.global_examples) == 5 * 8


def test_the_paper_has_about_6500_training_images_per_client():
    partition = ms1m(dry_run.made_up_labels())
    np.testing.assert_array_equal(np.diff(partition.train_offsets), 40 * [6500])
    assert len(partition.global_examples) == 6000 * 70
    assert len(partition.test) == 160_000


def test_fedavg_is_counted_by_its_steps(partition):
    method = federated_faces(
        MODEL, num_classes=3, public=False, contrastive_weight=0.0, branch=None
    )
    federation = Federation(batch_size=BATCH, local_epochs=(2, 1), drop_last=True)
    count = lambda h: dry_run.operations(
        MODEL, method, partition, federation, hard_negatives=h
    )
    flops = count(0)
    assert flops["steps"] == 2 * 2 * (33 // BATCH)
    assert set(flops) == {"steps", "local steps"}
    per_step = flops["local steps"] / flops["steps"]
    # Forward and the kernel's gradient; the images need none.
    assert 2 * FORWARD < per_step < 4 * FORWARD
    assert count(100) == flops  # nobody selects


def test_fedfr_is_counted_with_its_features_and_memory(partition):
    method = federated_faces(MODEL, num_classes=3)
    federation = Federation(batch_size=BATCH, local_epochs=1)
    flops = dry_run.operations(MODEL, method, partition, federation, hard_negatives=15)
    assert flops["steps"] == 2 * (33 + 15) // BATCH
    blocks = 2 * 2 * 48 // BATCH
    np.testing.assert_allclose(
        flops["previous networks' features"], blocks * FORWARD, rtol=0.05
    )
    images = 2 * (66 + 40)
    np.testing.assert_allclose(
        flops["global network's features"], images / BATCH * FORWARD, rtol=0.05
    )
    assert flops["similarities"] == 2 * DIM * 66 * 40
    lowered, row = dry_run.lower_round(
        MODEL, method, partition, federation, make_mesh(2)
    )
    numbers = dry_run.report(lowered, row, partition, flops, lowered.compile())
    assert numbers["GiB"]["temporary"] > 0
    table = (66 + 40) * (SIDE * SIDE + 4) / 2**30
    np.testing.assert_allclose(numbers["GiB"]["images and labels, per device"], table)
    assert "FLOP" in dry_run.format_report(numbers)


def test_hard_negatives_by_class_are_counted_too(partition):
    count = lambda level: dry_run.operations(
        MODEL,
        federated_faces(MODEL, num_classes=3, hard_negatives=level),
        partition,
        Federation(batch_size=BATCH, local_epochs=1),
        hard_negatives=15,
    )
    assert count("class") == count("image")


PLAIN = {"public": False, "contrastive_weight": 0.0, "branch": None}


def test_the_canonical_reduction_is_lowered_with_its_shards(partition):
    method = federated_faces(MODEL, num_classes=3, **PLAIN)
    settings = {"reduction": "canonical", "shards": 6}
    federation = Federation(batch_size=BATCH, local_epochs=1, **settings)
    lowered, _ = dry_run.lower_round(MODEL, method, partition, federation, make_mesh(2))
    assert lowered.in_avals[0][2].shape == (2, 3, 1, 10)  # packed slots [A, w, L, 10]


@pytest.fixture(scope="module")
def counted(partition):
    """Operations of a row, by its options."""

    def count(**options):
        method = federated_faces(MODEL, num_classes=3, **options)
        federation = Federation(batch_size=BATCH, local_epochs=1)
        return dry_run.operations(
            MODEL, method, partition, federation, hard_negatives=15
        )

    return count


@pytest.fixture(scope="module")
def fedavg_flops(counted):
    return counted(**PLAIN)


@pytest.mark.parametrize(
    "once",
    [
        {"spreadout": 0.7, "num_clients": 2},
        {"init_fc": True},
        {"first_previous": "random"},
        {"share": False},
    ],
)
def test_what_happens_once_per_round_is_no_part_of_the_steps(
    counted, fedavg_flops, once
):
    assert counted(**PLAIN, **once) == fedavg_flops


def test_frozen_features_are_counted_beside_the_steps(counted, fedavg_flops):
    plain = fedavg_flops["local steps"]
    moon = counted(**{**PLAIN, "contrastive_weight": 5.0})
    # Three comparisons of features, there and back, but no network.
    steps = moon["steps"]
    assert 0 < moon["local steps"] - plain < steps * FORWARD
    # Own images only, in two views each.
    features = 2 * 66 / BATCH * FORWARD
    assert moon["global network's features"] == pytest.approx(features, rel=0.05)
    assert "similarities" not in moon


def test_a_config_without_its_data_still_runs_dry(capsys):
    config = ConfigDict({"seed": 0, "pretrain": {"batch_size": 8}, "evaluation": {}})
    config.data = {"name": "recordio", "path": "nowhere/train.rec", "image_size": 16}
    config.partition = {"name": "ms1m", **SPLIT, "num_unseen_ids": 6}
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1),
        "widths": (4, 8),
        "embedding_dim": 8,
    }
    config.federation = {"batch_size": 8, "local_epochs": 1}
    fedavg = {"public": False, "contrastive_weight": 0.0, "branch": None}
    config.methods = {"fedavg": fedavg, "everyone": {"kind": "central"}}
    results = dry_run_config(config, compile=False, hard_negatives=5)
    assert set(results) == {"fedavg"}
    assert results["fedavg"]["local steps of round 0"] == 2 * 5
    assert "GiB" in capsys.readouterr().out


@pytest.fixture
def scaled_down(monkeypatch, tmp_path):
    """The paper's config with few people and a small network; its data is not there."""
    monkeypatch.setenv("FEDFR_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    path = ROOT / "configs" / "fedfr" / "ms1m_40x100.py"
    config = runpy.run_path(str(path))["get_config"]()
    with config.unlocked():
        config.data.image_size = 16
        config.partition.update({**SPLIT, "num_unseen_ids": 6})
        config.model = {"name": "sphereface", "blocks": (0,), "widths": (4,)}
        config.model.embedding_dim = 8
        config.pretrain.batch_size = config.federation.batch_size = BATCH
        config.federation.local_epochs = (3, 2)
    return config


def test_a_stand_in_is_opened_and_split_as_the_real_set_would_be(scaled_down, tmp_path):
    wanted = {**SPLIT, "num_unseen_ids": 6}
    with dry_run.stand_in(scaled_down) as settings:
        folder = pathlib.Path(settings["data"]["path"])
        assert {x.name for x in folder.iterdir()} == {
            "train.rec",
            "train.idx",
            "property",
        }
        parts = plan(sections(settings))
    assert not folder.exists() and not list(tmp_path.iterdir())
    p = parts.partition
    assert p.num_classes.tolist() == [3, 3]
    assert np.diff(p.train_offsets).tolist() == [33, 33]
    assert np.diff(p.test_offsets).tolist() == [12, 12]
    assert [len(p.global_examples), len(p.unseen_examples)] == [5 * 8, 6 * 8]
    expected = ms1m(dry_run.made_up_labels(**wanted), **wanted)
    np.testing.assert_array_equal(p.train, expected.train)
    np.testing.assert_array_equal(p.global_examples, expected.global_examples)
    assert parts.source.image_shape == (16, 16, 3)
    assert set(parts.methods) == set(ROWS)


def test_a_set_that_is_there_is_used(scaled_down, tmp_path):
    (tmp_path / "faces_emore").mkdir()
    counts = np.bincount(dry_run.made_up_labels(**SPLIT, num_unseen_ids=6))
    counts[counts == 15] += 2  # images of a client's identity
    labels = np.repeat(np.arange(len(counts)), counts)
    write_stand_in(tmp_path / "faces_emore" / "train.rec", labels)
    with dry_run.stand_in(scaled_down) as settings:
        assert settings["data"]["path"] == scaled_down.data.path
        p = plan(sections(settings)).partition
    assert np.diff(p.train_offsets).tolist() == [39, 39]


def test_the_papers_config_in_small_is_compiled_and_reads_no_image(
    scaled_down, monkeypatch, capsys
):
    def decode(*args):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image, "open", decode)
    with dry_run.stand_in(scaled_down) as settings:
        with pytest.raises(AssertionError, match="decoded"):
            plan(sections(settings)).source.read(np.arange(1))
    numbers = dry_run_config(scaled_down, rows=["fedfr"], hard_negatives=10)["fedfr"]
    gib = numbers["GiB"]
    assert all(value > 0 for value in gib.values())
    assert gib["arguments"] > gib["images and labels, per device"]
    needed = gib["arguments"] + gib["results"] + gib["temporary"]
    needed -= gib["results in place of arguments"]
    np.testing.assert_allclose(gib["the round, per device"], needed)
    assert all(value > 0 for value in numbers["FLOP"].values())
    assert numbers["local steps of round 0"] == 2 * 3 * ((33 + 10) // BATCH)
    assert "2 clients, train                 6          66" in capsys.readouterr().out


def test_equal_rounds_are_reported_once_and_central_rows_have_none(scaled_down, capsys):
    rows = ["fedavg", "contrastive", "finetune", "central"]
    found = dry_run_config(scaled_down, rows=rows, compile=False)
    assert list(found) == ["fedavg", "contrastive", "finetune"]
    assert found["finetune"] is found["contrastive"]
    assert found["contrastive"] != found["fedavg"]
    assert "arguments" not in found["fedavg"]["GiB"]
    assert "finetune: the round of contrastive" in capsys.readouterr().out


@pytest.mark.parametrize(
    "section, key, value, message",
    [
        ("evaluation", "far", 0.1, "config.evaluation must have keys of"),
        ("partition", "num_unseen_ids", 0, "num_unseen_ids must be at least 2"),
        ("federation", "table", "disk", "config.federation.table must be one of"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(scaled_down, section, key, value, message):
    with scaled_down.unlocked():
        scaled_down[section][key] = value
    with pytest.raises(ValueError, match=message):
        dry_run_config(scaled_down, compile=False)


def test_the_paper_size_is_opened_in_seconds_and_an_unknown_row_named(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("FEDFR_DATA", str(tmp_path))
    config = ROOT / "configs" / "fedfr" / "ms1m_40x100.py"
    words = ["train", f"--config={config}", "--dry_run", "--rows=fedfr,nosuch"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "1137500 made-up images of 13000 people, 29 MB" in said.out
    assert (
        "--rows must be of ['branch_only', 'central'," in said.err
        and "got 'nosuch'" in said.err
    )
