"""Runs of strangers: one odd file costs one line, and nothing leads out of a run."""

import copy
import json
import os

import pytest
from pydantic import ValidationError
from rich.console import Console

from fedfr_jax.cli.main import main
from fedfr_jax.runs import records, run_files
from fedfr_jax.runs.report.tables import result_table
from fedfr_jax.runs.run_files import RunList, read_run
from fedfr_jax.runs.terminal import LineView
from fedfr_jax.viewer import page

FILES = ("config", "summary", "environment", "partition", "seconds")
FILES = [f"{name}.json" for name in FILES] + ["fedavg/evaluation.json"]
ODD = ["null", "true", "-5", '"[/]\\u001b[2J<b>"', "[[]]", '{"a": 7}', "1e999"]
ODD += ['"\\ud800"', "[" * 900 + "]" * 900]
HOLE = '"a hole"'


def holes(value):
    """Copies of a JSON value, each with one of its parts replaced by HOLE."""
    yield json.loads(HOLE)
    items = value.items() if isinstance(value, dict) else ()
    items = list(enumerate(value))[:1] if isinstance(value, list) else items
    for key, inner in items:
        for changed in holes(inner):
            whole = copy.copy(value)
            whole[key] = changed
            yield whole


def is_left_out(run):
    """Whether one of the files that a page reads is."""
    for stage in run.stages.values():
        _ = stage.rows, stage.evaluations
    _ = run.environment, run.partition, run.seconds
    return bool(run.problems)


@pytest.mark.parametrize("name", [*FILES, "fedavg/metrics.jsonl"])
def test_no_value_of_a_file_takes_down_the_list_or_the_page(
    run, make_run, name, monkeypatch
):
    tools = page.templates(), ""  # without the script that draws charts, a megabyte
    monkeypatch.setattr(page, "_tools", lambda: tools)
    make_run(run.parent / "b", seed=1)
    path, num_left_out = run / name, 0
    lines = path.read_text().splitlines()
    for whole in holes(json.loads(lines[-1])):
        template = "".join(f"{x}\n" for x in [*lines[:-1], json.dumps(whole)])
        for odd in ODD:
            path.write_text(template.replace(HOLE, odd))
            listing = RunList(run.parent).read()
            json.dumps(listing.rows, allow_nan=False)
            assert [row["name"] for row in listing.rows] == ["a", "b"]
            assert len(listing.problems) <= 1, (whole, odd)
            found = read_run(run)
            if is_left_out(found):
                num_left_out += 1
            else:
                assert "2J<b>" not in page.render([found]), (whole, odd)
    assert num_left_out >= 8  # all but the odd value {"a": 7} for the whole file


def test_records_of_the_wrong_type_or_length_are_refused():
    clients = {"count": 1, "ids": [0], "values": [0.5], "quantiles": [0.5] * 101}
    clients |= {"mean": 0.5, "std": 0.0}
    curve = {"fields": ["far", "tar"], "values": [[0.1], [0.5]]}
    counted = ["far", "tar", "num_negatives"]
    points = {"x": [0], "y": [1], "labels": ["a"], "explained": 0.5}
    whole = {
        "per_client": {"m": clients},
        "curves": {"roc": curve},
        "maps": {"m": points},
        "images": {"a": "b"},
    }

    def is_refused(kind, value):
        try:
            kind.validate_json(json.dumps(value))
        except ValidationError:
            return True
        return False

    assert not is_refused(records.EVALUATIONS, {"generic": whole})
    for odd in (
        {"per_client": {"m": {**clients, "ids": [0, 1]}}},
        {"per_client": {"m": {**clients, "quantiles": [0.5] * 100}}},
        {"per_client": {"m": {**clients, "count": "1"}}},
        {"per_client": {"m": {"count": 1}}},
        {"curves": {"roc": {**curve, "fields": ["tar", "far"]}}},
        {"curves": {"roc": {**curve, "fields": ["far"]}}},
        {"curves": {"roc": {"fields": counted, "values": [[0.1], [0.5], [3]]}}},
        {"curves": {"cmc": {"fields": counted, "values": [[0.1], [0.5], [3, 4]]}}},
        {"curves": {"cmc": {**curve, "values": [[0.1], [0.5, 0.6]]}}},
        {"curves": {"cmc": {**curve, "values": [[0.1], 0.5]}}},
        {"maps": {"m": {**points, "labels": []}}},
        {"images": ["a"]},
    ):
        assert is_refused(records.EVALUATIONS, {"generic": odd}), odd
    assert not is_refused(records.ROW, {"round": 1, "loss": None})
    for odd in ({"round": 1.5}, {"round": -1}, {"round": None}, {}):
        assert is_refused(records.ROW, odd), odd
    for name in ("", ".", "..", "a/b", "/a", "a\0"):
        assert is_refused(records.SUMMARY, {"methods": {name: {}}}), name


def test_links_pipes_and_paths_in_a_run_are_not_followed(run, tmp_path, capsys):
    outside = tmp_path / "secret"
    (outside / "fedavg").mkdir(parents=True)
    secret = (run / "fedavg" / "metrics.jsonl").read_text().replace("loss", "secret")
    (outside / "metrics.jsonl").write_text(secret)
    (run / "linked").symlink_to(outside)
    (run / "piped").mkdir()
    os.mkfifo(run / "piped" / "metrics.jsonl")
    (run / "other").mkdir()
    (run / "other" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (run / "seconds.json").unlink()
    os.mkfifo(run / "seconds.json")
    os.mkfifo(run / ".lock")
    methods = {name: {} for name in ("linked", "piped", "other")}
    (run / "summary.json").write_text(json.dumps({"methods": methods}))
    found = read_run(run)
    assert [len(stage.rows) for stage in found.stages.values()] == [3, 0, 0, 0]
    assert found.seconds is None and found.state == "finished"
    assert sorted(x.removeprefix(f"{run}/") for x in found.problems) == [
        "other/metrics.jsonl: Is a link; it is left out.",
        "piped/metrics.jsonl: Is no regular file; it is left out.",
        "seconds.json: Is no regular file; it is left out.",
    ]
    assert main(["runs", str(run.parent)]) == 0
    said = capsys.readouterr()
    assert "seconds.json: Is no regular file" in said.err and "secret" not in said.out
    up = {"methods": {"../../secret": {}}}
    (run / "summary.json").write_text(json.dumps(up))
    found = read_run(run)
    assert [*found.stages] == ["fedavg"]
    assert found.problems[-1] == (
        f"{run}/summary.json: methods.../../secret.[key] must be a plain name, got "
        "'../../secret'; it is left out."
    )


def test_a_run_that_ends_while_it_is_read_costs_one_line(run, make_run, monkeypatch):
    make_run(run.parent / "b")
    missing = run.parent / "gone"
    monkeypatch.setattr(
        run_files, "find_runs", lambda folder: [missing, run.parent / "b"]
    )
    listing = RunList(run.parent).read()
    assert [row["name"] for row in listing.rows] == ["b"]
    (problem,) = listing.problems
    assert problem.startswith(f"{missing}: not shown: ")


def test_names_are_plain_text_on_a_terminal(run, capsys):
    odd = "[red]\x1b[2J[/"
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "task": odd}))
    metrics = {"generic": {odd: 0.5}}
    summary = {"methods": {"fedavg": metrics, "[x]\x1b": metrics}}
    (run / "summary.json").write_text(json.dumps(summary))
    run.rename(run.parent / "\x1b]0;[b]\udcff")
    assert main(["runs", str(run.parent)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for text in (r"[red]\x1b[2J[/", r"[x]\x1b", r"\x1b]0;[b]\udcff"):
        assert text in said
    (row,) = RunList(run.parent).read().rows
    context = {"runs": [row], "problems": [], "num_problems": 0, "last_page": 1}
    assert page.templates().get_template("runs.html").render(context).encode()
    summary = {"methods": {"[/]\x1b": {"[b]\x1b": {"[i]\x1b": 0.5}}}}
    many = {
        "methods": {f"{i}[/]\x1b": x for i in range(9) for x in [{"[b]": {odd: 1}}]}
    }
    for table in map(result_table, (summary, many)):
        Console(width=200).print(table)
        said = capsys.readouterr().out
        assert "\x1b" not in said and r"[/]\x1b" in said and "[b]" in said
    view = LineView(1, "[/]\x1b[2J", Console())
    view(0, {"loss": 1.0})
    said = capsys.readouterr().out
    assert "\x1b" not in said and r"[/]\x1b[2J 1/1" in said


def test_only_pictures_in_the_run_are_shown(run, tmp_path):
    pictures, outside = run / "pictures", tmp_path / "runs"
    picture = (pictures / "sheet.png").read_bytes()
    (outside / "secret.png").write_bytes(picture)
    (pictures / "linked.png").symlink_to(outside / "secret.png")
    (run / "folder").symlink_to(outside)
    os.mkfifo(pictures / "pipe.png")
    (pictures / "large.png").write_bytes(b"0" * (page.MAX_IMAGE_BYTES + 1))
    (pictures / "text.txt").write_text("secret")
    assert page.data_url(run, "pictures/sheet.png")
    for name in (
        "../secret.png",
        "pictures/../../secret.png",
        f"{outside}/secret.png",
        "pictures/linked.png",
        "folder/secret.png",
        "pictures/pipe.png",
        "pictures/large.png",
        "pictures/none.png",
        "pictures/text.txt",
        "pictures/sheet.png\0.png",
        "",
    ):
        assert page.data_url(run, name) is None, name
    pictures.rename(outside / "others")
    pictures.symlink_to(outside / "others")
    assert page.data_url(run, "pictures/sheet.png") is None


def test_the_list_of_the_server_is_that_of_a_fresh_reader(run, make_run, monkeypatch):
    folder, known = run.parent, RunList(run.parent)
    reads, run_row = [], run_files.run_row
    counted = lambda run, metric: reads.append(run.name) or run_row(run, metric)
    monkeypatch.setattr(run_files, "run_row", counted)

    def changes():
        yield
        yield
        with (run / "fedavg" / "metrics.jsonl").open("a") as log:
            log.write('{"round": 4, "loss": 0.1}\n')
        yield
        (run / "summary.json").unlink()
        yield
        (run / "error.txt").write_text("")
        yield
        (run / ".running").write_text("")
        yield
        make_run(folder / "b", seed=1)
        yield
        (folder / "b" / "second").mkdir()
        yield
        (folder / "b" / "second" / "metrics.jsonl").write_text('{"round": 1}\n')
        yield
        (folder / "b" / "config.json").unlink()
        yield

    expected_reads = [["a"], [], ["a"], ["a"], ["a"], ["a"], ["b"], ["b"], ["b"], []]
    for _, expected in zip(changes(), expected_reads, strict=True):
        reads.clear()
        rows = known.read().rows
        assert reads == expected
        fresh = RunList(folder).read().rows
        assert [{**x, "age": ""} for x in rows] == [{**x, "age": ""} for x in fresh]
