"""Sets for re-identification: who is on an image, which camera saw it, what it is for.

Every image has a role: TRAIN, QUERY or GALLERY. The identity named NOBODY is no person
(a bad detection): it is never trained on and never a query, and what it shows is left
out of galleries when they are judged. Cameras have the set's own numbers.
"""

import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.files import Files, natural_key
from fedfr_jax.data.sources.images import decode, parse_size, prepared, reader
from fedfr_jax.data.sources.stored import stored_files
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Preprocessing, Source

NOBODY = "-1"
IMAGE_SIZE = (256, 128)  # of FedReID and most others


class Listing(NamedTuple):
    """What is known of T images before one is read."""

    names: Sequence[str]  # of `Files`
    identities: Sequence[str]
    cameras: Sequence[int]
    roles: Sequence[int]


def reid_source(
    files: Files,
    listing: Listing,
    image_size: int | tuple[int, int] | None,
    path: str | os.PathLike,
) -> Source:
    """The source of a listing's images in colour.

    Args:
      image_size: side or (H, W), to which images are resized (bicubic); None takes
        images of one size as they are.
      path: what to call the set in an error.

    Raises:
      ValueError: without an image; (when read) for an unreadable image, or one of
        another size where none is asked for.
    """
    if not len(listing.names):
        raise ValueError(f"{path} must hold images of the set, got none.")
    names = sorted(set(listing.identities), key=natural_key)
    number = {name: i for i, name in enumerate(names)}
    roles = np.array(listing.roles, np.uint8)
    labels = np.array([number[name] for name in listing.identities], np.int32)
    is_nobody = labels == number.get(NOBODY, -1)
    first = listing.names[0]
    how = Preprocessing(resize="stretch", kernel="bicubic")
    size = parse_size(image_size) if image_size else _size_of(_opened(files, first))

    def load(row):
        name = listing.names[row]
        image = _opened(files, name)
        if not image_size and _size_of(image) != size:
            raise ValueError(
                f"{files.origin(name)} must have the first image's size {size}, got "
                f"{_size_of(image)}: set image_size, to which images are resized."
            )
        return prepared(image, size, how)

    return Source(
        read=reader(load, len(labels), (*size, 3)),
        labels=labels,
        names=tuple(names),
        image_shape=(*size, 3),
        cameras=np.array(listing.cameras, np.int32),
        roles=np.where(is_nobody, GALLERY, roles).astype(np.uint8),
        passed_over=files.passed_over(listing.names),
        preprocessing=how,
        stored=stored_files(files, listing.names),
    )


def _opened(files, name):
    return decode(files.read(name), files.origin(name), 3)


def _size_of(image):
    """(H, W)."""
    return image.height, image.width


def check_disjoint(
    listing: Listing, files: Files, *, strangers: Collection[str | None] = ()
) -> None:
    """Raise ValueError, naming a file, when somebody is trained on and tested.

    Args:
      strangers: names in the gallery that are nobody to be found, whoever else has
        them.
    """
    roles, people = np.array(listing.roles), np.array(listing.identities)
    is_nobody = np.isin(people, [NOBODY, *filter(None, strangers)])
    tested = people[(roles != TRAIN) & ~is_nobody]
    is_both = (roles == TRAIN) & np.isin(people, tested)
    if is_both.any():
        row = int(np.argmax(is_both))
        raise ValueError(
            "people to train on must be others than those to be tested, got "
            f"{people[row]} of {files.origin(listing.names[row])} in both: give two "
            "people two names (market1501 does with separate_ids)."
        )


def held_out_roles(
    identities: Sequence[str],
    cameras: Sequence[int],
    num_test: int | float | None,
    seed: int | None,
    strangers: Collection[str | None],
) -> np.ndarray:
    """Roles [T] for a set without any, whose images are in the order of their names.

    Of the people to be tested, the first image of each by each camera is a query and
    the others are the gallery.

    Args:
      num_test: people to be tested, a number or a share in (0, 1); None for nobody.
      seed: draws them; None takes the last by name.
      strangers: identities that are no people to be tested.

    Raises:
      ValueError: when nobody is left to train on, or to be tested.
    """
    roles = np.full(len(identities), TRAIN, np.uint8)
    if num_test is None:
        return roles
    names, number = np.unique(np.array(identities), return_inverse=True)
    tested = tested_people(set(names.tolist()) - set(strangers), num_test, seed)
    is_tested = np.isin(names, tested)[number]
    seen = number * (max(cameras) + 1) + np.array(cameras)
    is_first = np.isin(np.arange(len(seen)), np.unique(seen, return_index=True)[1])
    return np.where(is_tested, np.where(is_first, QUERY, GALLERY), roles)


def tested_people(
    people: Collection[str], num_test: int | float, seed: int | None
) -> list[str]:
    """Who is tested, see `held_out_roles`."""
    known = sorted(people, key=natural_key)
    count = round(num_test * len(known)) if isinstance(num_test, float) else num_test
    if not 0 < count < len(known):
        raise ValueError(
            f"test_identities must leave some of {len(known)} people to train on and "
            f"some to be tested, got {num_test}."
        )
    if seed is not None:
        known = np.random.default_rng(seed).permutation(known).tolist()
    return known[-count:]
