"""The study of a setting: some rows at each of its values.

    python experiments/fedfr_tables/choices.py --workdir=runs/rates_lfw \
        --config=configs/fedfr/table_lfw.py --setting=learning_rate \
        --values=3e-4,1e-3,3e-3 [--rows=local,fedavg] [--seeds=0]

Judged on a validation split, so that no choice sees the images that the tables are
judged on; --no-validation judges as they do. Rows of an earlier command stay.
"""

import sys

from orderings import (
    in_order,
    made,
    mean_rate,
    p_value,
    rows_of_all,
    spread,
    table,
    write_between,
    write_results,
)
from run import (
    judged,
    name_of,
    remember_programs,
    run_seed,
    study_parser,
    use_every_core,
)

from fedfr_jax.cli.flags import names, parse


def main(argv: list[str]) -> None:
    """Train the rows at every value, then write results and table."""
    parser = study_parser("choices.py", __doc__)
    parser.add_argument("--setting", required=True, help="of the rows, a number")
    parser.add_argument("--values", type=names, required=True)
    parser.add_argument("--rows", type=names, default=["fedfr"])
    values = parse(parser, argv)
    folder, config = judged(values, "choices.py")
    remember_programs(folder)
    config = at_values(config, values.rows, values.setting, values.values)
    rows = ["pretrained", *config.methods]
    name = f"{name_of(argv)} {values.setting.removeprefix('algorithm.')}"
    runs = {}
    for seed in values.seeds:
        runs[seed] = run_seed(config, int(seed), folder / f"seed{seed}", rows)
        kept = write_results(values.results / "results.json", name, runs)
        text = f"{made(kept)}\n\n{table(kept)}\n\n{means(kept)}"
        write_between(values.results / "RESULTS.md", name, text)
    print(text)


def at_values(config, rows: list[str], setting: str, values: list[str]):
    """The config with `rows` at every value of `setting`, and no other row.

    A row is called after its value, "_" for a dot, as keys of a config hold none.
    """
    from fedfr_jax.tasks.methods import with_numbers  # which imports JAX

    config = config.copy_and_resolve_references()
    own = {row: config.methods[row].to_dict() for row in rows}
    with config.unlocked():
        config.methods = {
            f"{value.replace('.', '_')} {row}": with_numbers(
                own[row], {setting: float(value)}
            )
            for value in values
            for row in rows
        }
    return config


def means(runs: dict) -> str:
    """Markdown: the mean of the personalized rates, which decides, and its gain."""
    start = mean_rate(runs, "pretrained", "personalized")
    lines = ["| row | mean of the personalized rates | above the start | p |"]
    lines.append("|---" * 4 + "|")
    for row in in_order(rows_of_all(runs)):
        rate = mean_rate(runs, row, "personalized")
        gain = f"{100 * (rate - start).mean():+.1f}"
        chance = f"{p_value(rate - start):.4f}" if len(rate) > 1 else "-"
        lines.append(f"| {row} | {spread(rate)} | {gain} | {chance} |")
    return "\n".join(lines)


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
