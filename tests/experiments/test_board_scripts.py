"""What the board's own programs report: of configs, of plans, of bits."""

import json

import numpy as np
import pytest

from tests.experiments.scripts import load


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """The mark by which a run finds its processes."""
    monkeypatch.setenv(load("benchmarks/workloads").MARK, "of_a_test")


@pytest.fixture
def data(monkeypatch, tmp_path):
    """An empty folder of data sets."""
    monkeypatch.setenv("FEDFR_DATA", str(tmp_path))
    return tmp_path


def test_a_config_has_its_own_data_or_a_stand_in_that_says_what_is_missing(data):
    script = load("benchmarks/ours_config")
    name, folder = "bench/fedscale_femnist", data / "fedscale"
    folder.mkdir()
    for file in ("femnist.npz", "fedscale/client_device_capacity"):
        (data / file).touch()
    word, note = script.usable_word(name, "fedbuff")
    assert word == "fedbuff_standin"
    assert "without client_behave_trace:" in note and "say nothing of FEMNIST" in note
    (folder / "client_behave_trace").touch()
    assert script.usable_word(name, "fedbuff") == (
        "fedbuff",
        "its own data and traces",
    )


def test_a_config_that_fails_says_why_in_its_last_line(data, monkeypatch):
    script = load("benchmarks/ours_config")
    words = ["x", "--config=bench/fedscale_femnist", "--word=sync"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match=r"mnist_pfl20.*\(FEDFR_DEBUG=1 shows where"):
        script.main()


@pytest.mark.parametrize(
    ("planned", "compiled", "fits"),
    [(True, True, "yes"), (True, False, "no"), (False, True, "no")],
)
def test_a_planned_row_fits_if_both_say_so(monkeypatch, planned, compiled, fits):
    script = load("benchmarks/ours_plan")
    sizes = {"total_bytes": 2**31, "usable_bytes": 3 * 2**32}
    plan = {"images_per_second": 9.0, **sizes, "fits": planned}
    asked = {}

    def print_plan(config, methods, **of):
        asked.update(of, rate=config.pretrain.class_sample_rate)
        return {"stages": {script.STAGE: plan}}

    step = {"gib": {"needed": 3.0}, "fits": compiled}
    monkeypatch.setattr(script, "print_plan", print_plan)
    monkeypatch.setattr(
        script, "compile_for", lambda device, flags: {script.STAGE: {"step": step}}
    )
    row = script.row_of("125000", "Partial FC 0.1", "v100:1x1x8")
    assert asked == {"device": "v100", "devices": 8, "rate": 0.1}
    assert row["system"] == "ours, 8 x v100: 125,000 people, Partial FC 0.1"
    assert (row["gib_a_device"], row["compiled_gib"], row["fits"]) == (2.0, 3.0, fits)
    assert row["usable_gib"] == 12.0


@pytest.mark.parametrize("killed", ["ab", "cd"])
def test_bits_are_the_same_only_if_every_case_has_them(monkeypatch, capsys, killed):
    script = load("benchmarks/ours_bits")
    monkeypatch.setattr("sys.argv", ["x", "--workload=blazefl_all"])
    digest_of = lambda name, words: killed if "killed" in name else "ab"
    monkeypatch.setattr(script, "digest_of_case", digest_of)
    script.main()
    *_, line = capsys.readouterr().out.splitlines()
    report = json.loads(line.removeprefix(script.workloads.PREFIX))
    assert report["same bits"] == ("yes" if killed == "ab" else "no")
    assert len(report["digests"]) == 3


def test_weights_of_a_pytorch_network_become_ours():
    """The same logits, though PyTorch has channels first, also where it flattens."""
    rng, draw = np.random.default_rng(0), {}
    for name, shape in {"0": (2, 1, 1, 1), "3": (3, 8), "5": (4, 3)}.items():
        draw[f"{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        draw[f"{name}.bias"] = rng.normal(size=shape[0]).astype(np.float32)
    x = rng.normal(size=(5, 1, 2, 2)).astype(np.float32)  # NCHW
    kernel, bias = draw["0.weight"][:, 0, 0, 0], draw["0.bias"]
    planes = x * kernel[:, None, None] + bias[:, None, None]
    hidden = planes.reshape(5, -1) @ draw["3.weight"].T + draw["3.bias"]
    expected = hidden @ draw["5.weight"].T + draw["5.bias"]
    params = {"backbone": {"Conv_0": 0, "Dense_0": 0}, "head": 0}
    found = load("benchmarks/same_start").as_ours(params, draw)
    conv, dense = found["backbone"]["Conv_0"], found["backbone"]["Dense_0"]
    assert conv["kernel"].shape == (1, 1, 1, 2)
    y = np.moveaxis(x, 1, -1) @ conv["kernel"][0, 0] + conv["bias"]
    y = y.reshape(5, -1) @ dense["kernel"] + dense["bias"]
    y = y @ found["head"]["kernel"] + found["head"]["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
