"""BigFace in small on rows that are made up: laws, gains, trade, files, resumption."""

import functools
import importlib.util
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.trees import count

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "bigface_scaling"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "fedfr_tables")]

import scaling_cells as cells  # noqa: E402
import scaling_tables as tables  # noqa: E402


def load_script():
    """run.py, under a name that no other experiment's has."""
    spec = importlib.util.spec_from_file_location("bigface_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_script()


def parameters_of(cell):
    return 1200 * cell.changes["model.widths"][0] ** 2


def images_of(cell):
    return 10 * cell.changes.get(cells.KEPT, 1000)


def sweep_row(name, cell, seed, gain=0.0, masked=0.4, standard=0.2):
    """What a sweep writes: an error of 9 N^-0.3 with a little noise, and what fewer
    than 10,000 images add to it."""
    size, images = parameters_of(cell), images_of(cell)
    noise = np.random.default_rng((seed, size)).normal(0, 0.01)
    error = 9 * size**-0.3 * np.exp(noise) * (1 - gain)
    error += 20 * (images**-0.5 - 10_000**-0.5)
    metrics = {
        "tar@far=1e-02": 1 - error,
        "mfr_masked_fnmr@far=1e-02": masked,
        "mfr_standard_fnmr@far=1e-02": standard,
        "mfr_score@far=1e-02": 0.25 * masked + 0.75 * standard,
    }
    return {
        "run": name,
        "made": "2026-01-01, commit abc",
        "seconds": 2.0,
        "core_seconds": 3.0,
        "flops": 1e5 * size * images,
        **{"params_backbone": size, "params_with_head": size + 64_000},
        **{
            "num_images": images,
            "num_images_seen": 10 * images,
            "num_identities": images // 10,
        },
        **{f"pretrained/generic/{key}": value for key, value in metrics.items()},
    }


def results_of(seeds=(0, 1)):
    """Every part: a teacher gains 10 %, masks trade as the slides say."""
    found = {}
    for part, listed in cells.PARTS.items():
        for seed in seeds:
            rows = {}
            for i, cell in enumerate(listed):
                gain = 0.1 if cell.teacher else 0.0
                trade = {"masked": 0.6 - 0.1 * i, "standard": 0.2 + 0.01 * i}
                options = trade if part == "masks" else {}
                row = sweep_row(f"{part}{i}{seed}", cell, seed, gain, **options)
                rows[cell.name] = tables.kept(cell, row)
            found.setdefault(part, {})[str(seed)] = rows
    return found


def test_the_exponent_that_was_put_in_comes_out_with_its_interval():
    of, _ = tables.studies(results_of(), draws=5).values()
    by_backbone = [found for found in of.findings if found.axes == ("params_backbone",)]
    assert {found.series for found in by_backbone} == {"scratch", "omniglot", "lfw"}
    for found in by_backbone:
        assert found.best.coefficients.exponents[0] == pytest.approx(0.3, abs=0.02)
        assert found.hold_out and len(found.inputs) == 12


def test_sizes_and_amounts_of_data_give_a_joint_law_and_its_budgets():
    rows = {"data": {}, "sizes": {}}
    for part in rows:
        for i, cell in enumerate(cells.PARTS[part]):
            row = sweep_row(f"{part}{i}", cell, 0)
            error = 9 * parameters_of(cell) ** -0.4 + 20 * images_of(cell) ** -0.6
            row["pretrained/generic/tar@far=1e-02"] = 0.95 - error
            rows[part].setdefault("0", {})[cell.name] = tables.kept(cell, row)
    laws = tables.studies(rows, draws=5)
    first = next(iter(laws.values()))
    (joint,) = (
        x for x in first.findings if x.axes == ("params_backbone", "num_images")
    )
    assert len(joint.inputs) == 12 and joint.hold_out
    found = joint.best.coefficients
    np.testing.assert_allclose(found.exponents, [0.4, 0.6], rtol=0.02)
    np.testing.assert_allclose(found.offset, 0.05, rtol=0.05)
    text = tables.text(rows, laws)
    assert "Budgets, by the joint law in parameters of the backbone:" in text
    assert "| faces | w4, 250 people | 2.5 k |" in text


def test_tables_say_gain_and_trade():
    text = tables.text(results_of(), {})
    assert "| w8 | 1 - TAR |" in text and "+10.0 %, +10.0 % | yes |" in text
    # Beside more seeds of the students alone the same seeds are compared.
    fewer = results_of()
    del fewer["distilled"]["1"]
    both = tables.in_common(results_of(seeds=(0,)), "sizes", "distilled")
    assert tables.distill_table(fewer) == tables.distill_table(both)
    assert "+10.0 % | yes |" in tables.distill_table(fewer)
    assert tables.in_common(fewer, "sizes", "distilled") == both
    assert "From no masks to 0.35: masked FNMR -0.2000, standard +0.0200." in text
    assert "it is there." in text
    reversed_trade = results_of()
    for rows in reversed_trade["masks"].values():
        row = rows["ratio 0.5"]["generic"]
        row["mfr_standard_fnmr@far=1e-02"] = 0.1
    assert "number: no." in tables.text(reversed_trade, {})


def test_files_grow_part_by_part(tmp_path, monkeypatch):
    studies = functools.partial(tables.studies, draws=3)
    monkeypatch.setattr(tables, "studies", studies)
    results = {part: runs for part, runs in results_of().items() if part != "lfw"}
    for part in ("masks", "sizes", "distilled"):
        run.publish(tmp_path, part, results[part])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"RESULTS.md", "results.json"}
    assert "### Share of masked images" in (tmp_path / "RESULTS.md").read_text()


def test_equal_settings_are_one_run_and_nothing_is_trained_twice(tmp_path, monkeypatch):
    trained = []

    def train(one, folder):
        assert folder == tmp_path
        trained.append(one)
        cell = cells.sized(one.config.model.widths[0])
        return sweep_row(one.name, cell, one.config.seed)

    monkeypatch.setattr(run, "results_row", train)
    player = run.Player(tmp_path, False)
    for part in ("distilled", "sizes", "masks", "moe"):
        for cell in cells.PARTS[part]:
            assert player.row(cell, 0)
    # Six sizes, four students, three other ratios, two networks of experts.
    assert len(trained) == len({one.name for one in trained}) == 15
    teacher, student = trained[:2]
    told = student.config.pretrain.distill
    assert told.teacher.weights == str(tmp_path / teacher.name)
    again = run.Player(tmp_path, False)
    assert again.row(cells.PARTS["sizes"][0], 0)["run"] == trained[2 + 3].name
    assert len(trained) == 15
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len({json.loads(line)["run"] for line in lines}) == 15


def test_a_resumed_run_does_not_pass_its_last_seconds_for_all(tmp_path, monkeypatch):
    cell = cells.PARTS["sizes"][0]
    monkeypatch.setattr(run, "results_row", lambda one, _: sweep_row(one.name, cell, 0))
    assert "resumed" not in run.Player(tmp_path, False).row(cell, 0)["made"]
    name = json.loads((tmp_path / "results.jsonl").read_text())["run"]
    for file in ("results.jsonl", "manifest.json"):
        (tmp_path / file).unlink()
    (tmp_path / name).mkdir()
    assert "resumed" in run.Player(tmp_path, False).row(cell, 0)["made"]


def test_rows_of_one_run_have_one_cost_and_one_stamp():
    kept = {}
    for seeds in tables.read(FOLDER / "results.json").values():
        for row in (row for rows in seeds.values() for row in rows.values()):
            told = row["made"], row["cost"]
            assert kept.setdefault(row["run"], told) == told


def model_of(cell):
    settings = cells.config_of(cell, 0).model.to_dict()
    shape = (28, 28, 1) if cell.data == "omniglot" else (32, 32, 3)
    return MODELS[settings.pop("name")](shape, **settings)


def test_sizes_span_a_decade_and_a_half():
    listed = cells.PARTS["sizes"]
    shapes = [
        jax.eval_shape(model_of(listed[i]).init, jax.random.key(0)) for i in (0, -1)
    ]
    least, most = (count(of["params"]) for of in shapes)
    assert len(listed) >= 6 and most / least > 10**1.5


@pytest.mark.slow
def test_operations_of_all_kept_rows_are_those_of_their_networks():
    results = tables.read(FOLDER / "results.json")
    for part, listed in cells.PARTS.items():
        for cell in listed:
            forward = model_of(cell).flops
            for rows in results.get(part, {}).values():
                row = rows[cell.name]
                # Rows of the public people, and of the client that has most: two.
                classes = row["num_identities"] - 4 + 2
                one = 3 * (forward + 2 * 64 * classes)
                assert row["flops"] == one * row["num_images_seen"], (part, cell.name)
