"""The paths in a config, and what it is without the places of its data."""

import os
import pathlib

import pytest

import fedfr_jax as ff
from fedfr_jax.tasks.places import paths_in, with_paths, without_places

CONFIG = {
    "task": "faces",
    "data": {
        "name": "concat",
        "sources": {
            "a": {"name": "lfw", "data_dir": "lfw", "pairs": "pairs.txt"},
            "b": {
                "name": "folder",
                "path": "~/b",
                "landmarks": "b.csv",
                "filename_pattern": "x",
            },
            "c": {"name": "tfds", "dataset": "x", "data_dir": "gs://bucket/x"},
        },
    },
    "partition": {"name": "natural", "client_ids": "owners.npz:who"},
    "model": {"name": "reid", "weights": "r50.pth"},
    "pretrain": {"init": "~/runs/first", "epochs": 3},
    "evaluation": {
        "pairs": {"source": {"name": "lfw", "data_dir": "lfw", "pairs": "pairs.txt"}},
        "templates": {"path": "IJBC", "media": "meta/media.txt"},
        "identification": "tinyface",
        "representation": {"reference": "runs/central"},
    },
    "methods": {
        "a": {"distill": {"cache": "t.npy", "teacher": {"weights": "runs/big"}}}
    },
}


def test_every_path_is_absolute_and_nothing_else_changes():
    found = dict(paths_in(with_paths(CONFIG)))
    here, home = os.getcwd(), os.path.expanduser("~")
    assert found == {
        ("data", "sources", "a", "data_dir"): f"{here}/lfw",
        ("data", "sources", "b", "path"): f"{home}/b",
        ("data", "sources", "b", "landmarks"): f"{here}/b.csv",
        ("data", "sources", "c", "data_dir"): "gs://bucket/x",
        ("partition", "client_ids"): f"{here}/owners.npz:who",
        ("model", "weights"): f"{here}/r50.pth",
        ("pretrain", "init"): f"{home}/runs/first",
        ("evaluation", "pairs", "source", "data_dir"): f"{here}/lfw",
        ("evaluation", "templates", "path"): f"{here}/IJBC",
        ("evaluation", "identification"): f"{here}/tinyface",
        ("evaluation", "representation", "reference"): f"{here}/runs/central",
        ("methods", "a", "distill", "cache"): f"{here}/t.npy",
        ("methods", "a", "distill", "teacher", "weights"): f"{here}/runs/big",
    }
    back = {keys: path for keys, path in paths_in(CONFIG)}
    restored = with_paths(
        with_paths(CONFIG), dict(zip(found.values(), back.values(), strict=True)).get
    )
    assert restored == CONFIG


def test_the_place_of_the_data_alone_is_no_part_of_what_a_run_is():
    moved = with_paths(CONFIG, lambda path: f"elsewhere/{path}")
    assert without_places(moved)["data"] == without_places(CONFIG)["data"]
    assert without_places(moved)["partition"] == {"name": "natural"}
    assert without_places(moved)["model"] != without_places(CONFIG)["model"]


def test_the_home_folder_is_known_to_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=f"{pathlib.Path(tmp_path)}/none, which does not"
    ):
        ff.open_source("folder", path="~/none", image_size=4)
