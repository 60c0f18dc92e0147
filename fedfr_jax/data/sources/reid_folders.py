"""Re-identification sets whose file names say who and which camera: 0002_c1s1_03.jpg.

Market-1501 (Zheng et al., ICCV 2015), DukeMTMC-reID (Zheng et al., ICCV 2017), CUHK03
in its new protocol (Zhong et al., arXiv:1701.08398), and MSMT17 where its files are
renamed likewise. Part of a set without folders is tested by a protocol of our own.
"""

import os
import re
from collections.abc import Mapping

from fedfr_jax.data.sources.files import open_files
from fedfr_jax.data.sources.reid import (
    IMAGE_SIZE,
    NOBODY,
    Listing,
    check_disjoint,
    held_out_roles,
    reid_source,
)
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Source

NAME = re.compile(r"(?P<identity>-?[0-9]+)_c(?P<camera>[0-9]{1,9})[^0-9].*")
FOLDERS = {
    "train": "bounding_box_train",
    "query": "query",
    "gallery": "bounding_box_test",
}
ROLES = {"train": TRAIN, "query": QUERY, "gallery": GALLERY}


def market1501(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = IMAGE_SIZE,
    under: str = "",
    folders: Mapping[str, str] | None = None,
    test_identities: int | float | None = None,
    seed: int | None = None,
    distractor: str | None = "0000",
    separate_ids: bool = False,
) -> Source:
    """Images named <person>_c<camera>..., in the set's three folders or in one.

    Args:
      path: a directory or .zip. Where one of `folders` is in it, other folders are
        passed over; where none is, all images are one set.
      image_size: side or (H, W), to which images are resized; None takes images of
        one size as they are.
      under: only files below this sub-folder.
      folders: {"train", "query", "gallery": names of folders}, FOLDERS by default.
      test_identities: of a set without those folders, how many people are tested (see
        `reid.held_out_roles`), a number or a share in (0, 1); None trains on everybody.
      seed: draws those people; None takes the last by name.
      distractor: identity of strangers in the gallery, where it has no query; it is a
        person among queries, in training and in a set of one folder. None where it is
        a person in the gallery too, as in MSMT17.
      separate_ids: True where training and tested people are both numbered from 0, as
        in MSMT17: their names become train-0000 and test-0000.

    Raises:
      ValueError: naming the file, for a name without person or camera, a person to
        train on and to be tested, or (when read) an unreadable image.
    """
    files = open_files(path, under=under)
    names, roles = _by_folder(files.names, {**FOLDERS, **(folders or {})})
    people, cameras = zip(*(_who(name, path) for name in names), strict=True)
    if roles is None:
        roles = held_out_roles(people, cameras, test_identities, seed, {NOBODY})
    elif test_identities is not None:
        raise ValueError(
            f"test_identities must be None for {path}, which has folders of its own, "
            f"got {test_identities}."
        )
    if separate_ids:
        people = [_separate(*of) for of in zip(people, roles, strict=True)]
    listing = Listing(names, people, cameras, roles)
    asked = {who for who, role in zip(people, roles, strict=True) if role == QUERY}
    check_disjoint(listing, files, strangers={distractor} - asked)
    return reid_source(files, listing, image_size, path)


def cuhk03_np(
    data_dir: str | os.PathLike,
    *,
    boxes: str = "detected",
    image_size: int | tuple[int, int] | None = IMAGE_SIZE,
) -> Source:
    """CUHK03 in the new protocol: cuhk03-np/<boxes>/{bounding_box_train, ...}.

    Args:
      data_dir: the directory or .zip with the folders of both kinds of boxes.
      boxes: "detected", or "labeled" by hand.
      image_size: side or (H, W), to which images are resized.
    """
    return market1501(data_dir, under=boxes, image_size=image_size, distractor=None)


def _by_folder(names, folders):
    """(names in one of `folders`, their roles), or (all names, None)."""
    if sorted(folders) != sorted(FOLDERS):
        raise ValueError(
            f"folders must have keys of {sorted(FOLDERS)}, got {sorted(folders)}."
        )
    role_of = {word: ROLES[part] for part, word in folders.items()}
    found = []
    for name in names:
        parts = [part for part in name.split("/")[:-1] if part in role_of]
        found += [(name, role_of[part]) for part in parts[:1]]
    return zip(*found, strict=True) if found else (names, None)


def _who(name, path):
    """(person, camera) of a file's name."""
    match = NAME.fullmatch(name.split("/")[-1])
    if match is None:
        raise ValueError(
            f"{name} in {path} must be named <person>_c<camera>..., as 0002_c1s1_03.jpg"
            ", got no person or no camera in the name."
        )
    return match["identity"], int(match["camera"])


def _separate(person, role):
    """A name that training and tested people do not share."""
    if person == NOBODY:
        return person
    return f"{'train' if role == TRAIN else 'test'}-{person}"
