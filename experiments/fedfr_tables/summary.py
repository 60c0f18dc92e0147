"""The first table of RESULTS.md, out of results.json: python summary.py

Of every set two generic rates, 1:1 and 1:N, and four personalized ones. FedFR is bold
where it leads every row but the central one, shown here or not, by more than either's
deviation over seeds; whatever row has a higher mean than FedFR is named. Above it
FedFR's lead over what a reader would compare it with, and where that is significant.
"""

import json

from orderings import (
    HERE,
    SIGNIFICANT,
    columns,
    in_order,
    leaders,
    made,
    mean_rate,
    p_value,
    rows_of_all,
    spread,
    values_of,
    write_between,
)

PAGE = HERE / "RESULTS.md"
SETS = {
    "lfw": "LFW",
    "faces": "LFW, FEI",
    "omniglot": "Omniglot",
    "rendered": "rendered faces",
}
SHOWN = ("pretrained", "local", "fedavg", "hard_negatives", "fedfr")
RIVALS = ("local", "fedavg", "local_equal", "fedavg_equal", "local_negatives")
VERIFICATION = ("generic", "tar@far=1e-03")
MOST = 4  # personalized rates of a set, the strict ones first


def main() -> None:
    """Write the table between the page's markers."""
    results = json.loads((HERE / "results.json").read_text())
    write_between(PAGE, "summary", summary(results))


def summary(results: dict) -> str:
    """Markdown: a line per set and rate, in percent, mean and deviation over seeds."""
    lines = [
        f"| set | rate | {' | '.join(SHOWN)} | rows above fedfr |",
        "|---|---|" + "---:|" * len(SHOWN) + "---|",
    ]
    for name, title in SETS.items():
        runs = results[name]["seeds"]
        rates = [x for x in columns(runs) if x[0] == "personalized"][:MOST]
        searches = [x for x in columns(runs) if x[0] == "generic" and "tpir" in x[1]]
        shown = [VERIFICATION, *searches[-1:], *rates]
        for number, rate in enumerate(shown):
            head = f"{title} ({len(runs)})" if number == 0 else ""
            lines.append(f"| {head} | {line(runs, *rate)} |")
    every = {title: results[name]["seeds"] for name, title in SETS.items()}
    stamps = "; ".join(f"{title}: {made(runs)}" for title, runs in every.items())
    led = "; ".join(f"{title}: {leads(runs)}" for title, runs in every.items())
    told = (
        "FedFR's lead in the mean of the personalized rates, in points, * where a "
        f"paired t-test over seeds has p < {SIGNIFICANT}: {led}. Played: {stamps}."
    )
    return f"{told}\n\n" + "\n".join(lines)


def leads(runs: dict) -> str:
    """FedFR's lead over each of RIVALS that was played."""
    own, told = mean_rate(runs, "fedfr", "personalized"), []
    for row in RIVALS:
        if row in rows_of_all(runs):
            gain = own - mean_rate(runs, row, "personalized")
            star = "*" if p_value(gain) < SIGNIFICANT else ""
            told.append(f"{row} {100 * gain.mean():+.1f}{star}")
    return ", ".join(told)


def line(runs: dict, evaluator: str, metric: str) -> str:
    """The cells of a rate."""
    values = {
        row: values_of(runs, row, evaluator, metric)
        for row in in_order(rows_of_all(runs))
    }
    own = values["fedfr"]
    cells = [spread(values[row]) for row in SHOWN]
    rivals = values.keys() - {"fedfr", "central"}
    if all(is_clear(own, values[row]) for row in rivals):
        cells[-1] = f"**{cells[-1]}**"
    above = leaders(runs, evaluator, metric)
    named = [f"{row} {100 * values[row].mean():.1f}" for row in above]
    return " | ".join([f"{evaluator} {metric}", *cells, ", ".join(named)])


def is_clear(better, worse) -> bool:
    """Whether means of [seeds] differ by more than both deviations."""
    if len(better) < 2:
        return False
    lead = better.mean() - worse.mean()
    return bool(lead > max(better.std(ddof=1), worse.std(ddof=1)))


if __name__ == "__main__":
    main()
