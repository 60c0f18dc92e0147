"""Segmentation masks, and folders or archives of images with masks.

Images and masks are matched by two regular expressions over the relative path, each
with a group `pair` that is the same in both. That of the images may have a group
`identity` (of the image as a whole) and a group `test`, which takes part in the match
for images of the set's own test part only. Other files are ignored.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Interval
from PIL import Image

from fedfr_jax.data.sources.decoding import (
    Channels,
    ImageSize,
    apply_orientation,
    error_context,
    parse_size,
    reader,
)
from fedfr_jax.data.sources.folder import archive_in
from fedfr_jax.data.sources.image_files import Files, open_files
from fedfr_jax.data.sources.index import index_files, number_identities, open_index
from fedfr_jax.data.sources.selection import check_unique, stored_images
from fedfr_jax.schema import checked
from fedfr_jax.types import IGNORE_INDEX, Masks, Source

MODES = ("1", "L", "P")  # of Pillow: a byte per pixel at most
BLOCK = 64  # masks that are counted at once


class MaskEncoding(NamedTuple):
    """Meaning of the pixel values in mask files."""

    class_names: tuple[str, ...]  # M classes
    numbers: tuple[int, ...]  # M, in the files
    ignored: tuple[int, ...] = (IGNORE_INDEX,)  # of pixels that belong to no class

    @property
    def table(self) -> np.ndarray:
        """Lookup table [256] int16: class, IGNORE_INDEX, or -1 for an unknown value."""
        table = np.full(256, -1, np.int16)
        table[list(self.ignored)] = IGNORE_INDEX
        table[list(self.numbers)] = np.arange(len(self.class_names))
        return table


def build_encoding(
    classes: Sequence[str] | Mapping[str, int], ignored: Sequence[int]
) -> MaskEncoding:
    """Pixel values of the classes: 0, 1, ... or those of a mapping."""
    number_of = {name: number for number, name in enumerate(classes)}
    if isinstance(classes, Mapping):
        number_of = dict(classes)
    names = sorted(number_of, key=number_of.__getitem__)
    numbers = [number_of[name] for name in names]
    if not names or len(names) < len(classes) or max(numbers) > 255:
        raise ValueError(
            f"classes must have different names and numbers in [0, 255], got {classes}."
        )
    if len({*numbers, *ignored}) < len(numbers) + len({*ignored}):
        raise ValueError(
            "classes and ignore_values must have different numbers, got "
            f"{numbers[0]} to {numbers[-1]} and {list(ignored)}."
        )
    return MaskEncoding(tuple(names), tuple(numbers), tuple(ignored))


def read_mask(
    data: bytes,
    origin: str,
    encoding: MaskEncoding,
    size: tuple[int, int],
    image_size: tuple[int, int],
) -> np.ndarray:
    """Read a mask file as classes uint8 at (H, W), by nearest-neighbor resizing.

    Args:
      data: the file's bytes.
      origin: what to call the mask in an error.
      size: (H, W) of the result.
      image_size: (H, W) of the image that the mask belongs to.
    """
    with error_context(origin, "a whole mask of one byte per pixel"):
        image = apply_orientation(data)
        if image.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {image.mode}")
        numbers = np.asarray(image).astype(np.uint8)
    if numbers.shape != image_size:
        raise ValueError(
            f"{origin} must have its image's size {image_size}, got {numbers.shape}."
        )
    classes = encoding.table[numbers]
    if classes.min() < 0:
        raise ValueError(
            f"{origin} must have pixel values {list(encoding.numbers)} or "
            f"ignore_values {list(encoding.ignored)}, got {numbers[classes < 0][0]}. "
            'Give the classes numbers, as in classes={"background": 0, "object": '
            "255}, or add the value to ignore_values."
        )
    picture, (height, width) = Image.fromarray(classes.astype(np.uint8)), size
    return np.asarray(picture.resize((width, height), Image.Resampling.NEAREST))


def largest_classes(
    counts: np.ndarray,
    names: Sequence[str],
    is_test: np.ndarray,
    background: Sequence[str] = (),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class of most pixels of each image, without ignored pixels and background.

    A partition by label needs training images of every label, so a test image gets the
    largest of the classes that are largest in a training image. An image whose pixels
    are all ignored gets the first class.

    Args:
      counts: [T, M] of `class_counts`.
      names: M names of the pixels' classes.
      is_test: [T] bool.
      background: classes that count only in images without any other class.

    Returns:
      labels [T] int32 in [0, L), and the names of the L classes that there are.
    """
    counts = counts.astype(np.float64)
    for name in background:
        if name not in names:
            raise ValueError(
                f"background must be names of classes ({', '.join(names)}), got {name}."
            )
        counts[:, names.index(name)] *= 1e-9  # less than one pixel of another
    label_classes = np.unique(counts[~is_test].argmax(axis=1))
    labels = counts[:, label_classes].argmax(axis=1)
    return labels.astype(np.int32), tuple(names[int(i)] for i in label_classes)


def class_counts(
    read: Callable[[np.ndarray], np.ndarray], num_images: int, num_classes: int
) -> np.ndarray:
    """Pixels of every class in each image, [T, M] int64, without ignored pixels."""
    count = functools.partial(np.bincount, minlength=IGNORE_INDEX + 1)
    counts = [
        count(mask.ravel())[:num_classes]
        for start in range(0, num_images, BLOCK)
        for mask in read(np.arange(start, min(start + BLOCK, num_images)))
    ]
    return np.array(counts)


# images/[test/]<anything>.jpg and masks/[test/]<the same>.png
IMAGES = r"(?:.*/)?images/(?P<pair>(?P<test>test/)?.+)\.[^./]+"
MASKS = r"(?:.*/)?masks/(?P<pair>.+)\.[^./]+"
Labels = Literal["largest", "identity"]
Byte = Annotated[int, Interval(ge=0, le=255)]
CAMVID = {  # name: color, as the authors of SegNet draw them; 11 is void
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


@checked
def image_masks(
    path: str | os.PathLike,
    *,
    classes: Sequence[str] | Mapping[str, Byte],
    image_size: ImageSize | None = None,
    channels: Channels = 3,
    images: str = IMAGES,
    masks: str = MASKS,
    ignore_values: Sequence[Byte] = (IGNORE_INDEX,),
    labels: Labels = "largest",
    background: Sequence[str] = (),
) -> Source:
    """Open a directory or .zip of images, each with a mask of one byte per pixel.

    All masks are read once on opening, so that errors in them are raised then.

    Args:
      path: the directory or archive.
      classes: M names of the pixel values 0, 1, ..., or names with their values, such
        as {"background": 0, "object": 255} with ignore_values=().
      image_size: side or (H, W) in pixels; images are stretched to it, masks take the
        nearest pixel. None is the size of the first image.
      images, masks: see above; the default is images/<name> and masks/<name>, the test
        part below images/test/ and masks/test/.
      ignore_values: values of pixels that belong to no class.
      labels: label of an image as a whole, for partitions: "largest", the class of most
        of its pixels (see `largest_classes`), or "identity", the pattern's group.
      background: classes that count only in images without any other class.
    """
    encoding = build_encoding(classes, ignore_values)
    files = open_files(path)
    images_of = _match_pairs(files, images, "images")
    masks_of = _match_pairs(files, masks, "masks")
    if missing := [x for pair, x in images_of.items() if pair not in masks_of]:
        raise ValueError(
            f"{files.origin(missing[0].string)} must have a mask, got none. Add one or "
            "remove the image from the set."
        )
    names = [match.string for match in images_of.values()]
    mask_names = [masks_of[pair].string for pair in images_of]
    size = parse_size(image_size or files.image_size(names[0]))

    def load_mask(row):
        name, mask = names[row], mask_names[row]
        origin, stored_size = files.origin(mask), files.image_size(name)
        return read_mask(files.read(mask), origin, encoding, size, stored_size)

    read_masks = reader(load_mask, len(names), size)
    groups = [match.groupdict() for match in images_of.values()]
    is_test = np.array([group.get("test") is not None for group in groups])
    counts = class_counts(read_masks, len(names), len(encoding.class_names))
    if unused := np.flatnonzero(counts.sum(axis=0) == 0).tolist():
        raise ValueError(  # the IoU of such a class would be meaningless
            f"classes must each have pixels in the masks of {path}, got none of "
            f"{', '.join(encoding.class_names[i] for i in unused)}, while "
            f"{1 - counts.sum() / (len(names) * size[0] * size[1]):.1%} of all pixels "
            f"are ignored ({list(encoding.ignored)}). Remove it from classes; or, if "
            "masks have it under an ignored value, set for example "
            'classes={"background": 0, "object": 255}, ignore_values=[].'
        )
    if labels == "largest":
        named = largest_classes(counts, encoding.class_names, is_test, background)
    elif "identity" in groups[0]:
        named = number_identities([group["identity"] for group in groups])
    else:
        raise ValueError(
            "labels must be 'largest' if the pattern images has no group `identity`, "
            "got 'identity'."
        )
    image_labels, identities = named
    index = index_files(
        files,
        names,
        labels=image_labels,
        identities=identities,
        is_test=is_test if is_test.any() else None,
        masks=Masks(read_masks, encoding.class_names),
    )
    source = open_index(index, size, channels)
    stored = stored_images(
        names,
        size=lambda row: files.size(names[row]) + files.size(mask_names[row]),
        read=lambda row: files.read(names[row]) + files.read(mask_names[row]),
    )
    passed_over = files.passed_over([*names, *(x.string for x in masks_of.values())])
    return source._replace(stored=stored, passed_over=passed_over)


@checked
def camvid(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    train: Sequence[str] = ("train",),
    test: Sequence[str] = ("test",),
    labels: Labels = "largest",
    background: Sequence[str] = (),
) -> Source:
    """Open CamVid in SegNet's split: {train,val,test}/X and {train,val,test}annot/X.

    Brostow, Fauqueur, Cipolla, "Semantic object classes in video", PRL 2009;
    Badrinarayanan, Kendall, Cipolla, "SegNet", arXiv:1511.00561. Identities are the
    video sequences, the names before "_".

    Args:
      data_dir: folder with one .zip, or the folders themselves.
      image_size: side or (H, W); None keeps the stored size.
      train, test: folders of the training and of the test part.
      labels, background: see `image_masks`.
    """

    def one_of(parts):
        return "|".join(map(re.escape, parts))

    source = image_masks(
        archive_in(data_dir),
        classes=tuple(CAMVID),
        image_size=image_size,
        images=rf"(?:.*/)?(?:{one_of(train)}|(?P<test>{one_of(test)}))"
        r"/(?P<pair>(?P<identity>[^/_]+)[^/]*)\.[^./]+",
        masks=rf"(?:.*/)?(?:{one_of([*train, *test])})annot/(?P<pair>[^/]+)\.[^./]+",
        ignore_values=(len(CAMVID),),
        labels=labels,
        background=background,
    )
    colors = tuple(CAMVID.values())
    return source._replace(
        masks=source.masks and source.masks._replace(class_colors=colors)
    )


def _match_pairs(files: Files, pattern: str, key: str) -> dict[str, re.Match]:
    """Match files against a pattern: {pair: match}."""
    compiled = re.compile(pattern)
    if "pair" not in compiled.groupindex:
        raise ValueError(
            f"{key} must be a regular expression with a group `pair`, got {pattern}."
        )
    matches = list(filter(None, map(compiled.fullmatch, files.names)))
    if not matches:
        raise ValueError(
            f"{files.path} must have files that match {key} = {pattern}, got none (it "
            f"has {files.names[0]})."
        )
    by_pair = ((match["pair"], match) for match in matches)
    return check_unique(by_pair, f"pair of {key}", files.path)
