"""Re-identification data sets: by file names, or with lists.

Every image has a role: TRAIN, QUERY or GALLERY. The identity DISTRACTOR stands for
detections without a person: such images are in the gallery only, as junk. Cameras have
the numbers of the data set.

Market-1501 (Zheng et al., ICCV 2015), DukeMTMC-reID (Zheng et al., ICCV 2017), CUHK03
in its new protocol (Zhong et al., arXiv:1701.08398), and MSMT17 where its files are
renamed likewise, have names such as 0002_c1s1_03.jpg. For a set without folders
`held_out_roles` chooses the test part. Lists are a csv of our format (`reid_csv`) and
MSMT17's files.
"""

import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.decoding import ImageSize, parse_size
from fedfr_jax.data.sources.folder import archive_in
from fedfr_jax.data.sources.image_files import Files, natural_key, open_files
from fedfr_jax.data.sources.listed_images import listed_reader
from fedfr_jax.data.sources.stored import stored_files
from fedfr_jax.files import read_csv, read_list
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Preprocessing, Source

DISTRACTOR = "-1"
IMAGE_SIZE = (256, 128)  # of FedReID and most others


class Listing(NamedTuple):
    """Identities, cameras and roles of T images, before any is read."""

    names: Sequence[str]  # of `Files`
    identities: Sequence[str]
    cameras: Sequence[int]
    roles: Sequence[int]


def reid_source(
    files: Files,
    listing: Listing,
    image_size: ImageSize | None,
    path: str | os.PathLike,
) -> Source:
    """Build the source of a listing's images, in color.

    Args:
      image_size: side or (H, W), to which images are resized (bicubic); None takes
        images of one size as they are.
      path: what to call the set in an error.
    """
    if not len(listing.names):
        raise ValueError(f"{path} must have images of the set, got none.")
    names = sorted(set(listing.identities), key=natural_key)
    label_of = {name: i for i, name in enumerate(names)}
    roles = np.array(listing.roles, np.uint8)
    labels = np.array([label_of[name] for name in listing.identities], np.int32)
    is_distractor = labels == label_of.get(DISTRACTOR, -1)
    preprocessing = Preprocessing(resize="stretch", kernel="bicubic")
    stored = None if image_size else files.image_size(listing.names[0])
    shape = (*parse_size(image_size or stored), 3)
    return Source(
        read=listed_reader(
            files, listing.names, shape, preprocessing, stored_size=stored
        ),
        labels=labels,
        names=tuple(names),
        input_shape=shape,
        cameras=np.array(listing.cameras, np.int32),
        roles=np.where(is_distractor, GALLERY, roles).astype(np.uint8),
        passed_over=files.passed_over(listing.names),
        preprocessing=preprocessing,
        stored=stored_files(files, listing.names),
    )


def check_disjoint(
    listing: Listing, files: Files, *, strangers: Collection[str | None] = ()
) -> None:
    """Raise ValueError if an identity is in both training and test.

    Args:
      strangers: names in the gallery without a query.
    """
    roles, people = np.array(listing.roles), np.array(listing.identities)
    is_distractor = np.isin(people, [DISTRACTOR, *filter(None, strangers)])
    tested = people[(roles != TRAIN) & ~is_distractor]
    is_both = (roles == TRAIN) & np.isin(people, tested)
    if is_both.any():
        row = int(np.argmax(is_both))
        raise ValueError(
            "training and test identities must be disjoint, got "
            f"{people[row]} of {files.origin(listing.names[row])} in both. Give "
            "different people different names (market1501: separate_ids=True)."
        )


def held_out_roles(
    identities: Sequence[str],
    cameras: Sequence[int],
    num_test: int | float | None,
    seed: int | None,
    strangers: Collection[str | None],
) -> np.ndarray:
    """Choose roles [T] for a set without test part, its images in the order of names.

    A test identity's first image of each camera is a query, its other images are the
    gallery.

    Args:
      num_test: test identities, a number or a share in (0, 1); None for none.
      seed: of their choice; None takes the last by name.
      strangers: identities that are never tested.
    """
    roles = np.full(len(identities), TRAIN, np.uint8)
    if num_test is None:
        return roles
    names, number = np.unique(np.array(identities), return_inverse=True)
    tested = tested_identities(set(names.tolist()) - set(strangers), num_test, seed)
    is_tested = np.isin(names, tested)[number]
    person_camera = number * (max(cameras) + 1) + np.array(cameras)
    _, first_rows = np.unique(person_camera, return_index=True)
    is_first = np.isin(np.arange(len(roles)), first_rows)
    return np.where(is_tested, np.where(is_first, QUERY, GALLERY), roles)


def tested_identities(
    people: Collection[str], num_test: int | float, seed: int | None
) -> list[str]:
    """Choose the test identities; see `held_out_roles`."""
    candidates = sorted(people, key=natural_key)
    count = num_test
    if isinstance(num_test, float):
        count = round(num_test * len(candidates))
    if not 0 < count < len(candidates):
        raise ValueError(
            f"test_identities must leave at least one of {len(candidates)} people for "
            f"training and one for test, got {num_test}."
        )
    if seed is not None:
        candidates = np.random.default_rng(seed).permutation(candidates).tolist()
    return candidates[-count:]


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
    image_size: ImageSize | None = IMAGE_SIZE,
    subfolder: str = "",
    folders: Mapping[str, str] | None = None,
    test_identities: int | float | None = None,
    seed: int | None = None,
    distractor_identity: str | None = "0000",
    separate_ids: bool = False,
) -> Source:
    """Images named <person>_c<camera>..., in three folders or in one.

    Args:
      path: a directory or .zip. Where one of `folders` is in it, other folders are
        passed over; where none is, all images are one set.
      image_size: side or (H, W), to which images are resized; None takes images of
        one size as they are.
      subfolder: only files below this sub-folder.
      folders: {"train", "query", "gallery": names of folders}, FOLDERS by default.
      test_identities: of a set without those folders, how many identities are tested
        (see `reid.held_out_roles`), a number or a share in (0, 1); None trains on all.
      seed: of their choice; None takes the last by name.
      distractor_identity: identity of gallery images of strangers, if it has no query;
        in training, in queries and in a set of one folder it is a person. None if it is
        a person in the gallery too, as in MSMT17.
      separate_ids: True if training and test identities are both numbered from 0, as in
        MSMT17: their names become train-0000 and test-0000.
    """
    files = open_files(path, under=subfolder)
    names, roles = _by_folder(files.names, {**FOLDERS, **(folders or {})})
    people, cameras = zip(*(_parse_name(name, path) for name in names), strict=True)
    if roles is None:
        roles = held_out_roles(people, cameras, test_identities, seed, {DISTRACTOR})
    elif test_identities is not None:
        raise ValueError(
            f"test_identities must be None for {path}, whose folders give the test "
            f"part, got {test_identities}."
        )
    if separate_ids:
        people = list(map(_split_identity, people, roles))
    listing = Listing(names, people, cameras, roles)
    queried = {
        person for person, role in zip(people, roles, strict=True) if role == QUERY
    }
    check_disjoint(listing, files, strangers={distractor_identity} - queried)
    return reid_source(files, listing, image_size, path)


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


def _by_folder(names, folders):
    """(names in `folders`, their roles); (all names, None) if no folder exists."""
    if sorted(folders) != sorted(FOLDERS):
        raise ValueError(
            f"folders must have the keys {sorted(FOLDERS)}, got {sorted(folders)}."
        )
    role_of = {word: ROLES[part] for part, word in folders.items()}
    matches = []
    for name in names:
        parts = [part for part in name.split("/")[:-1] if part in role_of]
        matches += [(name, role_of[part]) for part in parts[:1]]
    return zip(*matches, strict=True) if matches else (names, None)


def _parse_name(name, path):
    """Parse (person, camera) of a file name."""
    match = NAME.fullmatch(name.split("/")[-1])
    if match is None:
        raise ValueError(
            f"{name} in {path} must be named <person>_c<camera>..., as 0002_c1s1_03.jpg"
            ", got no person or no camera in the name."
        )
    return match["identity"], int(match["camera"])


def _split_identity(person, role):
    """Prefix an identity by its role, so that training and test share none."""
    if person == DISTRACTOR:
        return person
    return f"{'train' if role == TRAIN else 'test'}-{person}"


COLUMNS = ("file", "identity", "camera", "split")
SPLITS = {"train": TRAIN, "query": QUERY, "gallery": GALLERY}
MSMT17_LISTS = {"train": TRAIN, "val": TRAIN, "query": QUERY, "gallery": GALLERY}


class ListEntry(NamedTuple):
    """One line of an image list."""

    location: str  # in which file and line
    file: str
    identity: str
    camera: int
    role: int


def reid_csv(
    path: str | os.PathLike,
    *,
    images: str | os.PathLike | None = None,
    image_size: ImageSize | None = IMAGE_SIZE,
) -> Source:
    """Open the images that a csv lists, in its order.

    Args:
      path: csv with the columns of COLUMNS: a file's path below `images`, a name, a
        whole number of at least 0, and train, query or gallery. The identity -1 is a
        distractor.
      images: directory or .zip; None is the csv's folder.
      image_size: side or (H, W), to which images are resized; None takes images of
        one size as they are.
    """
    listed = []
    for line, (file, person, camera, split) in read_csv(path, COLUMNS).items():
        location = f"{path}, line {line}"
        if not person:
            raise ValueError(
                f"{location}: identity must be a name, or -1 for a distractor, got an "
                "empty cell."
            )
        if not camera.isdecimal() or split not in SPLITS:
            raise ValueError(
                f"{location}: camera must be an integer and split one of "
                f"{', '.join(SPLITS)}, got {camera!r} and {split!r}."
            )
        listed.append(ListEntry(location, file, person, int(camera), SPLITS[split]))
    folder = images or pathlib.Path(path).parent
    return _as_listing(listed, open_files(folder), image_size, path)


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
    listed = []
    for part, role in MSMT17_LISTS.items():
        path = pathlib.Path(data_dir, f"list_{part}.txt")
        kind, folder = ("train", folders[0]) if role == TRAIN else ("test", folders[1])
        for number, line in enumerate(read_list(path).splitlines(), 1):
            location = f"{path}, line {number}"
            name, camera, person = _parse(line, location)
            file, person = f"{folder}/{name}", f"{kind}-{person}"
            listed.append(ListEntry(location, file, person, camera, role))
    return _as_listing(listed, open_files(archive_in(data_dir)), image_size, data_dir)


def _parse(line, location):
    """Parse (path, camera, person) of a line of MSMT17's lists."""
    try:
        name, person = line.split()
        return name, int(name.split("/")[-1].split("_")[2]), int(person)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{location} must be <path> <number> with the camera as the third word of "
            f"the file's name, as 0000/0000_000_01_a.jpg 0, got {line!r}."
        ) from error


def _as_listing(lines: list[ListEntry], files: Files, image_size, path) -> Source:
    """Build the source of listed images, after checks that they exist."""
    existing, first_locations = set(files.names), {}
    missing = [line for line in lines if line.file not in existing]
    if missing:
        raise ValueError(
            f"{path} must list existing images, got {len(missing)} of {len(lines)} "
            f"missing, the first {missing[0].file} ({missing[0].location}). Copy them "
            "or remove their lines."
        )
    for line in lines:
        if not 0 <= line.camera < 2**31:
            raise ValueError(
                f"{line.location}: camera must be in [0, 2^31), got {line.camera}."
            )
        first_location = first_locations.setdefault(line.file, line.location)
        if first_location != line.location:
            raise ValueError(
                f"{line.location}: an image must be listed once, got {line.file}, also "
                f"in {first_location}."
            )
    listing = Listing(
        names=[line.file for line in lines],
        identities=[line.identity for line in lines],
        cameras=[line.camera for line in lines],
        roles=[line.role for line in lines],
    )
    check_disjoint(listing, files)
    return reid_source(files, listing, image_size, path)
