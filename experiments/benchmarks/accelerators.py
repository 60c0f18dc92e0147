"""A round of every system, and BigFace's step, by the compilers of TPUs and GPUs.

    python experiments/benchmarks/accelerators.py [--only=fedfr] [--device=h200:1x1x8]
        [--plan]

Nothing runs: compilers say what a device needs, which collectives there are and, on a
TPU, how many cycles a step takes. Data are black images of a set's counts. Stops with
exit code 1 where a program does not compile, does not fit its device or has more
collectives, kernels, cycles or wider windows than its plan, or a loop in a counted
local step for which a GPU would ask the host. Beside it stands the memory that
`fedfr plan` says without a compiler; --plan asks that alone, of the rows that are kept.
Writes results/accelerators.json and the table of docs/explanation/accelerators.md.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import NamedTuple

import results_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "explanation" / "accelerators.md"
BEGIN, END = "<!-- table: written from here -->", "<!-- to here -->"
POD = "v5p:4x4x8"  # a v5p-256: 128 chips of two cores
PODS = (POD, "h200:1x1x8")
# Collectives of any size that a round may have: the sums over clients, in one go or,
# where the combiner has a limit, two. Nothing is sent between a client's steps.
ROUND = {"whole": 2, "step": 0}


class Program(NamedTuple):
    """A row of a config, and how many collectives and kernels its programs may have."""

    about: str
    row: str
    words: tuple[str, ...]  # the config and its changes
    devices: tuple[str, ...] = PODS
    most: dict[str, int] = ROUND  # in the whole program, and in a step
    most_kernels: int | None = None  # in a step; None for any number
    most_cycles: int | None = None  # of a TPU in a step
    most_window: int | None = None  # side of a grouped convolution's window on a GPU


def blank(**counts) -> str:
    """The change of a config's data to black images."""
    return f"--config.data={json.dumps({'name': 'fake_data', **counts})}"


def central(network: int, classes: int, batch: int, *changes: str) -> tuple[str, ...]:
    """BigFace's recipe on another network, with so many classes and images a step."""
    people = blank(num_identities=classes + 504, images_per_identity=4)
    return (
        "--config=bigface/r50_93k",
        people,
        f"--config.partition.num_public_ids={classes}",
        f"--config.model.depth={network}",
        f"--config.pretrain.batch_size={batch}",
        *changes,
    )


PROGRAMS = {
    "fedfr": Program(
        "FedFR: 128 clients x 100 people, SphereFace-64 at 112 pixels, batch 256",
        "fedfr",
        (
            "--config=fedfr/ms1m_40x100",
            blank(num_identities=26_000, images_per_identity=105),
            "--config.partition.num_clients=128",
            "--config.partition.public_images=(100,110)",
        ),
        most={"whole": 7, "step": 0},  # a GPU's combiner stops at 30 MB, of 211
    ),
    "fedper": Program(
        "FedPer: 256 clients, ResNet-34 at 32 pixels, batch 128, two layers kept",
        "fedper_2",
        (
            "--config=fedper/cifar10_resnet34",
            blank(num_identities=10, images_per_identity=5000, image_size=32),
            "--config.partition.num_clients=256",
        ),
        most={"whole": 3, "step": 0},  # a GPU's combiner takes 30 MB at a time
    ),
    "fedmargin": Program(
        "FedMargin: 256 clients, a segmenter at 96 x 128 pixels, batch 8",
        "fedmargin",
        (
            "--config=fedmargin/camvid",
            blank(
                num_identities=4,
                images_per_identity=3000,
                image_size=(96, 128),
                num_pixel_classes=11,
            ),
            "--config.partition.num_clients=256",
            "--config.partition.alpha=10.0",
            "--config.partition.min_examples=2",
            "--config.federation.data_placement=device",
            "--config.methods.central.batch_size=128",  # a multiple of the devices
        ),
    ),
    "fedreid": Program(
        "FedReID: 128 clients, ResNet-50 at 256 x 128 pixels, batch 32, KD and CDW",
        "kd_cdw",
        (
            "--config=fedreid/market_identity",
            blank(
                num_identities=1500,
                images_per_identity=16,
                image_size=(256, 128),
                num_cameras=6,
                test_identities=50,
            ),
            "--config.partition.num_clients=128",
            '--config.model={"name": "reid", "depth": 50}',
            "--config.evaluation={}",
            "--config.methods.merged.batch_size=128",
        ),
        most={"whole": 4, "step": 0},
    ),
    "canonical": Program(
        "FedAvg, canonical sums: 64 clients, a small CNN at 28 pixels, batch 20",
        "fedavg",
        (
            "--config=classification/emnist",
            blank(
                num_identities=62, images_per_identity=100, image_size=28, channels=1
            ),
            "--config.partition={'num_clients': 64}",
            "--config.federation.cohort_size=64",
            "--config.federation.data_placement=device",
            "--config.federation.reproducible_sum=True",
        ),
        devices=("v5p:2x2x1", "v5e:4x4", "h200:1x1x8"),
        most={"whole": 6, "step": 0},
    ),
    "iresnet18": Program(
        "FedAvg: IResNet-18 at 112 pixels in bfloat16, batch 64, one lane",
        "fedavg",
        (
            "--config=fedfr/ms1m_40x100",
            blank(num_identities=1400, images_per_identity=105),
            "--config.partition.num_clients=1",
            "--config.partition.num_public_ids=100",
            "--config.partition.public_images=(100,110)",
            '--config.model={"name": "iresnet", "depth": 18, "dtype": "bfloat16"}',
            "--config.federation.batch_size=64",
        ),
        devices=("h200:1x1x1",),
        most={"whole": 0, "step": 0},
        most_kernels=470,  # 457, and a little for another compiler
    ),
    "r50": Program(
        "BigFace: R50, 93k classes cut, 128 images a device",
        "pretrained",
        central(50, 92_927, 16_384),
        devices=(POD,),
        most={"whole": 12, "step": 10},
    ),
    "r50_gpu": Program(
        "BigFace: R50, 93k classes cut, 128 images a device",
        "pretrained",
        central(50, 92_927, 1024),
        devices=("h200:1x1x8",),
        most={"whole": 24, "step": 17},
    ),
    "r50_offload": Program(
        "BigFace: R50, 93k classes cut, 128 images a device, convolutions on the host",
        "pretrained",
        central(50, 92_927, 1024, "--config.model.remat=offload"),
        devices=("h200:1x1x8",),
        most={"whole": 24, "step": 17},
    ),
}


def small_cnn(lanes: int, *changes: str, **most: int) -> Program:
    """64 clients of EMNIST on each device, so many at a time."""
    words = (
        "--config=classification/emnist",
        blank(num_identities=62, images_per_identity=500, image_size=28, channels=1),
        "--config.partition={'num_clients': 256}",
        "--config.federation.cohort_size=256",
        "--config.federation.data_placement=device",
        f"--config.federation.clients_per_device={lanes}",
        *changes,
    )
    about = f"FedAvg: a small CNN at 28 pixels, batch 20, {lanes} lanes"
    devices = ("v5p:2x2x1", "h200:1x1x1")
    return Program(about, "fedavg", words, devices, most_window=7, **most)


PROGRAMS |= {
    "emnist_1": small_cnn(1, most_cycles=280_000),
    "emnist_16": small_cnn(16, most_cycles=2_000_000),
    "emnist_64": small_cnn(64, most_cycles=8_000_000),
    "cifar_resnet18": Program(
        "FedAvg: ResNet-18 at 32 pixels, batch 32, 8 lanes",
        "fedavg",
        (
            "--config=classification/emnist",
            blank(num_identities=10, images_per_identity=500, image_size=32),
            "--config.partition={'num_clients': 32}",
            "--config.federation.cohort_size=32",
            "--config.federation.batch_size=32",
            "--config.federation.data_placement=device",
            "--config.federation.clients_per_device=8",
            '--config.model={"name": "resnet", "depth": 18}',
        ),
        devices=("v5p:2x2x1", "h200:1x1x1"),
        most_window=7,
    ),
    "iresnet50": Program(
        "FedAvg: IResNet-50 at 112 pixels in bfloat16, batch 64, one lane",
        "fedavg",
        (
            *PROGRAMS["iresnet18"].words,
            "--config.partition.num_clients=4",
            "--config.model.depth=50",
        ),
        devices=("v5p:2x2x1", "h200:1x1x1"),
    ),
}


# Tokens of 64 lanes x 8 images, width 384: one product of all rows with each of the
# twelve blocks' four frozen matrices, and its transpose; LoRA's are a lane's own.
PROGRAMS["vit_s_lora"] = Program(
    "FedAvg of LoRA, rank 8: ViT-S/16 at 224 pixels in bfloat16, batch 8, 64 lanes",
    "lora",
    (
        *small_cnn(64).words,
        blank(num_identities=10, images_per_identity=2000, image_size=224),
        "--config.federation.batch_size=8",
        '--config.model={"name": "vision_transformer", "dtype": "bfloat16"}',
        '--config.methods={"lora": {"learning_rate": 0.05, "adapter": {"name": "lora",'
        ' "rank": 8, "targets": "qkv|proj"}}}',
    ),
    devices=("v5p:2x2x1",),
)


def r1200(
    classes: int,
    rule: str,
    device: str,
    *changes: str,
    depth: int = 1200,
    images: int = 64,
    how: str = "",
) -> Program:
    """BigFace's R1.2K, so many images a device, all its leaves cut as the rule says."""
    batch = images * (128 if device == POD else 8)
    cut = f"--config.pretrain.sharding=((r'.', {rule!r}),)"
    words = central(depth, classes, batch, "--config.model.remat=true", cut, *changes)
    name = {1200: "R1.2K"}.get(depth, f"R{depth}")
    about = f"BigFace: {name}, {classes:,} classes cut, {rule}{how}, {images} images"
    about += " a device"
    # zero3 gathers each of the 598 blocks for both passes, and scatters its gradient.
    step = 3 * 598 if rule == "zero3" else 21
    most = {"whole": step + 8, "step": step}
    return Program(about, "pretrained", words, (device,), most)


PROGRAMS |= {
    "r1200_2m_zero1_h200": r1200(2_059_906, "zero1", "h200:1x1x8"),
    "r50_2m_zero1_h200": r1200(2_059_906, "zero1", "h200:1x1x8", depth=50),
    "r1200_2m_zero2_h200": r1200(2_059_906, "zero2", "h200:1x1x8"),
    "r1200_2m_zero2_256_h200": r1200(2_059_906, "zero2", "h200:1x1x8", images=256),
    "r1200_2m_recipe_h200": r1200(
        2_059_906,
        "zero2",
        "h200:1x1x8",
        "--config.pretrain.gather_dtype=bfloat16",
        images=256,
        how=" gathered in bfloat16",
    ),
    "r1200_2m_zero3_h200": r1200(2_059_906, "zero3", "h200:1x1x8"),
    "r1200_10m_zero1_h200": r1200(10_000_000, "zero1", "h200:1x1x8"),
    "r1200_2m_zero1_v5p": r1200(2_059_906, "zero1", POD),
    "r1200_2m_zero3_v5p": r1200(2_059_906, "zero3", POD),
    "r1200_10m_zero1_v5p": r1200(10_000_000, "zero1", POD),
}


def main():
    args = parse_arguments()
    faults, work = [], plan_again if args.plan else compiled
    for name in args.only or PROGRAMS:
        program = PROGRAMS[name]
        for device in args.device or program.devices:
            faults += work(args.out, name, program, device)
    write_page(args.out)
    print("\n".join(faults))
    sys.exit(bool(faults))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    listed = lambda text: text.split(",")
    parser.add_argument("--only", type=listed, help="names of PROGRAMS")
    parser.add_argument("--device", type=listed, help="instead of a program's own")
    parser.add_argument("--plan", action="store_true", help="compile nothing")
    results_file.add_flag(parser)
    return parser.parse_args()


def compiled(path, name, program, device) -> list[str]:
    """Compile, keep what is found, and say what is wrong with it."""
    from fedfr_jax.cli.aot_compile import compile_for

    words = [*program.words, f"--methods={program.row}"]
    try:
        planned = planned_gib(program, device)
        found = compile_for(device, words)[program.row]
    except (OSError, ValueError) as error:  # the others are compiled all the same
        return [f"{name} on {device}: {error}"]
    row = {"about": program.about, "on": device, "programs": found}
    row["planned_gib"] = planned
    row["compiler"] = f"jax {metadata.version('jax')}"
    results_file.write(path, {f"{name} on {device}": row})
    print(f"{name} on {device}: {json.dumps(found)}", flush=True)
    return [f"{name} on {device}: {fault}" for fault in faults_of(program, found)]


def plan_again(path, name, program, device) -> list[str]:
    """Ask the plan of a row that was compiled before, and keep what it says."""
    found = json.loads(path.read_text())
    row = found["rows"].get(f"{name} on {device}")
    if row is not None:
        row["planned_gib"] = planned_gib(program, device)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name} on {device}: {row['planned_gib']} GiB", flush=True)
    return []


def planned_gib(program: Program, device: str) -> float:
    """What `fedfr plan` says that the row's largest program takes of a device.

    Examples that are streamed, or come in pieces in central training, are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "plan.json")
        flags = [f"--device={device}", f"--methods={program.row}", f"--json={path}"]
        words = ["-m", "fedfr_jax", "plan", *program.words, *flags]
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise ChildProcessError(f"no plan of {words}:\n{done.stderr[-2000:]}")
        stage = json.loads(path.read_text())["stages"][program.row]
    parts = dict(stage["bytes"])
    if stage["is_streamed"] or stage["kind"] == "central":
        del parts["examples"]
    return round(sum(parts.values()) / 2**30, 3)


def faults_of(program: Program, found: dict) -> list[str]:
    """What a compiled row has against its plan."""
    faults = []
    if not all(part["fits"] for part in found.values()):
        faults.append("does not fit")
    for part in ("whole", "step"):
        counts = [(x.get(part) or {}).get("collectives", {}) for x in found.values()]
        count = sum(sum(of.values()) for of in counts)
        if count > program.most[part]:
            most = program.most[part]
            faults.append(f"{count} collectives in {part}, planned {most}")
    counted = [x for x in found.values() if x.get("steps_per_loop") and x.get("step")]
    if any(x["step"].get("open_loops") for x in counted):
        faults.append("a step of a counted loop has a loop that asks the host")
    kernels = max((x.get("step") or {}).get("kernels", 0) for x in found.values())
    if program.most_kernels is not None and kernels > program.most_kernels:
        faults.append(f"{kernels} kernels in step, planned {program.most_kernels}")
    cycles = max((x.get("step") or {}).get("cycles", 0) for x in found.values())
    if program.most_cycles is not None and cycles > program.most_cycles:
        faults.append(f"{cycles:,} cycles in step, planned {program.most_cycles:,}")
    window = max((x.get("step") or {}).get("grouped_window", 0) for x in found.values())
    if program.most_window is not None and window > program.most_window:
        faults.append(f"a grouped window of {window}, planned {program.most_window}")
    return faults


def write_page(path) -> None:
    """Write the page's table, of all that is in the file of results."""
    rows = json.loads(path.read_text())["rows"]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}")


HEADINGS = (
    "what, on which devices",
    "program",
    "GiB a device",
    "of it temporary",
    "by the plan",
    "collectives",
    "their MB",
    "kernels a step",
    "convolutions",
    "widest grouped window",
    "MB written a step, in a TPU's tiles",
    "million cycles a step",
    "ms",
    "compile s",
)


def table(rows: dict) -> str:
    """Markdown, a line for each program."""
    from fedfr_jax.plan.devices import DEVICES

    lines = [" | ".join(HEADINGS), " | ".join("---" for _ in HEADINGS)]
    for row in rows.values():
        of_plan = row.get("planned_gib")
        for name, of in row["programs"].items():
            shown = f"{of_plan:.2f}" if of_plan is not None else ""
            clock = DEVICES[row["on"].partition(":")[0]].clock
            words = [f"{row['about']}, {row['on']}", *cells(name, of, shown, clock)]
            lines.append(" | ".join(words))
            of_plan = None  # the first program is the one that is planned
    return "\n".join(f"| {line} |" for line in lines)


def cells(name: str, of: dict, of_plan: str, clock: float) -> list[str]:
    """A program's cells of the table.

    Args:
      of_plan: what a plan says of its memory.
      clock: of a TPU, cycles a second.
    """
    if "gib" not in of:
        return [name, f"no: {of['says']}", "", of_plan, *[""] * 9]
    whole, step = of["whole"], of["step"] or {}
    inside = step or whole
    each = inside["collectives"] or whole["collectives"]
    sizes = inside["megabytes"] or whole["megabytes"]
    cycles, written = step.get("cycles", 0), step.get("written_mb", 0)
    padded = f"{written:,.0f}, {step['padded_mb']:,.0f}" if written else ""
    return [
        name if of["fits"] else f"{name}: too large",
        f"{of['gib']['needed']:.2f}",
        f"{of['gib']['temporaries']:.2f}",
        of_plan,
        ", ".join(f"{count} {kind}" for kind, count in each.items()) or "none",
        ", ".join(f"{size:,.1f}" for size in sizes.values()),
        str(step.get("kernels", "")),
        str(step.get("convolutions", "")),
        str(step.get("grouped_window", "")),
        padded,
        f"{cycles / 1e6:.2f}" if cycles else "",
        f"{1e3 * cycles / clock:.2f}" if cycles else "",
        f"{of['compile_seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
