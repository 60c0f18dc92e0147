"""What is played: a cell is a data set, a network and how it is taught."""

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedfr_jax.cli.flags import set_key
from fedfr_jax.config.files import load

CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs/bigface/scaling.py"
WIDTHS = (4, 6, 8, 12, 20, 32)  # of the first stage: 28 k to 1.3 M parameters
STUDENTS, MIDDLE, LARGEST = (4, 6, 8, 12), 12, WIDTHS[-1]
FEWER, KEPT = (250, 500), "partition.num_trained_public_ids"  # people of 1,000
RATIOS = (0.0, 0.1, 0.35, 0.5)
RATIO = 0.35  # of every cell on rendered people that says nothing else
SHALLOW, DEEP = (1, 1, 1, 1), (3, 4, 10, 2)
DEEP_WIDTH = 16  # as many parameters as the shallow teacher
SCRATCH, DISTILLED = "scratch", "distilled"


class Cell(NamedTuple):
    """A network to be trained and judged."""

    name: str  # of its row
    series: str  # cells that are compared size by size
    changes: Mapping[str, Any]  # {key: value} of CONFIG
    data: str = "faces"  # a word of CONFIG
    teacher: Any = None  # the Cell that teaches it


def sized(width: int, data: str = "faces", **others) -> Cell:
    """A shallow network of a width."""
    widths = {"model.widths": tuple(width * 2**i for i in range(4))}
    series = SCRATCH if data == "faces" else data
    return Cell(f"w{width}", series, widths, data)._replace(**others)


def fewer(width: int, people: int) -> Cell:
    """A shallow network on the images of fewer people."""
    cell = sized(width, name=f"w{width}, {people} people")
    return cell._replace(changes={**cell.changes, KEPT: people})


def taught(width: int, teacher: Cell, name: str = "") -> Cell:
    """A student, and its teacher's embeddings as a further target."""
    cell = sized(width, series=DISTILLED, teacher=teacher)
    return cell._replace(name=name or cell.name)


def masked(ratio: float) -> Cell:
    """The middle network, masks on a share of its training images."""
    cell = sized(MIDDLE, name=f"ratio {ratio:g}", series="masks")
    augment = ({"name": "face_mask", "fixed_per_image": True, "probability": ratio},)
    if ratio == RATIO:  # that of the config: the same run
        return cell
    return cell._replace(changes={**cell.changes, "pretrain.augment": augment})


def mixed(name: str, **changes) -> Cell:
    """The middle network, with other keys."""
    cell = sized(MIDDLE, name=name, series="moe")
    return cell._replace(changes={**cell.changes, **changes})


PLAIN_TEACHER = sized(LARGEST, name="shallow", series="teachers")
DEEP_TEACHER = sized(DEEP_WIDTH, name="deep", series="teachers")
DEEP_TEACHER = DEEP_TEACHER._replace(
    changes={**DEEP_TEACHER.changes, "model.blocks": DEEP}
)
MOE = {"model.head": "moe"}
PARTS: Mapping[str, tuple[Cell, ...]] = MappingProxyType(
    {
        "sizes": tuple(sized(width) for width in WIDTHS),
        "distilled": tuple(taught(width, sized(LARGEST)) for width in STUDENTS),
        "masks": tuple(masked(ratio) for ratio in RATIOS),
        "moe": (
            mixed("plain"),
            mixed("moe", **MOE),
            mixed("moe, gate untaught", **MOE, **{"pretrain.gate_weight": 0.0}),
        ),
        "teachers": (
            PLAIN_TEACHER,
            DEEP_TEACHER,
            taught(8, sized(LARGEST), "w8 of the shallow one"),
            taught(8, DEEP_TEACHER, "w8 of the deep one"),
        ),
        "omniglot": tuple(sized(width, "omniglot") for width in WIDTHS),
        "lfw": tuple(sized(width, "lfw") for width in WIDTHS),
        "data": tuple(
            fewer(width, people)
            for width in (WIDTHS[0], MIDDLE, LARGEST)
            for people in FEWER
        ),
    }
)
STAGES = 2  # of a toy's four
TINY = {  # to see that everything runs
    "pretrain.epochs": 1,
    "pretrain.batch_size": 16,
    "partition.num_public_ids": 12,
    "partition.num_unseen_ids": 12,
}
TINY_PART = 50  # people for each of a toy's
TINY_FACES = {"data.num_identities": 28, "data.images_per_identity": 6}


def config_of(cell: Cell, seed: int, *, is_tiny: bool = False):
    """CONFIG as a cell with a seed, its teacher left out."""
    config = load(CONFIG, cell.data)
    config = config.copy_and_resolve_references()
    changes = {"seed": seed, "partition.seed": seed, **cell.changes}
    if cell.data == "faces":
        changes["data.seed"] = seed
    if is_tiny:
        changes |= {**TINY, **(TINY_FACES if cell.data == "faces" else {})}
        if KEPT in changes:
            changes[KEPT] //= TINY_PART
    for key, value in changes.items():
        set_key(config, key, value)
    if is_tiny:
        for key in ("blocks", "widths"):
            config.model[key] = config.model[key][:STAGES]
    return config
