"""The page of runs: all that it shows is in it, and nothing that it was not given."""

import html
import json
import re
import sys

import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.runs.report import charts
from fedfr_jax.runs.run_files import read_run
from fedfr_jax.viewer import page

vl_convert = pytest.importorskip("vl_convert")


@pytest.fixture
def text(run):
    """The page without the script that draws charts."""
    return without_script(page.render([read_run(run)]))


def without_script(text):
    start = text.index("<script>")
    return text[:start] + text[text.index("</script>", start) :]


def specs(text):
    """The charts of a page."""
    found = re.findall(r'data-spec="([^"]*)"', text)
    return [json.loads(html.unescape(one)) for one in found]


def test_a_page_needs_no_network_and_has_every_section(text):
    assert not re.search(r'(src|href)="(https?:)?//', text)
    for part in ("results", "curves", "rates", "clients", "costs", "images", "maps"):
        assert f'<section id="{part}">' in text
    for words in (
        "±0.17",
        "Bo: <b>0.5000</b>",
        "client 4: <b>0.6000</b>",
        "Upload MB",
        "Epsilon",
        "0.6100",
    ):
        assert words in text.replace("&plusmn;", "±"), words
    assert text.count("data:image/png;base64") == 2  # none from outside the run


def test_numbers_of_clients_of_private_training_are_marked(text):
    assert "Not private, though training is: fedavg." in text


def test_names_out_of_a_run_are_text(text):
    assert "Ada &lt;b&gt;" in text and "Ada <b>" not in text


def test_every_chart_is_one_that_vega_compiles(text):
    found = specs(text)
    # Loss, epsilon, accuracy, seconds; ROC, DET; clients, partition; map.
    assert len(found) == 9
    for spec in found:
        vl_convert.vegalite_to_vega(spec)


def test_runs_are_labeled_by_what_tells_them_apart(run, make_run, tmp_path):
    def change(folder, **settings):
        config = json.loads((folder / "config.json").read_text())
        config["methods"]["fedavg"] |= settings.pop("fedavg", {})
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    others = [make_run(run.parent / name, seed=9, version="0.1") for name in "bc"]
    path = tmp_path / "both.html"
    assert main(["report", str(run), str(others[0]), f"--output={path}"]) == 0
    text = without_script(path.read_text())
    assert '<section id="differences">' in text and ">9</td>" in text
    (first, *_) = specs(text)
    lines = {row["line"] for row in first["data"]["values"]}
    assert lines == {"seed 0", "seed 9"}
    labels = lambda: page.run_labels([read_run(x) for x in (run, *others)])
    names = ["a", "b", "c"]
    assert labels() == names  # two runs have one config
    change(others[0], fedavg={"learning_rate": 0.02}, model={"name": "mlp"})
    # The model tells no more runs apart.
    assert labels() == [
        "learning_rate 0.1, seed 0",
        "learning_rate 0.02, seed 9",
        "learning_rate 0.1, seed 9",
    ]
    change(others[1], other={"learning_rate": 3})
    change(run, seed=9)
    assert labels() == [
        "fedavg.learning_rate 0.1, other.learning_rate none",
        "fedavg.learning_rate 0.02, other.learning_rate none",
        "fedavg.learning_rate 0.1, other.learning_rate 3",
    ]
    change(run, seed="x" * page.MAX_LABEL)
    change(others[0], fedavg={"learning_rate": 0.1})
    assert labels() == names  # too long
    (run / "second").mkdir()
    (run / "second" / "metrics.jsonl").write_text('{"round": 1}\n')
    lines = page.named_lines([read_run(run), read_run(others[0])])
    assert [line.name for line in lines] == [
        "a · fedavg",
        "a · second",
        "b · fedavg",
    ]


def test_a_run_that_has_just_begun_has_a_page(tmp_path, make_run, capsys):
    run = make_run(tmp_path / "new", rounds=0, is_done=False)
    assert main(["report", str(run), "--open"]) == 0
    said = capsys.readouterr().out
    assert f"{run}/report.html" in said
    assert "has not finished a round yet" in (run / "report.html").read_text()


def test_without_the_extra_one_line_says_what_to_install(run, monkeypatch, capsys):
    page._tools.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert main(["report", str(run)]) == 2
    assert "pip install 'fedfr_jax[report]'" in capsys.readouterr().err
    page._tools.cache_clear()


def test_rates_that_hardly_change_look_as_if_they_hardly_change():
    chart = charts.line_chart({"a": [(1, 0.93), (2, 0.931)]}, ["a"], x="round", y="y")
    low, high = chart["encoding"]["y"]["scale"]["domain"]
    assert high - low == pytest.approx(0.1) and low < 0.93 < high
