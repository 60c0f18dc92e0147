"""Published jobs of the board: what each is, who runs it, what was changed."""

from typing import NamedTuple

WHOLE = "ours-whole"  # all rounds, in hours, after those that are compared
OURS_DATA = "images come from a file, the same for all; a round's cohort is given"


class Program(NamedTuple):
    """What one system runs of a job."""

    system: str  # of run.SYSTEMS: its environment and threads
    rounds: int  # of the job, or as many as show the time
    changed: str = ""  # beside the peer's own program for this job
    script: str | None = None  # None: the system's own
    flags: tuple[str, ...] = ()


class Job(NamedTuple):
    """A job; our programs are those of which the name begins with "ours"."""

    about: str
    source: str
    programs: dict[str, Program]
    workload: str | None = None
    data: tuple[str, str] | None = None  # set and split, see `board_data.py`
    published: tuple[tuple[str, str], ...] = ()  # (what, figure), of the source


OF_PFL = (
    "Apple's train.py is in no package: the same calls of pfl with the settings of "
    f"baseline.yaml; {OURS_DATA}; evaluated by our function"
)
OF_FLOWER = (
    "pfl's program for Flower is of flwr 1.x's old API: the same FedAvg by today's; "
    f"{OURS_DATA} with the model; evaluated by our function"
)


def pfl_job(what: str, split: str = "iid", workload: str = "pfl_cifar10") -> Job:
    """One of pfl-research's rows."""
    programs = {
        "ours": Program("ours", 100),
        "pfl": Program("pfl", 100, OF_PFL),
        "flower": Program("flower", 100, OF_FLOWER),
        WHOLE: Program("ours", 1500),
    }
    return Job(
        about=f"CIFAR-10, 1,000 users of 50 images, {what}: cohort 50, batch 10, one "
        "epoch, SGD 0.1, server 1.0, unweighted, a CNN with dropout, evaluated every "
        "10 rounds, of 1,500",
        source="apple/pfl-research, publications/pfl at bcf0331, arXiv:2404.06430",
        programs=programs,
        workload=workload,
        data=("cifar10", split),
    )


OF_BLAZEFL = (
    "blazefl 3.0.0 asks for Python 3.14: two functions lose their type parameter and "
    "annotations are not evaluated, and its pool of threads, which needs a Python "
    "without a global lock, is not run; images are tensors already; the network starts "
    "from the distribution of ours"
)


def blazefl_job(what: str, workload: str) -> Job:
    """BlazeFL's job with one of its networks."""
    of_bits = ("--cohort=8",)
    return Job(
        about=f"CIFAR-10 in 200 shards over 100 clients, all in each of 5 rounds of 5 "
        f"epochs, batch 50, SGD 0.1, {what}; bits of 8 clients",
        source="BlazeFL 3.0 (CVPRW 2026), blazefl/benchmarks",
        programs={
            "ours": Program("ours", 5),
            "blazefl": Program("blazefl", 5, OF_BLAZEFL),
            "blazefl-pool": Program(
                "blazefl-1", 5, f"a process for each core; {OF_BLAZEFL}"
            ),
            "ours-bits": Program("ours", 2, script="ours_bits.py", flags=of_bits),
            "blazefl-bits": Program(
                "blazefl", 2, OF_BLAZEFL, flags=("--bits", *of_bits)
            ),
        },
        workload=workload,
        data=("cifar10", "shards"),
    )


def planned(device: str) -> Program:
    """Our plan of Partial FC's table on a grid of devices."""
    return Program("ours", 1, script="ours_plan.py", flags=(f"--device={device}",))


def simulated(kind: str) -> Program:
    """Our config of FedScale's job."""
    flags = ("--config=bench/fedscale_femnist", f"--word={kind}")
    return Program("ours", 1000, script="ours_config.py", flags=flags)


PARTIAL_FC = {  # people: images/s of data parallel, model parallel, Partial FC 0.1; MB
    125_000: "4681, 4824, 5004 images/s; 7358, 5306, 4868 MB",
    1_400_000: "1672, 3043, 4738 images/s; 32252, 11178, 6056 MB",
    5_500_000: "-, 1389, 3975 images/s; -, 32188, 9854 MB",
    8_000_000: "-, -, 3565 images/s; -, -, 12310 MB",
}
JOBS = {
    "pfl-cifar10": pfl_job("IID"),
    "pfl-cifar10-dirichlet": pfl_job("classes from Dir(0.1)", "dirichlet"),
    "pfl-cifar10-dp": pfl_job(
        "IID, central DP (epsilon 2, delta 1e-6, clip 0.4, noise of 1,000 users)",
        workload="pfl_cifar10_dp",
    ),
    "blazefl-cnn": blazefl_job("its small CNN (6-16-120-84)", "blazefl_all"),
    "blazefl-resnet18": blazefl_job("ResNet-18", "blazefl_resnet18"),
    "partial-fc": Job(
        about="Partial FC's synthetic table: ResNet-50, 1,024 images a step, 125,000 "
        "to 8 million people; ours is planned and compiled, not run",
        source="deepinsight/insightface, recognition/arcface_torch at 0159b24",
        programs={
            "ours, 8 x V100": planned("v100:1x1x8"),
            "ours, 1 x H100": planned("h100:1x1x1"),
        },
        published=tuple(
            (f"{n:,} people, 8 x V100: data parallel, model parallel, Partial FC", text)
            for n, text in PARTIAL_FC.items()
        ),
    ),
    "pfllib-memory": Job(
        about="PFLlib's memory claim: CIFAR-100, 500 clients, all in a round, its "
        "4-layer CNN, batch 10, one epoch, SGD 0.005; memory of the host, as there is "
        "no GPU",
        source="TsingZ0/PFLlib, README.md at 004a405",
        programs={
            "ours": Program("ours", 3),
            "as PFLlib does it": Program(
                "torch",
                3,
                "PFLlib is no package: its structure, written by us (a deep copy of "
                "the network and an optimizer per client, in one process)",
                script="peer_pfllib.py",
            ),
        },
        workload="pfllib_500",
        data=("cifar100", "iid"),
        published=(("GPU memory on a GeForce RTX 3090", "5.08 GB"),),
    ),
    "fedscale-femnist": Job(
        about="FedScale's FEMNIST on simulated time: rounds of 50 clients, 1.3 times "
        "as many asked, and FedBuff with 100 at work and a buffer of 50; batch 20, SGD "
        "0.05, with its traces of devices and hours",
        source="SymbioticLab/FedScale, benchmark/configs/femnist and async_fl, "
        "arXiv:2105.11367",
        programs={
            "ours, rounds": simulated("sync"),
            "ours, FedBuff": simulated("fedbuff"),
        },
    ),
}
