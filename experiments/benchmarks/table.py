"""Rows of a benchmark as tables of a README, between two markers."""

import pathlib
from collections.abc import Sequence

TOLERANCE = {"accuracy": 0.1, "loss": 0.2}  # from this engine's
BEGIN, END = "<!-- results: run.py writes from here -->", "<!-- to here -->"
COLUMNS = (
    # heading, key, format
    ("system", "system", "{}"),
    ("version", "version", "{}"),
    ("s/round min", "seconds_min", "{:.4f}"),
    ("median", "seconds_median", "{:.4f}"),
    ("clients/s", "clients_per_second", "{:.0f}"),
    ("time / ours", "ratio_to_ours", "{:.2f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:.3f}"),
    ("CPU s/round", "cpu_seconds", "{:.2f}"),
    ("peak MiB", "peak_mib", "{:.0f}"),
    ("first round s", "first_seconds", "{:.1f}"),
    ("compile s", "compile_seconds", "{:.1f}"),
)


def write(path: pathlib.Path, machine: str, rows: list[dict]) -> None:
    """Replace what stands between the markers of the file.

    Raises:
      ValueError: when the file has no markers.
    """
    write_between(path, BEGIN, [f"Machine: {machine}.", *tables(rows)])


def write_between(path: pathlib.Path, begin: str, parts: Sequence[str]) -> None:
    """Replace what stands between the markers `begin` and END of the file.

    Raises:
      ValueError: when the file has no markers.
    """
    text = path.read_text()
    if text.count(begin) != 1 or text.count(END) != 1:
        raise ValueError(f"{path} must hold the markers {begin} and {END} once.")
    before, _, rest = text.partition(begin)
    after = rest.partition(END)[2]
    path.write_text(before + "\n\n".join([begin, *parts, END]) + after)


def tables(rows: list[dict]) -> list[str]:
    """One table per workload, and what this engine says of itself."""
    parts = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        parts += [f"### {workload}", table(own), *unequal(own)]
        parts += [engine(row) for row in own if "phases" in row]
    return parts


def table(rows: list[dict], columns: Sequence[tuple] = COLUMNS) -> str:
    """Columns that any row fills; a failure stands in the version's place."""
    rows = [with_failure(row) for row in rows]
    used = [c for c in columns if any(c[1] in row for row in rows)]
    lines = [" | ".join(c[0] for c in used), " | ".join("---" for _ in used)]
    for row in rows:
        cells = [form.format(row[key]) if key in row else "" for _, key, form in used]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def with_failure(row: dict) -> dict:
    """The row with its failure, if it has one, as its version."""
    if "failure" not in row:
        return row
    return {**row, "version": row["failure"].replace("|", "/")}


def unequal(rows: list[dict]) -> list[str]:
    """A line about the rows whose accuracy or loss is not that of this engine."""
    ours = next((row for row in rows if row["system"] == "ours"), {})
    names = {
        row["system"]
        for row in rows
        for key, most in TOLERANCE.items()
        if key in row and key in ours and abs(row[key] - ours[key]) > most
    }
    return [f"Not equal work: {', '.join(sorted(names))}."] if names else []


def engine(row: dict) -> str:
    """Phases of a round, the figures of compute, and what was chosen."""
    parts = [f"{name} {1e3 * seconds:.1f}" for name, seconds in row["phases"]]
    text = f"Phases of this engine, ms: {', '.join(parts)}."
    if "fraction_of_matmul_rate" in row:
        percent = 100 * row["fraction_of_matmul_rate"]
        text += f" Arithmetic at {percent:.0f} % of the machine's matmul rate."
    text += f" Executed over useful steps {row['executed_over_useful']:.3f}."
    return text
