"""Settings and files of evaluation sets that do not fit are refused by their names."""

import re
import shutil

import pytest

from fedfr_jax.tasks.faces.evaluation_sets import pair_list, template_set
from tests.tasks.faces.evaluation_files import (
    META,
    SMALL,
    evaluator_of,
    opened,
    write_bin,
)

SETTINGS = [
    ({"client_thresholds": "bins"}, "client_thresholds must be one of .*got 'bins'"),
    ({"pairs": 3}, "pairs must be a mapping, got 3"),
    ({"pairs": "none.bin"}, "pairs.path must exist, got none.bin"),
    ({"pairs": {"fars": 0.1}}, "pairs: one of the keys path and source .*neither"),
    ({"pairs": {"path": "a", "far": 1}}, "pairs must have keys of .*far"),
    (
        {"pairs": {"source": {"name": "orl", "data_dir": "none"}}},
        "pairs.source.data_dir must exist, got none",
    ),
    ({"pairs": {"source": {"name": "pairs"}}}, "pairs.source.name must be one of"),
    ({"templates": {"path": 3}}, "templates.path must be a text or a path, got 3"),
    ({"templates": "none"}, "templates: media must be a file"),
    ({"templates": {"images": "x"}}, "templates needs the key path"),
    (
        {"templates": {"path": "x", "ranks": (1, 2.5)}},
        "templates.ranks must be a whole number or a list of whole numbers, got",
    ),
    ({"templates": {"path": "x", "ranks": 0}}, "templates.ranks must be at least 1"),
    ({"templates": {"path": "x", "fars": "few"}}, "templates.fars must be a finite"),
    ({"masked_fars": 1.5}, "masked_fars must be in"),
]


def test_wrong_settings_are_refused_by_their_key(task):
    for settings, words in SETTINGS:
        with pytest.raises(ValueError) as error:
            evaluator_of(task, **settings, **SMALL)
        assert re.match(f"config.evaluation.{words}", str(error.value)), error.value


def test_pairs_without_both_kinds_in_each_fold_are_refused(tmp_path):
    path = write_bin(tmp_path / "a.bin", [True] * 10 + [False] * 10)
    with pytest.raises(ValueError, match="config.evaluation.set: every fold"):
        opened(pair_list, path=path)
    with pytest.raises(ValueError, match="config.evaluation.set: folds must be"):
        opened(pair_list, path=path, folds=30)


FILES = [
    ("media", lambda lines: ["x.png 100 1", *lines], "none for 1 images .'x.png'"),
    ("media", lambda lines: lines[:9], "template ids must be among"),
    ("media", lambda lines: ["1.png 100"], "must have 3 (words|columns)"),
    ("landmarks", lambda lines: lines[1:], "none for 1 images .'1.png'"),
    ("landmarks", lambda lines: [*lines, lines[0]], "and 1 rows too many"),
    (
        "landmarks",
        lambda lines: [*lines[:-1], "260.png" + " 5" * 11],
        "distinct landmarks per image, got others for 260.png",
    ),
    (
        "landmarks",
        lambda lines: [lines[0].rpartition(" ")[0] + " nan", *lines[1:]],
        "must have finite scores, got a non-finite one for 1.png",
    ),
    ("pairs", lambda lines: [*lines, "100 7 1"], r"got \[7\]"),
    ("pairs", lambda lines: ["100 101 0"], "pairs of both labels"),
    ("gallery", lambda lines: [*lines, "9,9,9"], r"got \[9\]"),
    ("probes", lambda lines: [lines[0], "100,777,x"], "a probe with a mate in the gal"),
    ("probes", lambda lines: [], "ijbc_1N_probe_mixed.csv"),
]


def test_files_that_do_not_fit_are_refused_by_name(release, tmp_path):
    path = tmp_path / "IJBC"
    shutil.copytree(release, path)
    for key, change, message in FILES:
        file = path / "meta" / META[key]
        text = file.read_text()
        file.write_text("\n".join(change(text.splitlines())))
        with pytest.raises(ValueError, match=message) as caught:
            opened(template_set, (112, 112, 1), path=path)
        assert str(caught.value).startswith("config.evaluation.set")
        # Too short a list of media is found by the pairs that are not in it.
        assert META[key] in str(caught.value) or key == "media"
        file.write_text(text)
    (path / "loose_crop" / "7.png").unlink()
    message = r"set: .*loose_crop must have every listed image, got 1 of 260 missing"
    with pytest.raises(ValueError, match=message):
        opened(template_set, (112, 112, 1), path=path)


def test_protocols_that_measure_nothing_or_need_more_are_refused(release):
    plain = {"path": release, "align": False}
    for settings, words in (
        ({**plain, "pairs": None, "probes": None}, "pairs or probes must be a file"),
        ({"path": release, "landmarks": None}, "set: landmarks must be a file"),
        ({**plain, "gallery": ()}, "gallery must have at least one file"),
    ):
        with pytest.raises(ValueError, match=words):
            opened(template_set, **settings)
    bare = {**plain, "landmarks": None, "use_detector_score": False, "pairs": None}
    one = {"path": release, "pairs": None, "gallery": "meta/ijbc_1N_gallery_G2.csv"}
    for settings in (bare, one):
        assert opened(template_set, **settings).source.labels.size == 260
