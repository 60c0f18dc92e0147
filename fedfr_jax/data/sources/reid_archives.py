"""Small re-identification sets, read from their archives.

FedReID (Zhuang et al., arXiv:2205.12144, table 1) trains on some people of each and
tests the others; its splits are given out on request only. Here a seed samples the
people to test. Of each of them, the images of the first half of the views are queries
and the others the gallery, which gives the numbers of its table. A view is a camera, a
sequence (3DPeS) or a single image (i-LIDS), by the file names; `Source.cameras` are the
views.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from fedfr_jax.data.sources.decoding import ImageSize
from fedfr_jax.data.sources.folder import archive_in
from fedfr_jax.data.sources.image_files import Files, open_files
from fedfr_jax.data.sources.reid import (
    IMAGE_SIZE,
    Listing,
    reid_source,
    tested_identities,
)
from fedfr_jax.ranges import Seed
from fedfr_jax.schema import checked
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Source

SHARED = 200  # people of PRID 2011 that both cameras see, the first ones


class Names(NamedTuple):
    """File name pattern of an archive's images."""

    pattern: str  # of the whole path, with groups person and view
    example: str
    camera_of: Callable[[str], int] = int


class ArchiveListing(NamedTuple):
    """Names, identities and views of T images of an archive."""

    path: os.PathLike
    files: Files
    names: Sequence[str]  # T
    people: np.ndarray  # [T] str
    views: np.ndarray  # [T] int


VIPER = Names(
    r"(?:.*/)?cam_(?P<view>[ab])/(?P<person>\d+)_\d+\.[^./]+",
    "VIPeR/cam_a/000_45.bmp",
    "0ab".index,
)
CUHK01 = Names(  # two images by each of two cameras
    r"(?:.*/)?(?P<person>\d{4})(?P<view>\d{3})\.[^./]+",
    "campus/0001001.png",
    lambda number: (int(number) + 1) // 2,
)
THREE_DPES = Names(
    r"(?:.*/)?RGB/(?P<person>\d+)_(?P<view>\d+)_[^/]+",
    "3DPeS/RGB/1_18_FRAME_2_RGB.bmp",
)
ILIDS = Names(CUHK01.pattern, "i-LIDS_Pedestrian/Persons/0001001.jpg")
ILIDS_VID = Names(
    r"(?:.*/)?images/cam(?P<view>\d)/person(?P<person>\d+)/[^/]+",
    "i-LIDS-VID/images/cam1/person001/cam1_person001.png",
)


def _archive_source(doc: str, *namings: Names) -> Callable[..., Source]:
    """Build the source of a set whose images have one of the known names."""

    def open_archive(
        data_dir: str | os.PathLike,
        *,
        image_size: ImageSize | None = IMAGE_SIZE,
        test_identities: int | float = 0.5,
        seed: Seed = 0,
    ) -> Source:
        archive = _list_archive(data_dir, *namings)
        roles = _roles(archive.people, archive.views, test_identities, seed)
        return _source(archive, roles, image_size)

    open_archive.__doc__ = f"""{doc}

    Args:
      data_dir: folder with one .zip, or of the unpacked archive.
      image_size: side or (H, W), to which images are resized; None takes images of
        one size as they are.
      test_identities: identities that are tested, a number or a share in (0, 1).
      seed: samples them.
    """
    return open_archive


viper = _archive_source(
    "VIPeR (Gray et al., 2007): VIPeR/{cam_a,cam_b}/000_45.bmp, 632 people.", VIPER
)
cuhk01 = _archive_source(
    """CUHK01 (Li et al., ACCV 2012): campus/0001001.png, 971 people.

    Images 1 and 2 of a person are of one camera, 3 and 4 of the other.""",
    CUHK01,
)
three_dpes = _archive_source(
    """3DPeS (Baltieri et al., 2011): RGB/<person>_<sequence>_FRAME_<n>_RGB.bmp.

    FedReID tests 100 people.""",
    THREE_DPES,
)
ilids = _archive_source(
    """i-LIDS (Zheng et al., BMVC 2009): Persons/0001001.jpg, 119 people.

    Or iLIDS-VID's single images (Wang et al., ECCV 2014), 300 people and two cameras:
    images/cam1/person001/cam1_person001.png. FedReID's table has 119 people.""",
    ILIDS,
    ILIDS_VID,
)


@checked
def prid2011(
    data_dir: str | os.PathLike,
    *,
    shots: Literal["single_shot", "multi_shot"] = "single_shot",
    train_shots: Literal["single_shot", "multi_shot"] | None = None,
    image_size: ImageSize | None = IMAGE_SIZE,
    test_identities: int | float = 0.5,
    seed: Seed = 0,
) -> Source:
    """PRID 2011 (Hirzer et al., SCIA 2011): <shots>/cam_a/person_0001.png.

    The first 200 people are seen by both cameras, and some of them are tested. The same
    higher number is another person in each: those of camera a are trained on, those of
    camera b are in the gallery.

    Args:
      shots: "single_shot", or "multi_shot" with cam_a/person_0001/0001.png.
      train_shots: of training images, if others than `shots`: "multi_shot" with tests
        on single shots.
      data_dir, image_size, test_identities, seed: see `viper`.
    """
    train_shots = train_shots or shots
    below = r"cam_(?P<view>[ab])/person_(?P<person>\d+)[/.].+"
    pattern = rf"(?:.*/)?(?:{shots}|{train_shots})/{below}"
    example = f"prid_2011/{shots}/cam_a/person_0001.png"
    archive = _list_archive(data_dir, Names(pattern, example, VIPER.camera_of))
    folders = [re.search(r"(\w+)/cam_[ab]/", name)[1] for name in archive.names]
    if missing := {shots, train_shots} - {*folders}:
        raise ValueError(
            f"{archive.path} must have images below {shots}/ and {train_shots}/, got "
            f"none below {missing.pop()}/. Copy that folder, or choose other shots."
        )
    is_shared = np.array([int(person) <= SHARED for person in archive.people])
    sides = np.where(archive.views == 1, "a-", "b-")
    people = np.where(is_shared, archive.people, np.char.add(sides, archive.people))
    excluded = {*people[~is_shared].tolist()}
    roles = _roles(people, archive.views, test_identities, seed, excluded)
    roles = np.where(~is_shared & (archive.views == 2), GALLERY, roles)
    wanted = np.where(roles == TRAIN, train_shots, shots)
    rows = np.flatnonzero(wanted == np.array(folders))
    archive = archive._replace(
        names=[archive.names[row] for row in rows],
        people=people[rows],
        views=archive.views[rows],
    )
    return _source(archive, roles[rows], image_size)


def _list_archive(data_dir, *namings: Names) -> ArchiveListing:
    """List the images of an archive by the first naming that matches any."""
    path = archive_in(data_dir)
    files = open_files(path)
    for naming in namings:
        matches = filter(None, map(re.compile(naming.pattern).fullmatch, files.names))
        rows = [(m.string, m["person"], naming.camera_of(m["view"])) for m in matches]
        if rows:
            names, people, views = zip(*rows, strict=True)
            return ArchiveListing(path, files, names, np.array(people), np.array(views))
    examples = " or ".join(naming.example for naming in namings)
    raise ValueError(
        f"{path} must have images named like {examples}, got {files.names[0]}. Check "
        "the path."
    )


def _roles(people, views, test_identities, seed, excluded=()) -> np.ndarray:
    """Roles [T]: images of a test person's first half of views are queries."""
    candidates = set(people.tolist()) - {*excluded}
    tested = tested_identities(candidates, test_identities, seed)
    person_views = list(zip(people.tolist(), views.tolist(), strict=True))
    views_of = {}
    for person, view in sorted({*person_views}):
        views_of.setdefault(person, []).append(view)
    queried = {
        (person, view)
        for person in tested
        for view in views_of[person][: len(views_of[person]) // 2]
    }
    is_tested = np.isin(people, tested)
    is_query = np.array([pair in queried for pair in person_views])
    return np.where(is_tested, np.where(is_query, QUERY, GALLERY), TRAIN)


def _source(archive: ArchiveListing, roles, image_size) -> Source:
    people, views = archive.people.tolist(), archive.views.tolist()
    listing = Listing(archive.names, people, views, roles)
    return reid_source(archive.files, listing, image_size, archive.path)
