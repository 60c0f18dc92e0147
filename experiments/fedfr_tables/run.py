"""FedFR's tables 1 and 2 in small: every row, some seeds, mean and deviation.

    python experiments/fedfr_tables/run.py --config=configs/fedfr/table_omniglot.py \
        --workdir=runs/table_omniglot [--seeds=0,1,2]

Goes on where it was stopped. Writes the data set's part of results.json (every metric
of every row and seed) and of README.md, both beside this file or under --results.
"""

import datetime
import json
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
from absl import flags

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from fedfr_jax.commands.flags import define, parse, workdir  # noqa: E402
from fedfr_jax.processes import use_every_core  # noqa: E402

# Rows that go on from another row's last round, which is trained once.
ADAPTED = {"finetune": "contrastive", "distill": "contrastive"}
# (what the paper finds, protocol, the better row, the worse row)
CLAIMS = (
    ("FedAvg helps personalised", "personalised", "fedavg", "pretrained"),
    ("FedAvg hurts generic", "generic", "pretrained", "fedavg"),
    ("hard negatives help generic", "generic", "hard_negatives", "fedavg"),
    ("hard negatives help personalised", "personalised", "hard_negatives", "fedavg"),
    ("contrastive helps generic", "generic", "contrastive", "hard_negatives"),
    ("contrastive costs personalised", "personalised", "hard_negatives", "contrastive"),
    ("the branch restores personalised", "personalised", "fedfr", "hard_negatives"),
    ("BCE beats a CosFace branch", "personalised", "fedfr", "cosface_branch"),
    ("a CosFace branch beats KD", "personalised", "cosface_branch", "distill"),
    ("KD beats fine-tuning", "personalised", "distill", "finetune"),
)


def main(argv: list[str]) -> None:
    """Run every seed, then write results and table."""
    values = flags.FlagValues()
    define(values)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "seeds to run", flag_values=values)
    flags.DEFINE_string("results", str(HERE), "where they go", flag_values=values)
    parse(values, "run.py", argv)
    folder, config = workdir(values, "run.py"), values["config"].value
    seeds = [int(s) for s in values["seeds"].value]
    runs = {str(s): run_seed(config, s, folder / f"seed{s}") for s in seeds}
    file = next(w.partition("=")[2] for w in argv if w.startswith("--config="))
    name = pathlib.Path(file).stem.removeprefix("table_")
    target = pathlib.Path(values["results"].value)
    write_results(target / "results.json", name, runs)
    text = table(runs) + "\n\n" + claims(runs)
    write_between(target / "README.md", name, f"{provenance()}\n\n{text}")
    print(text)


def seeded(config, seed: int):
    """The config with `seed` for the data, the networks and the training."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.seed = config.partition.seed = seed
    return config


def run_seed(config, seed: int, folder: pathlib.Path) -> dict:
    """{row: {"generic", "personalised", "cost"}} of one seed, each kept once done."""
    from fedfr_jax.build import build
    from fedfr_jax.runs.experiment import judge_single, run_row, same_config, start_of

    config = seeded(config, seed)
    same_config(folder, config.to_json_best_effort(indent=1))
    path = folder / "rows.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    names = ["pretrained", *config.methods]
    if set(names) <= set(rows):
        return rows
    experiment = build(config)
    variables = start_of(experiment, folder)
    for name in names:
        if name in rows:
            continue
        begun = time.perf_counter()
        if name == "pretrained":
            stage = judge_single(experiment, variables)
        else:
            go_on_from(folder, name)
            method = experiment.methods[name]
            stage = run_row(experiment, method, variables, folder / name)
        rows[name] = {
            "generic": stage.generic.metrics,
            "personalised": stage.personalised.metrics,
            "cost": {"seconds": time.perf_counter() - begun, **cost(folder / name)},
        }
        path.write_text(json.dumps(rows, indent=1))
        print(f"seed {seed}, {name}: {rows[name]['cost']['seconds']:.0f} s", flush=True)
    return rows


def go_on_from(folder: pathlib.Path, name: str) -> None:
    """Give an adapted row the rounds that another row has played already."""
    source = folder / ADAPTED.get(name, name)
    if source.exists() and not (folder / name).exists():
        shutil.copytree(source, folder / f"{name}.part")
        (folder / f"{name}.part").rename(folder / name)


def cost(folder: pathlib.Path) -> dict[str, float]:
    """Mean hard negatives per client and round of a row that has any."""
    from fedfr_jax.runs.sinks import read_jsonl

    lines = read_jsonl(folder / "metrics.jsonl")
    numbers = [x["hard_negatives"] for x in lines if "hard_negatives" in x]
    return {"hard_negatives": float(np.mean(numbers))} if numbers else {}


def columns(runs: dict) -> list[tuple[str, str]]:
    """(protocol, metric) of every number that all rows have."""
    first = next(iter(next(iter(runs.values())).values()))
    return [(p, m) for p in ("generic", "personalised") for m in first[p]]


def values_of(runs: dict, row: str, protocol: str, metric: str) -> np.ndarray:
    """[seeds]."""
    return np.array([rows[row][protocol][metric] for rows in runs.values()])


def table(runs: dict) -> str:
    """Markdown: a line per row, mean and standard deviation in percent."""
    names = list(next(iter(runs.values())))
    heads = [f"{p} {m}" for p, m in columns(runs)]
    lines = ["| row | " + " | ".join([*heads, "HN", "s"]) + " |"]
    lines.append("|---" * (len(heads) + 3) + "|")
    for name in names:
        cells = []
        for protocol, metric in columns(runs):
            x = 100 * values_of(runs, name, protocol, metric)
            cells.append(f"{x.mean():.1f} ± {x.std():.1f}")
        costs = [rows[name]["cost"] for rows in runs.values()]
        chosen = np.mean([c.get("hard_negatives", 0.0) for c in costs])
        seconds = np.mean([c["seconds"] for c in costs])
        cells += [f"{chosen:.0f}", f"{seconds:.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claims(runs: dict) -> str:
    """Markdown: the paper's orderings, on the mean over a protocol's rates."""
    first = next(iter(runs.values()))
    lines = [
        "| the paper | protocol | difference, each seed | holds |",
        "|---|---|---|---|",
    ]
    for text, protocol, better, worse in CLAIMS:
        if not {better, worse} <= set(first):
            continue
        rates = [m for p, m in columns(runs) if p == protocol and "@" in m]
        gain = np.mean(
            [
                values_of(runs, better, protocol, m)
                - values_of(runs, worse, protocol, m)
                for m in rates
            ],
            axis=0,
        )
        holds = "yes" if (gain > 0).all() else "no" if (gain < 0).all() else "unclear"
        shown = ", ".join(f"{100 * g:+.1f}" for g in gain)
        lines.append(f"| {text} | {protocol} | {shown} | {holds} |")
    return "\n".join(lines)


def write_results(path: pathlib.Path, name: str, runs: dict) -> None:
    """Replace one data set's part of results.json."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[name] = {"made": provenance(), "seeds": runs}
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def write_between(path: pathlib.Path, name: str, text: str) -> None:
    """Replace what stands between a data set's two markers."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before = path.read_text() if path.exists() else ""
    if start not in before:
        before += f"\n{start}\n{end}\n"
    head, _, rest = before.partition(start)
    path.write_text(f"{head}{start}\n{text}\n{end}{rest.partition(end)[2]}")


def provenance() -> str:
    """Date and commit of a result."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{datetime.date.today().isoformat()}, commit {commit or 'unknown'}"


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
