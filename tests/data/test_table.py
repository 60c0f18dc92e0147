"""Tables: a .csv becomes numbers and categories, and trains through the shell."""

import json

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.cli.main import main
from fedfr_jax.data.sources.table import table

LINES = ("age,job,note,where,ill", "20,cook,a,x,no", ",nurse,a,y,yes", "40,cook,b,x,no")


def write(path, lines=LINES):
    path.write_text("\n".join(lines))
    return path


def test_numbers_are_scaled_and_words_are_categories(tmp_path):
    path = write(tmp_path / "a.csv")
    source = table(path, label="ill", client="where", ignore=("note",))
    inputs = source.read(np.arange(3))
    np.testing.assert_array_equal(inputs["numbers"], [[-1.0], [0.0], [1.0]])
    np.testing.assert_array_equal(inputs["categories"], [[0], [1], [0]])
    assert source.input_shape == {"numbers": (1,), "categories": (1,)}
    assert source.labels.tolist() == [0, 1, 0] and source.names == ("no", "yes")
    assert source.client_ids.tolist() == ["x", "y", "x"]


def test_codes_are_no_numbers_and_blanks_are_no_class(tmp_path):
    lines = ("code , ill", "1_1,x", "1_2 ,x ", "1_1 , y")
    source = table(write(tmp_path / "a.csv", lines), label="ill")
    inputs = source.read(np.arange(3))
    assert inputs["numbers"].shape == (3, 0)
    np.testing.assert_array_equal(inputs["categories"], [[0], [1], [0]])
    assert source.names == ("x", "y") and source.labels.tolist() == [0, 0, 1]


def test_categories_of_two_columns_do_not_share_a_number(tmp_path):
    source = table(write(tmp_path / "a.csv"), label="ill", ignore=("where",))
    codes = source.read(np.arange(3))["categories"]
    assert not {*codes[:, 0]} & {*codes[:, 1]}


def test_it_trains_through_the_shell(tmp_path, monkeypatch):
    """Both methods learn a rule that needs the number and the word."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["size,color,client,label"]
    for i in range(160):
        size, color = rng.normal(), rng.choice(["red", "blue"])
        label = "up" if size * (1 if color == "red" else -1) > 0 else "down"
        lines.append(f"{size},{color},{i % 4},{label}")
    write(tmp_path / "table.csv", lines)
    options = ["rounds=8", "evaluate_every=0", "local_epochs=4"]
    argv = ["train", "--config=classification/table", "--workdir=run"]
    argv += [f"--config.federation.{x}" for x in options]
    argv.append('--config.methods={"fedavg": {"learning_rate": 0.2}}')
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert main(argv) == 0
        models = ff.load_model("run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["methods"]["fedavg"]["generic"]["accuracy"] > 0.8
    with pytest.raises(ValueError, match="embed needs a model of images or"):
        models.embed(np.zeros((1, 1), np.float32))
