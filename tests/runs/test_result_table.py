"""The table at the end of a run."""

from rich.console import Console

from fedfr_jax.runs.report.tables import result_table

SUMMARY = {
    "methods": {
        "pretrained": {
            "generic": {"accuracy": 0.9, "eer": 0.1},
            "personalized": {"tar@far=1e-3": [0.4, 0.6]},
        },
        "fedavg": {
            "generic": {"accuracy": 0.8, "eer": 0.2},
            "personalized": {"tar@far=1e-3": [0.6, 0.6]},
        },
        "fedfr": {
            "generic": {"accuracy": None, "eer": 0.15},
            "personalized": {"tar@far=1e-3": [0.7, 0.9], "tpir": 0.5},
        },
    },
    "seconds": 131.6,
}


def rich_text(summary, width=80):
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(result_table(summary))
    return capture.get()


def cells_of(summary):
    """The table's columns of (text, whether it is marked)."""
    columns = result_table(summary).columns
    return [
        [(str(x), getattr(x, "style", "") == "bold") for x in c.cells] for c in columns
    ]


def test_the_table_marks_the_best_of_each_metric():
    rows = list(zip(*cells_of(SUMMARY), strict=True))
    shown = [[text + "*" * is_best for text, is_best in row] for row in rows]
    assert shown[0] == ["generic", "accuracy", "0.9000*", "0.8000", "-"]
    assert shown[1] == ["", "eer", "0.1000*", "0.2000", "0.1500"]
    assert shown[2][2:] == ["0.500±0.100", "0.600±0.000", "0.800±0.100*"]
    # Nothing to compare, nothing marked.
    assert shown[3][2:] == ["-", "-", "0.5000"]


def test_many_methods_are_below_each_other():
    first = {"rounds_to_0.8": 7, "upload_mb": 0.25}
    others = {f"other{i}": {"cost": {"rounds_to_0.8": None}} for i in range(8)}
    summary = {"methods": {"first": {"cost": first}, **others}}
    rows = [line.split() for line in rich_text(summary).splitlines()]
    (row,) = [row for row in rows if "first" in row]
    assert [word for word in row if word[0].isalnum()] == ["first", "7", "0.2500"]
    assert len([row for row in rows if "other7" in row]) == 1
    assert (
        starred("rounds_to_0.8", 9, 7)
        == starred("upload_mb", 0.5, 0.1)
        == [False, True]
    )


def starred(metric, *values):
    methods = {str(i): {"any": {metric: value}} for i, value in enumerate(values)}
    return [column[0][1] for column in cells_of({"methods": methods})[2:]]


def test_the_best_is_marked_when_it_is_better_by_more_than_rounding():
    assert starred("accuracy", 0.9001, 0.9000, 0.1) == [True, False, False]
    # The same as printed; different as printed, by less than half a digit.
    assert not any(starred("accuracy", 0.50004, 0.49996, 0.1))
    assert not any(starred("accuracy", 0.50006, 0.50004))
    assert not any(starred("accuracy", 0.9, 0.9, 0.1))
    # Three digits are shown of a list.
    assert not any(starred("accuracy", [0.9001, 0.9001], [0.9, 0.9]))
    assert starred("tar@far=1e-03", [0.92, 0.92], [0.9, 0.9]) == [True, False]
    assert starred("accuracy", 1234.6, 1233.1) == [True, False]


def test_a_metric_that_is_better_when_small_or_neither_is_read_from_its_name():
    assert starred("pairs_eer", 0.2, 0.1) == [False, True]
    assert starred("loss", 2.0, 1.0) == [False, True]
    assert starred("tar@far=1e-03", 0.2, 0.1) == [True, False]
    for neither in ("accuracy_std", "threshold", "measured_far@far=1e-03"):
        assert not any(starred(neither, 0.2, 0.1))
