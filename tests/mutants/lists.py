"""All faults, one by one."""

import pathlib
from typing import NamedTuple

from tests.mutants import (
    central,
    classification,
    commands,
    data,
    evaluation,
    experiments,
    faces,
    federated,
    losses,
    masks,
    parts,
    reid,
    reid_training,
    runs,
    segmentation,
    settings,
)

ROOT = pathlib.Path(__file__).parent.parent.parent
ROOMS = (losses, faces, federated, central, data, evaluation, classification)
ROOMS += (commands, experiments, masks, parts, reid, reid_training, runs)
ROOMS += (segmentation, settings)


class Mutant(NamedTuple):
    """One fault."""

    file: str  # from the repository's root
    old: str  # found once in the file
    new: str
    tests: tuple[str, ...]  # from `tests/`; one of them fails


def mutants() -> list[Mutant]:
    """The faults of all rooms."""
    return [
        Mutant(group.file, old, new, tuple(group.tests.split()))
        for room in ROOMS
        for group in room.MUTANTS
        for old, new in group.changes
    ]
