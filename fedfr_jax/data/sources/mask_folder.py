"""Folders and zips of images with masks, for segmentation.

An image and its mask are told by two regular expressions over the relative path, each
with a group `pair` that is the same in both. That of the images may have a group
`identity` (of the image as a whole) and a group `test`, which takes part in the match
for images of the set's own test part only. Other files are passed over.
"""

import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from fedfr_jax.data.sources.files import Files, open_files
from fedfr_jax.data.sources.folder import archive_in
from fedfr_jax.data.sources.images import (
    check_channels,
    parse_size,
    reader,
    size_of,
)
from fedfr_jax.data.sources.loose import picture_reader
from fedfr_jax.data.sources.masks import (
    Stored,
    check_occur,
    class_counts,
    largest_classes,
    read_mask,
    stored_as,
)
from fedfr_jax.data.sources.stored import stored_images
from fedfr_jax.schema import check_choice
from fedfr_jax.types import VOID, Masks, Preprocessing, Source

# images/[test/]<anything>.jpg and masks/[test/]<the same>.png
IMAGES = r"(?:.*/)?images/(?P<pair>(?P<test>test/)?.+)\.[^./]+"
MASKS = r"(?:.*/)?masks/(?P<pair>.+)\.[^./]+"
LABELS = ("largest", "identity")
CAMVID = {  # name: colour, as the authors of SegNet draw them; 11 is void
    "Sky": (128, 128, 128),
    "Building": (128, 0, 0),
    "Pole": (192, 192, 128),
    "Road": (128, 64, 128),
    "Pavement": (60, 40, 222),
    "Tree": (128, 128, 0),
    "SignSymbol": (192, 128, 128),
    "Fence": (64, 64, 128),
    "Car": (64, 0, 128),
    "Pedestrian": (64, 64, 0),
    "Bicyclist": (0, 128, 192),
}


def image_masks(
    path: str | os.PathLike,
    *,
    classes: Sequence[str] | Mapping[str, int],
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    images: str = IMAGES,
    masks: str = MASKS,
    first: int = 0,
    void: Sequence[int] = (VOID,),
    labels: str = "largest",
    background: Sequence[str] = (),
) -> Source:
    """A directory or .zip of images, each with a mask of one byte per pixel.

    Masks are read as it is opened, once, so that one that does not fit is found then.

    Args:
      path: the directory or archive.
      classes: M names of what the numbers first, first + 1, ... in a mask stand for, or
        names with their numbers, such as {"background": 0, "object": 255} with void=().
      image_size: side or (H, W) in pixels; images are stretched to it, masks take the
        nearest pixel. None is the size of the first image.
      channels: 1 for grey, 3 for colour.
      images, masks: see above; the default is images/<name> and masks/<name>, the test
        part below images/test/ and masks/test/.
      first: number of the first class.
      void: numbers of pixels that belong to no class.
      labels: what an image as a whole is labelled with, for partitions: "largest", the
        class of most of its pixels (see `largest_classes`), or "identity", the group.
      background: classes that are the largest only where there is no other.

    Raises:
      ValueError: naming the file, for an image without a mask, a mask of another size
        or with a number that stands for nothing, or one name twice; for a class that
        no mask has.
    """
    check_choice("labels", labels, LABELS)
    stored, channels = stored_as(classes, first, void), check_channels(channels)
    files = open_files(path)
    matches = _pairs_of(files, images, "images", path)
    pairs = _pairs_of(files, masks, "masks", path)
    used = {match.string for match in (*matches.values(), *pairs.values())}
    for pair, match in matches.items():
        if pair not in pairs:
            raise ValueError(
                f"{files.origin(match.string)} must have a mask, got none: add one or "
                "take the image out of the set."
            )
    names = [match.string for match in matches.values()]
    mask_names = [pairs[pair].string for pair in matches]
    size = _first_size(files, names) if image_size is None else parse_size(image_size)
    shape, how = (*size, channels), Preprocessing(resize="stretch")
    read_masks = _mask_reader(files, names, mask_names, stored, size)
    found = list(matches.values())
    is_test = np.array([match.groupdict().get("test") is not None for match in found])
    counts = class_counts(read_masks, len(names), len(stored.names))
    check_occur(counts, len(names) * size[0] * size[1], stored, path)
    if labels == "largest":
        number, words = largest_classes(counts, stored.names, is_test, background)
    else:
        number, words = _identities(found, images)
    return Source(
        read=picture_reader(files, names, shape, how),
        labels=number,
        names=words,
        image_shape=shape,
        is_test=is_test if is_test.any() else None,
        masks=Masks(read_masks, stored.names),
        passed_over=files.passed_over(used),
        preprocessing=how,
        stored=_with_masks(files, names, mask_names),
    )


def camvid(
    data_dir: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    train: Sequence[str] = ("train",),
    test: Sequence[str] = ("test",),
    labels: str = "largest",
    background: Sequence[str] = (),
) -> Source:
    """CamVid in SegNet's split: {train,val,test}/X and {train,val,test}annot/X.

    Brostow, Fauqueur, Cipolla, "Semantic object classes in video", PRL 2009;
    Badrinarayanan, Kendall, Cipolla, "SegNet", arXiv:1511.00561. Identities are the
    video sequences, the names before "_".

    Args:
      data_dir: folder with one .zip, or the folders themselves.
      image_size: side or (H, W); None keeps the stored size.
      train, test: folders of the training and of the test part.
      labels, background: see `image_masks`.
    """
    one_of = lambda parts: "|".join(map(re.escape, parts))
    source = image_masks(
        archive_in(data_dir),
        classes=tuple(CAMVID),
        image_size=image_size,
        images=rf"(?:.*/)?(?:{one_of(train)}|(?P<test>{one_of(test)}))"
        r"/(?P<pair>(?P<identity>[^/_]+)[^/]*)\.[^./]+",
        masks=rf"(?:.*/)?(?:{one_of([*train, *test])})annot/(?P<pair>[^/]+)\.[^./]+",
        void=(len(CAMVID),),
        labels=labels,
        background=background,
    )
    coloured = source.masks._replace(colours=tuple(CAMVID.values()))
    return source._replace(masks=coloured)


def _pairs_of(files: Files, pattern: str, key: str, path) -> dict[str, re.Match]:
    """{pair: match} of the files that match."""
    compiled = re.compile(pattern)
    if "pair" not in compiled.groupindex:
        raise ValueError(
            f"{key} must be a regular expression with a group `pair`, got {pattern}."
        )
    found = {}
    for match in filter(None, map(compiled.fullmatch, files.names)):
        other = found.setdefault(match["pair"], match)
        if other is not match:
            raise ValueError(
                f"{path} must hold one file of the {key} for {match['pair']}, got "
                f"{other.string} and {match.string}."
            )
    if not found:
        raise ValueError(
            f"{path} must hold files named as {key} = {pattern}, got none (it holds "
            f"{files.names[0]})."
        )
    return found


def _first_size(files, names):
    return size_of(files.read(names[0]), files.origin(names[0]))


def _mask_reader(files, names, mask_names, stored: Stored, size):
    """`Masks.read` of the masks of the named images."""

    def load(row):
        image, mask = names[row], mask_names[row]
        wanted = size_of(files.read(image), files.origin(image))
        origin = files.origin(mask)
        return read_mask(files.read(mask), origin, stored, size, wanted)

    return reader(load, len(names), size)


def _with_masks(files, names, mask_names):
    """The images as they are stored, whose contents include their masks."""

    def both(of):
        return lambda row: of(names[row]) + of(mask_names[row])

    return stored_images(names, both(files.size), both(files.read))


def _identities(matches, pattern):
    """Numbers [T] int32 and names of the group `identity`."""
    if "identity" not in re.compile(pattern).groupindex:
        raise ValueError(
            "labels must be largest where images have no group `identity`, got "
            "'identity'."
        )
    words = [match["identity"] for match in matches]
    names, number = np.unique(words, return_inverse=True)
    return number.astype(np.int32), tuple(names.tolist())
