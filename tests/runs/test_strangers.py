"""A run of somebody else writes nowhere, and what is kept of ours has no secrets."""

import json
import os
import sys
import types

import numpy as np
import pytest

from fedfr_jax import manifest
from fedfr_jax.cli import train
from fedfr_jax.cli.flags import config_text
from fedfr_jax.cli.main import main
from fedfr_jax.config import build as building
from fedfr_jax.config import files
from fedfr_jax.config.build import sections
from fedfr_jax.loading import writing_nothing
from fedfr_jax.plan.dummy_inputs import DummyTeacher
from fedfr_jax.runs import evaluation_record
from fedfr_jax.runs.buckets import Mirror, copy_folder
from fedfr_jax.types import Evaluation, Samples, ScoredPairs

SECRET_URLS = (
    "s3://me:sesame@host/run",
    "https://host/run?X-Amz-Credential=sesame&v=3",
    "https://host/run?v=3&X-Amz-Signature=sesame",
    "abfs://host/run?sig=sesame",
    "memory://host/run?token=sesame",
)


def test_no_password_or_signature_of_a_url_is_shown_or_kept(
    tmp_path, monkeypatch, capsys
):
    config = files.load(files.find("smoke"))
    for url in SECRET_URLS:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", ["fedfr", "train", f"--workdir={url}"])
        evaluation_record.write_environment(tmp_path)
        kept = (tmp_path / evaluation_record.ENVIRONMENT).read_text()
        with config.unlocked():
            config.pretrain = {"init": url}
        kept += config_text(config) + str(copy_folder(url))
        assert json.loads(config_text(config))["pretrain"]["init"] != url
        assert sections(config)["pretrain"]["init"] == url  # which is opened
        assert main(["report", url]) in (1, 2, 75)
        kept += "".join(capsys.readouterr())
        assert "/run" in kept and "sesame" not in kept, url
        assert kept.count("***") >= 3
    assert "sesame" not in Mirror(SECRET_URLS[-1], tmp_path).url


STORED = {
    "task": "faces",
    "model": {"name": "ir", "depth": 18},
    "data": {"name": "concat", "sources": {"a": {"cache": "/out/a", "name": "x"}}},
    "partition": {"public": {"source": {"name": "x", "cache": "/out/b"}}},
    "evaluation": {
        "pairs": {"source": {"name": "x", "cache": "/out/c"}},
        "representation": {"reference": "runs/other"},
    },
    "methods": {"m": {"distill": {"cache": "/out/d", "teacher": {"weights": "w"}}}},
    "pretrain": {"distill": {"cache": "/out/e"}},
}


class Built(Exception):
    """Stands for the experiment of the settings that it is raised with."""


def evaluate(folder):
    """`fedfr evaluate` of the run in a folder, in this process."""
    alone = types.SimpleNamespace(join=lambda: None)
    train.evaluate(STORED, workdir=str(folder), processes=alone)


def evaluate_settings(folder, monkeypatch):
    """What `fedfr evaluate` builds of the config of the run in a folder."""

    def build(settings):
        raise Built(settings)

    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(building, "sections", lambda config: STORED)
    monkeypatch.setattr(train, "config_text", json.dumps)
    with pytest.raises(Built) as raised:
        evaluate(folder)
    return raised.value.args[0]


def test_a_run_is_evaluated_without_writing_what_its_config_names(
    tmp_path, monkeypatch
):
    manifest.write_object(tmp_path / "config.json", STORED)
    found = evaluate_settings(tmp_path, monkeypatch)
    assert found["evaluation"]["representation"] == {"reference": "runs/other"}

    def check(section, original):
        for key, value in original.items():
            if isinstance(value, dict):
                check(section[key], value)
            elif key == "cache":
                assert isinstance(section.get(key), DummyTeacher | None), value

    check(found, STORED)
    assert found == writing_nothing(STORED)


def test_a_run_with_links_out_of_its_folder_is_not_evaluated(tmp_path, monkeypatch):
    run, mine = tmp_path / "run", tmp_path / "mine"
    mine.mkdir()
    (mine / "x.jpg").write_text("mine")
    manifest.write_object(run / "config.json", STORED)
    (run / "inner").symlink_to(run)
    evaluate_settings(run, monkeypatch)
    for name, goal in (
        ("pictures", mine),
        ("a.jpg", mine / "x.jpg"),
        ("no", mine / "-"),
    ):
        (run / name).symlink_to(goal)
        with pytest.raises(ValueError, match=f"must have no links .*{name}"):
            evaluate(run)
        (run / name).unlink()


def test_an_evaluations_pictures_replace_a_link(tmp_path):
    mine, pictures = tmp_path / "mine", tmp_path / "pictures"
    mine.write_text("mine")
    pictures.mkdir()
    (pictures / "stage_generic_pairs_0.jpg").symlink_to(mine)
    images = np.zeros((1, 2, 4, 4, 3), np.uint8)
    pairs = ScoredPairs(images, np.ones(1), np.ones(1, bool), [("a", "a")], 0.5)
    evaluation = Evaluation(samples=lambda: Samples(pairs={"pairs": pairs}))
    evaluation_record.write_record(tmp_path, "stage", {"generic": evaluation})
    assert mine.read_text() == "mine"
    assert (pictures / "stage_generic_pairs_0.jpg").read_bytes()[:2] == b"\xff\xd8"
    assert len(os.listdir(pictures)) == 1
