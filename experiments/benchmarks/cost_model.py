"""Seconds of a federated round from what it does, and the tables of DOC.

    python experiments/benchmarks/cost_model.py --write     # DOC's tables

docs/explanation/cost.md explains every term. `measured_costs.py` times steps, empty
clients and whole rounds of this engine in CPU seconds, for CONSTANTS and MEASURED.
"""

import argparse
import pathlib
from typing import NamedTuple

DOC = pathlib.Path(__file__).resolve().parents[2] / "docs" / "explanation" / "cost.md"
BEGIN, END = "<!-- {}: cost_model.py writes from here -->", "<!-- {}: to here -->"


class Machine(NamedTuple):
    """What D equal devices can do; rates are per device, bytes and FLOP per second."""

    devices: int  # D
    hosts: int
    flops: float  # reached by the network, not the data sheet's
    memory: float  # bytes/s of the device's own memory
    capacity: float  # bytes of it
    interconnect: float  # bytes/s that a device sends while all send
    link: float  # bytes/s from host to device
    disk: float  # bytes/s per host
    host_client: float = 1e-6  # s of a host per client: draw, schedule, rows, metrics
    device_client: float = 2e-7  # s of a device per client: keys, loops
    step: float = 0.0  # s of a device per step of a wave, whatever its size


class Round(NamedTuple):
    """What is asked for; N, the population, is in no term but the disk's size."""

    population: int  # N
    cohort: int  # K
    examples: int  # n per client
    batch: int  # B
    epochs: int  # E
    parameters: int
    forward: float  # FLOP per image
    frozen: float = 0.0  # forwards per image and round of networks that do not train
    row: int = 0  # bytes of a client's personal state
    image: int = 0  # bytes of an image
    lanes: int = 1  # L
    waste: float = 1.0  # executed over useful steps
    is_streamed: bool = False  # images come from the host in every round
    checkpoint_every: int = 1


def seconds(work: Round, machine: Machine) -> dict[str, float]:
    """Seconds of a round by term, in the order in which DOC explains them."""
    m, devices = machine, machine.devices
    images = work.cohort * work.examples
    steps = work.cohort * work.epochs * -(-work.examples // work.batch) * work.waste
    size = 4 * work.parameters
    trained = 3 * images * work.epochs * work.forward * work.waste
    parts = {
        "sampling and schedule": work.cohort * m.host_client / m.hosts,
        "rows read": work.cohort * work.row / (m.disk * m.hosts),
        "client overhead": work.cohort * m.device_client / devices,
        "step overhead": steps / work.lanes * m.step / devices,
        "training": trained / (devices * m.flops),
        "frozen features": images * work.frozen * work.forward / (devices * m.flops),
        "parameter traffic": 5 * size * steps / (devices * m.memory),
        "sums over clients": 3 * size * work.cohort / (devices * m.memory),
        "all-reduce": 2 * size * (devices - 1) / devices / m.interconnect,
    }
    busy = sum(parts.values())
    # Copies and writes go on beside the training; what is left over is a stall.
    stream = images * work.image / (devices * m.link) if work.is_streamed else 0.0
    written = work.cohort * work.row / (m.disk * m.hosts)
    parts["input stall"] = max(0.0, stream - busy)
    parts["rows written, stall"] = max(0.0, written - busy)
    parts["checkpoint"] = size / m.disk / work.checkpoint_every
    return parts


def needs(work: Round, machine: Machine) -> dict[str, float]:
    """Bytes: of a device without activations, and of the disk."""
    size, client = 4 * work.parameters, work.examples * work.image
    # A wave trains while the next one's images arrive; a resident table is whole.
    table = 2 * work.lanes * client if work.is_streamed else work.population * client
    return {
        # Server and sum, and per lane parameters, gradients, momentum.
        "device": (2 + 3 * work.lanes) * size
        + table
        + work.cohort * work.row / machine.devices,
        "disk": 3.0 * work.population * work.row,
    }


# Data sheets and what is assumed of them: docs/explanation/cost.md, "Machines".
MACHINES = {
    "TPU v5p-256": Machine(
        devices=128,
        hosts=32,
        flops=0.4 * 459e12,
        memory=2765e9,
        capacity=95e9,
        interconnect=200e9,
        link=16e9,
        disk=1e9,
        step=1e-4,
    ),
    "8 x H200": Machine(
        devices=8,
        hosts=1,
        flops=0.4 * 790e12,
        memory=4800e9,
        capacity=141e9,
        interconnect=450e9,
        link=50e9,
        disk=5e9,
        step=1e-3,
    ),
}
EXAMPLES = {
    "many phones": Round(
        population=10_000_000,
        cohort=16_384,
        examples=64,
        batch=16,
        epochs=1,
        parameters=24_000_000,
        forward=5.2e9,
        row=4 * 10 * 512,
        image=112 * 112 * 3,
        lanes=16,
        waste=1.05,
        is_streamed=True,
        checkpoint_every=10,
    ),
    "face recognition": Round(
        population=1024,
        cohort=1024,
        examples=10_000,
        batch=64,
        epochs=4,
        parameters=65_200_000,
        forward=24.2e9,
        frozen=4,
        row=4 * (65_200_000 + 2 * 100 * 512),
        image=112 * 112 * 3,
        lanes=8,
        waste=1.02,
        is_streamed=True,
    ),
}


def number(value: float) -> str:
    """Three digits."""
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}" if value >= 1e-3 or value == 0 else f"{value:.1e}"


def example_table() -> str:
    """Every example on every machine, seconds by term."""
    cells = [(e, m) for e in EXAMPLES for m in MACHINES]
    columns = [seconds(EXAMPLES[e], MACHINES[m]) for e, m in cells]
    rows = [["s per round", *(f"{e}, {m}" for e, m in cells)]]
    rows += [[term, *(number(c[term]) for c in columns)] for term in columns[0]]
    total = [sum(c.values()) for c in columns]
    rows += [["**round**", *(f"**{number(t)}**" for t in total)]]
    each = [
        EXAMPLES[e].cohort * EXAMPLES[e].examples * EXAMPLES[e].epochs for e, _ in cells
    ]
    rate = [number(n / t) for n, t in zip(each, total, strict=True)]
    rows += [["trained images/s", *rate]]
    for what, size in (("device", 1e9), ("disk", 1e12)):
        unit = (
            "GB per device, without activations" if what == "device" else "TB of rows"
        )
        found = [needs(EXAMPLES[e], MACHINES[m])[what] / size for e, m in cells]
        rows += [[unit, *map(number, found)]]
    return markdown(rows)


# --- Rounds of the engine that check the formula, as measured_costs.py printed them:
# CPU seconds of a 2-core Intel Xeon, 2026-11-22, one device. R is that of single steps
# of the same network outside of the engine.

CONSTANTS = {
    "memory": 5.18e9,
    "host_client": 0.776e-6,
    "device_client": 0.0483e-6,
}
MEASURED = {
    "emnist_cnn": {
        "cpu_seconds": 1.164,
        "flops": 77.7e9,
        "work": Round(500, 32, 40, 20, 1, parameters=1_198_592, forward=24.06e6),
    },
    "cifar_cnn": {
        "cpu_seconds": 4.290,
        "flops": 59.6e9,
        "work": Round(500, 50, 50, 10, 1, parameters=1_625_152, forward=33.47e6),
    },
    "mlp_many": {
        "cpu_seconds": 0.1304,
        "flops": 35.5e9,
        "work": Round(2000, 512, 20, 10, 1, parameters=50_240, forward=0.0717e6),
    },
}


def predicted(name: str) -> float:
    """CPU seconds of a measured workload's round by the formula, from CONSTANTS."""
    machine = Machine(
        devices=1,  # CPU seconds add up over cores
        hosts=1,
        capacity=0,
        interconnect=1,
        link=1,
        disk=1,
        flops=MEASURED[name]["flops"],
        **CONSTANTS,
    )
    parts = seconds(MEASURED[name]["work"], machine)
    # R, that of whole steps, holds the parameter traffic; nothing is saved.
    return sum(parts.values()) - parts["parameter traffic"] - parts["checkpoint"]


def check_table() -> str:
    """Predicted against measured CPU seconds of whole rounds."""
    rows = [["workload", "steps", "predicted CPU s", "measured CPU s", "error"]]
    for name, row in MEASURED.items():
        guess, found, work = predicted(name), row["cpu_seconds"], row["work"]
        steps = work.cohort * -(-work.examples // work.batch)
        rows.append(
            [
                name,
                str(steps),
                number(guess),
                number(found),
                f"{guess / found - 1:+.0%}",
            ]
        )
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES = {"examples": example_table, "check": check_table}


def with_tables(text: str) -> str:
    """The document with every table as it is now.

    Raises:
      ValueError: when the document lacks a marker.
    """
    for name, table in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{DOC} must hold {begin} and {end} once.")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{table()}\n\n{end}{rest.partition(end)[2]}"
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="the tables of the docs")
    args = parser.parse_args()
    if args.write:
        DOC.write_text(with_tables(DOC.read_text()))
    else:
        print(example_table(), check_table(), sep="\n\n")


if __name__ == "__main__":
    main()
