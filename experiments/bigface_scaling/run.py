"""BigFace's claims in small: scaling laws, distillation, masks, experts, teachers.

    python experiments/bigface_scaling/run.py --workdir=runs/bigface_scaling \
        [--parts=sizes,distilled,masks,moe,teachers,omniglot,lfw,data] [--seeds=0] \
        [--tiny]

Goes on where it was stopped: every network is a run of a sweep, a row of
WORKDIR/results.jsonl, that `fedfr sweep` would train and `fedfr scaling` reads. Writes
results.json (every row of every part and seed), laws.png and the part of RESULTS.md
between markers, beside this file or under --results. --tiny trains toys, to see that
everything runs, and needs a --results of its own.
"""

import os
import pathlib
import shutil
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE), str(HERE.parent / "fedfr_tables")]

import scaling_cells as cells  # noqa: E402
import scaling_tables  # noqa: E402
from orderings import provenance, write_between, write_results  # noqa: E402

from fedfr_jax.cli.flags import names, new_parser, parse_flags, set_key  # noqa: E402
from fedfr_jax.cli.sweep import Run, digest, results_row  # noqa: E402
from fedfr_jax.distributed import use_every_core  # noqa: E402
from fedfr_jax.runs.report.drawing import save  # noqa: E402
from fedfr_jax.runs.report.scaling import law_charts  # noqa: E402
from fedfr_jax.runs.sweep_cells import Cells  # noqa: E402


def main(argv: list[str]) -> None:
    """Train what is missing, and write down what there is after every part."""
    parser = new_parser("run.py", __doc__, epilog="")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=names, default=["0"])
    parser.add_argument("--parts", type=names, default=list(cells.PARTS))
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true", help="toys, to see it run")
    values = parse_flags(parser, argv)
    for part in values.parts:
        if part not in cells.PARTS:
            raise ValueError(f"--parts must be of {list(cells.PARTS)}, got {part!r}.")
    if values.tiny and not values.results:
        raise ValueError("--results must be given with --tiny, got none.")
    remember_programs(values.workdir)
    target = values.results or HERE
    target.mkdir(parents=True, exist_ok=True)
    player = Player(values.workdir, values.tiny)
    for seed in map(int, values.seeds):
        for part in values.parts:
            rows = {cell.name: player.row(cell, seed) for cell in cells.PARTS[part]}
            found = {name: row for name, row in rows.items() if row}
            publish(target, part, {str(seed): found})


def remember_programs(folder: pathlib.Path) -> None:
    """Keep compiled programs beside the runs: all seeds need the same ones."""
    place = str((folder / "compiled").resolve())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", place)


def publish(target: pathlib.Path, part: str, runs: dict) -> None:
    """Add {seed: rows} of a part to results.json; tables anew."""
    write_results(target / "results.json", part, runs)
    found = scaling_tables.read(target / "results.json")
    laws = scaling_tables.studies(found)
    write_between(target / "RESULTS.md", "results", scaling_tables.text(found, laws))
    draw(target, laws)


def draw(target: pathlib.Path, laws: dict) -> None:
    """Write laws.png: the error over parameters of the backbone, if there is a law."""
    charts = [chart for study in laws.values() for chart in law_charts(study)]
    if charts:
        with tempfile.TemporaryDirectory() as folder:
            save(pathlib.Path(folder, "laws"), charts[:1])
            shutil.copy(pathlib.Path(folder, "laws.png"), target)


class Player:
    """Trains cells in a folder, a run for each config."""

    def __init__(self, folder: pathlib.Path, is_tiny: bool):
        self._folder, self._is_tiny = folder, is_tiny
        self._cells = Cells(folder)

    def row(self, cell: cells.Cell, seed: int) -> dict | None:
        """What is kept of a cell; None, and a line that says why, where it fails."""
        run = self._run(cell, seed)
        row = self._cells.read().get(run.name, {"error": "not trained"})
        if "error" in row:
            used, stamp = time.process_time(), provenance()
            if (self._folder / run.name).exists():
                stamp += ", resumed, seconds before it not counted"
            row = {**results_row(run, self._cells), "made": stamp}
            row["core_seconds"] = round(time.process_time() - used, 1)
            self._cells.add(row)
        if "error" in row:
            print(f"{cell.name}, seed {seed}: {row['error']}", flush=True)
            return None
        seconds = f"{row['seconds']:.0f} s, {row['core_seconds']:.0f} core s"
        print(f"{cell.data}, {cell.name}, seed {seed}: {seconds}", flush=True)
        return scaling_tables.kept(cell, row)

    def _run(self, cell: cells.Cell, seed: int) -> Run:
        """The cell as a run of a sweep, its teacher trained first."""
        config = cells.config_of(cell, seed, is_tiny=self._is_tiny)
        changes = {"seed": seed, **cell.changes}
        if cell.teacher:
            self.row(cell.teacher, seed)
            place = self._folder / self._run(cell.teacher, seed).name
            told = {
                "teacher": {"weights": str(place)},
                "cache": f"{place}.embeddings.safetensors",
            }
            set_key(config, "pretrain.distill", told)
            changes["teacher"] = place.name
        return Run(digest(config), changes, config)


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
