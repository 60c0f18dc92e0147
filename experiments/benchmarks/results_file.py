"""Files of results: figures by name, each beside how and where it was measured."""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results"


def add_flag(parser) -> None:
    """--out, where the script writes: results/<its name>.json unless told."""
    path = RESULTS / f"{pathlib.Path(sys.argv[0]).stem}.json"
    parser.add_argument("--out", type=pathlib.Path, default=path, help="JSON file")


def write(path: pathlib.Path, rows: dict[str, dict], made: dict | None = None) -> None:
    """Put rows into the file, each with `made` or `facts`; its others stay."""
    made = made or facts()
    kept = json.loads(path.read_text())["rows"] if path.exists() else {}
    new = {name: {**row, "made": made} for name, row in rows.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": {**kept, **new}}, indent=1) + "\n")


def facts() -> dict:
    """Command, date and commit of what runs now, and the machine it runs on."""
    import jax  # some peers' environments read this file without it

    script = pathlib.Path(sys.argv[0]).name
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    return {
        "command": " ".join([f"python experiments/benchmarks/{script}", *words]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "machine": machine(),
    }


def commit(folder: pathlib.Path | None = None) -> str:
    """A checkout's commit, with + where tracked .py files differ; empty without."""
    git = ["git", "-C", str(folder or FOLDER)]
    words = [*git, "rev-parse", "--short", "HEAD"]
    name = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    words = [*git, "diff", "--quiet", "HEAD", "--", ":(top)*.py"]
    return name + "+" if name and subprocess.run(words).returncode else name


def machine() -> str:
    """Processor and cores as a file name."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.+)", text)
    name = re.sub(r"[^a-z0-9]+", "-", (found.group(1) if found else "unknown").lower())
    return f"{name.strip('-')}-{len(os.sched_getaffinity(0))}core"
