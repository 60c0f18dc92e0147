"""Re-identification data sets: by file names, with lists, or from small archives.

Every image has a role: TRAIN, QUERY or GALLERY. The identity DISTRACTOR stands for
detections without a person: such images are in the gallery only, as junk. Cameras have
the numbers of the data set.

Market-1501 (Zheng et al., ICCV 2015), DukeMTMC-reID (Zheng et al., ICCV 2017), CUHK03
in its new protocol (Zhong et al., arXiv:1701.08398) have names such as
0002_c1s1_03.jpg. For a set without folders `held_out_roles` chooses the test part.
Lists are a csv of our format (`reid_csv`) and MSMT17's files.

Small archives: FedReID (Zhuang et al., arXiv:2205.12144, table 1) trains on some people
of each and tests the others; its splits are given out on request only. Here a seed
samples the people to test. Of each of them, the images of the first half of the views
are queries and the others the gallery, which gives the numbers of its table. A view is
a camera, a sequence (3DPeS) or a single image (i-LIDS), by the file names;
`Source.cameras` are the views.
"""

import os
import pathlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedfr_jax.data.sources.decoding import ImageSize
from fedfr_jax.data.sources.folder import archive_in
from fedfr_jax.data.sources.image_files import Files, natural_key, open_files
from fedfr_jax.data.sources.index import (
    STRETCHED,
    index_files,
    number_identities,
    open_index,
)
from fedfr_jax.data.sources.selection import check_unique
from fedfr_jax.files import read_csv, read_list
from fedfr_jax.ranges import Seed
from fedfr_jax.schema import checked
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Source

DISTRACTOR = "-1"
IMAGE_SIZE = (256, 128)  # of FedReID and most others
NAME = re.compile(r"(?P<identity>-?[0-9]+)_c(?P<camera>[0-9]{1,9})[^0-9].*")
FOLDERS = {"bounding_box_train": TRAIN, "query": QUERY, "bounding_box_test": GALLERY}
ROLES = {"train": TRAIN, "query": QUERY, "gallery": GALLERY}
MSMT17_LINE = r"((?:\S*/)?[^\s_/]+_[^\s_/]+_(\d{1,9})_\S*)\s+(\d+)\s*"


class Listing(NamedTuple):
    """Names, identities, cameras and roles of T images."""

    names: Sequence[str]  # of `Files`
    identities: ArrayLike  # [T] str
    cameras: ArrayLike  # [T] int
    roles: ArrayLike  # [T] int


def reid_source(
    files: Files,
    listing: Listing,
    image_size: ImageSize | None,
    *,
    unqueried: Collection[str] = (),
) -> Source:
    """Source of a listing's images, in color, resized by the bicubic kernel.

    Args:
      image_size: side or (H, W); None takes the first image's.
      unqueried: identities in the gallery without a query, who may be in training too.
    """
    people, roles = np.array(listing.identities), np.array(listing.roles, np.uint8)
    is_known = ~np.isin(people, [DISTRACTOR, *unqueried])
    is_both = (roles == TRAIN) & np.isin(people, people[(roles != TRAIN) & is_known])
    if is_both.any():
        row = int(np.argmax(is_both))
        raise ValueError(
            "training and test identities must be disjoint, got "
            f"{people[row]} of {files.origin(listing.names[row])} in both. Give "
            "different people different names."
        )
    labels, identities = number_identities(people.tolist())
    index = index_files(
        files,
        listing.names,
        labels=labels,
        identities=identities,
        cameras=np.array(listing.cameras, np.int32),
        roles=np.where(people == DISTRACTOR, GALLERY, roles).astype(np.uint8),
    )
    return open_index(index, image_size, 3, STRETCHED._replace(kernel="bicubic"))


def held_out_roles(
    people: np.ndarray, cameras: np.ndarray, num_test: int | float, seed: int | None
) -> np.ndarray:
    """Choose roles [T] for a set without test part, its images in the order of names.

    A test identity's first image of each camera is a query, its other images are the
    gallery.

    Args:
      people: [T] str.
      num_test: test identities, a number or a share in (0, 1).
      seed: of their choice; None takes the last by name.
    """
    tested = tested_identities({*people.tolist()} - {DISTRACTOR}, num_test, seed)
    is_tested = np.isin(people, tested)
    number = np.unique(people, return_inverse=True)[1]
    first_rows = np.unique(np.stack([number, cameras]), axis=1, return_index=True)[1]
    is_first = np.isin(np.arange(len(people)), first_rows)
    roles = np.where(is_first, QUERY, GALLERY)
    return np.where(is_tested, roles, TRAIN)


def tested_identities(
    people: Collection[str], num_test: int | float, seed: int | None
) -> list[str]:
    """Choose the test identities; see `held_out_roles`."""
    candidates = sorted(people, key=natural_key)
    is_share = isinstance(num_test, float)
    count = round(num_test * len(candidates)) if is_share else int(num_test)
    if not 0 < count < len(candidates):
        raise ValueError(
            f"test_identities must leave at least one of {len(candidates)} people for "
            f"training and one for test, got {num_test}."
        )
    if seed is not None:
        candidates = np.random.default_rng(seed).permutation(candidates).tolist()
    return candidates[-count:]


def market1501(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None = IMAGE_SIZE,
    subfolder: str = "",
    test_identities: int | float | None = None,
    seed: int | None = None,
    distractor_identity: str | None = "0000",
) -> Source:
    """Images named <person>_c<camera>..., in three folders or in one.

    Args:
      path: a directory or .zip. Where one of FOLDERS is in it, other folders are passed
        over; where none is, all images are one set.
      image_size: side or (H, W), to which images are resized; None takes the first
        image's.
      subfolder: only files below this sub-folder.
      test_identities: of a set without those folders, how many identities are tested
        (see `reid.held_out_roles`), a number or a share in (0, 1); None trains on all.
      seed: of their choice; None takes the last by name.
      distractor_identity: identity of distractors in the gallery, if it has no query;
        in training, in queries and in a set of one folder it is a person. None if it is
        a person in the gallery too.
    """
    files, role_of_name = open_files(path, under=subfolder), {}
    for name in files.names:
        roles = [FOLDERS[part] for part in name.split("/")[:-1] if part in FOLDERS]
        if roles:
            role_of_name[name] = roles[0]
    if role_of_name and test_identities is not None:
        raise ValueError(
            f"test_identities must be None for {path}, whose folders give the test "
            f"part, got {test_identities}."
        )
    names = list(role_of_name) or files.names
    parsed = [_parse_name(name, path) for name in names]
    people, cameras = (np.array(column) for column in zip(*parsed, strict=True))
    roles = np.array([role_of_name.get(name, TRAIN) for name in names])
    if test_identities is not None:
        roles = held_out_roles(people, cameras, test_identities, seed)
    unqueried = {distractor_identity or DISTRACTOR} - {*people[roles == QUERY].tolist()}
    listing = Listing(names, people, cameras, roles)
    return reid_source(files, listing, image_size, unqueried=unqueried)


def _parse_name(name: str, path) -> tuple[str, int]:
    """Parse (person, camera) of a file name."""
    match = NAME.fullmatch(name.split("/")[-1])
    if match is None:
        raise ValueError(
            f"{name} in {path} must be named <person>_c<camera>..., as 0002_c1s1_03.jpg"
            ", got no person or no camera in the name."
        )
    return match["identity"], int(match["camera"])


def cuhk03_np(
    data_dir: str | os.PathLike,
    *,
    boxes: str = "detected",
    image_size: ImageSize | None = IMAGE_SIZE,
) -> Source:
    """CUHK03 in the new protocol: cuhk03-np/<boxes>/{bounding_box_train, ...}.

    Args:
      data_dir: the directory or .zip with the folders of both kinds of boxes.
      boxes: "detected", or "labeled" by hand.
      image_size: side or (H, W), to which images are resized.
    """
    return market1501(
        data_dir, subfolder=boxes, image_size=image_size, distractor_identity=None
    )


def reid_csv(
    path: str | os.PathLike,
    *,
    images: str | os.PathLike | None = None,
    image_size: ImageSize | None = IMAGE_SIZE,
) -> Source:
    """Open the images that a csv lists, in its order.

    Args:
      path: csv with the columns file, identity, camera and split: a file's path below
        `images`, a name, a whole number of at least 0, and train, query or gallery. The
        identity -1 is a distractor.
      images: directory or .zip; None is the csv's folder.
      image_size: side or (H, W), to which images are resized; None takes the first
        image's.
    """
    rows = []
    columns = ("file", "identity", "camera", "split")
    for line, (file, person, camera, split) in read_csv(path, columns).items():
        if not person or not re.fullmatch("[0-9]{1,9}", camera) or split not in ROLES:
            raise ValueError(
                f"{path}, line {line} must have an identity, an integer camera and a "
                f"split of {', '.join(ROLES)}, got {person!r}, {camera!r} and "
                f"{split!r}."
            )
        rows.append((file, person, int(camera), ROLES[split]))
    files = open_files(images or pathlib.Path(path).parent)
    return _listed(rows, files, image_size, path)


def msmt17(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize | None = IMAGE_SIZE,
    folders: tuple[str, str] = ("train", "test"),
) -> Source:
    """Open MSMT17 (Wei et al., CVPR 2018) by its list_{train,val,query,gallery}.txt.

    A line is "<path> <number>", where the path is 0000/0000_000_01_... and its third
    word the camera; those of train and val are below folders[0], the others below
    folders[1]. People of both are numbered from 0: their names are train-0 and test-0.

    Args:
      data_dir: folder of the lists and the folders (or one .zip of them).
      image_size: side or (H, W), to which images are resized.
      folders: of training and test images; ("mask_train_v2", "mask_test_v2") in the
        second release.
    """
    rows = []
    for part, role in {**ROLES, "val": TRAIN}.items():
        path = pathlib.Path(data_dir, f"list_{part}.txt")
        kind, below = ("train", folders[0]) if role == TRAIN else ("test", folders[1])
        for number, line in enumerate(read_list(path).splitlines(), 1):
            match = re.fullmatch(MSMT17_LINE, line)
            if match is None:
                raise ValueError(
                    f"{path}, line {number} must be <path> <number> with the camera as "
                    "the third word of the file's name, as 0000/0000_000_01_a.jpg 0, "
                    f"got {line!r}."
                )
            name, camera, person = match[1], int(match[2]), int(match[3])
            rows.append((f"{below}/{name}", f"{kind}-{person}", camera, role))
    return _listed(rows, open_files(archive_in(data_dir)), image_size, data_dir)


def _listed(rows, files: Files, image_size, path) -> Source:
    """Source of (file, identity, camera, role) of a list's lines."""
    if not rows:
        raise ValueError(f"{path} must list images, got none.")
    check_unique(((name, None) for name, *_ in rows), "image", path)
    return reid_source(files, Listing(*zip(*rows, strict=True)), image_size)


class Names(NamedTuple):
    """File name pattern of an archive's images."""

    pattern: str  # of the whole path, with groups person and view
    example: str
    camera_of: Callable[[str], int] = int


def first_or_second(letter: str) -> int:
    """Number of a camera a or b."""
    return "0ab".index(letter)


def camera_of_pair(number: str) -> int:
    """Camera of an image, of which the first has two, the second the next two."""
    return (int(number) + 1) // 2


VIPER = Names(
    r"(?:.*/)?cam_(?P<view>[ab])/(?P<person>\d+)_\d+\.[^./]+",
    "VIPeR/cam_a/000_45.bmp",
    first_or_second,
)
ILIDS = Names(
    r"(?:.*/)?(?P<person>\d{4})(?P<view>\d{3})\.[^./]+",
    "i-LIDS_Pedestrian/Persons/0001001.jpg",
)
CUHK01 = Names(ILIDS.pattern, "campus/0001001.png", camera_of_pair)
THREE_DPES = Names(
    r"(?:.*/)?RGB/(?P<person>\d+)_(?P<view>\d+)_[^/]+",
    "3DPeS/RGB/1_18_FRAME_2_RGB.bmp",
)
ILIDS_VID = Names(
    r"(?:.*/)?images/cam(?P<view>\d)/person(?P<person>\d+)/[^/]+",
    "i-LIDS-VID/images/cam1/person001/cam1_person001.png",
)
SHARED = 200  # people of PRID 2011 that both cameras see, the first ones


def _archive_source(doc: str, *namings: Names) -> Callable[..., Source]:
    """Build the source of a set whose images have one of the known names."""

    def open_archive(
        data_dir: str | os.PathLike,
        *,
        image_size: ImageSize | None = IMAGE_SIZE,
        test_identities: int | float = 0.5,
        seed: Seed = 0,
    ) -> Source:
        files, names, people, views = _list_archive(data_dir, *namings)
        roles = _roles(people, views, test_identities, seed)
        return reid_source(files, Listing(names, people, views, roles), image_size)

    open_archive.__doc__ = f"""{doc}

    Args:
      data_dir: folder with one .zip, or of the unpacked archive.
      image_size: side or (H, W), to which images are resized; None takes the first
        image's.
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
    train_shots: Literal["single_shot", "multi_shot"] = "single_shot",
    image_size: ImageSize | None = IMAGE_SIZE,
    test_identities: int | float = 0.5,
    seed: Seed = 0,
) -> Source:
    """PRID 2011 (Hirzer et al., SCIA 2011): <shots>/cam_a/person_0001.png.

    The first 200 people are seen by both cameras, and some of them are tested, on
    single shots. The same higher number is another person in each: those of camera a
    are trained on, those of camera b are in the gallery.

    Args:
      train_shots: of training images: "multi_shot" with cam_a/person_0001/0001.png.
      data_dir, image_size, test_identities, seed: see `viper`.
    """
    shots = {"single_shot", train_shots}
    below = r"cam_(?P<view>[ab])/person_(?P<person>\d+)[/.].+"
    pattern = rf"(?:.*/)?(?:{'|'.join(shots)})/{below}"
    example = "prid_2011/single_shot/cam_a/person_0001.png"
    named = Names(pattern, example, first_or_second)
    files, names, people, views = _list_archive(data_dir, named)
    folders = np.array([name.split("/cam_")[0].split("/")[-1] for name in names])
    if missing := shots - {*folders.tolist()}:
        raise ValueError(
            f"{files.path} must have images below {' and '.join(sorted(shots))}, got "
            f"none below {missing.pop()}/. Copy that folder, or choose other shots."
        )
    is_shared = people.astype(int) <= SHARED
    sides = np.where(views == 1, "a-", "b-")
    people = np.where(is_shared, people, np.char.add(sides, people))
    roles = _roles(people, views, test_identities, seed, people[~is_shared].tolist())
    roles = np.where(~is_shared & (views == 2), GALLERY, roles)
    is_used = folders == np.where(roles == TRAIN, train_shots, "single_shot")
    rows = np.flatnonzero(is_used)
    names = [names[row] for row in rows]
    listing = Listing(names, people[rows], views[rows], roles[rows])
    return reid_source(files, listing, image_size)


def _list_archive(data_dir, *namings: Names):
    """(files, names, people [T] str, views [T] int) by the first fitting naming."""
    files = open_files(archive_in(data_dir))
    for naming in namings:
        matches = filter(None, map(re.compile(naming.pattern).fullmatch, files.names))
        rows = [(m.string, m["person"], naming.camera_of(m["view"])) for m in matches]
        if rows:
            names, people, views = zip(*rows, strict=True)
            return files, names, np.array(people), np.array(views)
    examples = " or ".join(naming.example for naming in namings)
    raise ValueError(
        f"{files.path} must have images named like {examples}, got {files.names[0]}. "
        "Check the path."
    )


def _roles(people, views, test_identities, seed, excluded=()) -> np.ndarray:
    """Roles [T]: images of a test person's first half of views are queries."""
    candidates = {*people.tolist()} - {*excluded}
    roles = np.full(len(people), TRAIN)
    for person in tested_identities(candidates, test_identities, seed):
        is_person = people == person
        own_views = np.unique(views[is_person])
        is_query = np.isin(views, own_views[: len(own_views) // 2])
        roles[is_person] = np.where(is_query, QUERY, GALLERY)[is_person]
    return roles
