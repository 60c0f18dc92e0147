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
from fedfr_jax.data.sources.listed_images import listed_reader
from fedfr_jax.data.sources.stored import stored_images
from fedfr_jax.schema import checked
from fedfr_jax.types import IGNORE_INDEX, Masks, Preprocessing, Source

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
    classes: Sequence[str] | Mapping[str, int],
    first_number: int,
    ignored: Sequence[int],
) -> MaskEncoding:
    """Pixel values of the classes: first, first + 1, ... or those of a mapping."""
    names = list(classes)
    numbers = list(range(first_number, first_number + len(names)))
    if isinstance(classes, Mapping):
        if first_number:
            raise ValueError(
                "first_class must be 0 if classes is a mapping to numbers "
                f"({classes}), got {first_number}."
            )
        numbers = [classes[name] for name in names]
        order = sorted(range(len(names)), key=lambda i: numbers[i])
        names, numbers = ([x[i] for i in order] for x in (names, numbers))
    if not 0 < len(set(names)) == len(names) <= IGNORE_INDEX:
        raise ValueError(
            f"classes must have 1 to {IGNORE_INDEX} different names, got {names}."
        )
    if len({*numbers}) < len(numbers) or max(numbers) > 255:
        raise ValueError(
            f"classes must have different numbers in [0, 255], got {_preview(numbers)}."
        )
    if shared := sorted({*ignored} & {*numbers}):
        raise ValueError(
            f"ignore_values must not be numbers of classes ({_preview(numbers)}), got "
            f"{shared[0]}."
        )
    return MaskEncoding(tuple(names), tuple(numbers), tuple(ignored))


def _preview(numbers: Sequence[int]) -> str:
    """Format numbers for an error; a range by its ends."""
    low, high = numbers[0], numbers[-1]
    is_range = list(numbers) == list(range(low, high + 1))
    return f"{low} to {high}" if is_range else str(list(numbers))


def read_mask(
    data: bytes,
    origin: str,
    encoding: MaskEncoding,
    size: tuple[int, int],
    image_size: tuple,
) -> np.ndarray:
    """Read a mask file as classes uint8 at (H, W), by nearest-neighbor resizing.

    Args:
      data: the file's bytes.
      origin: what to call the mask in an error.
      size: (H, W) of the result.
      image_size: (H, W) of the image that the mask belongs to.
    """
    numbers = _numbers(data, origin)
    if numbers.shape != image_size:
        raise ValueError(
            f"{origin} must have its image's size {image_size}, got {numbers.shape}."
        )
    classes = encoding.table[numbers]
    if classes.min() < 0:
        raise ValueError(
            f"{origin} must have pixel values {_preview(encoding.numbers)} or "
            f"ignore_values {list(encoding.ignored)}, got {numbers[classes < 0][0]}. "
            'Give the classes numbers, as in classes={"background": 0, "object": '
            "255}, or add the value to ignore_values."
        )
    picture = Image.fromarray(classes.astype(np.uint8))
    return np.asarray(picture.resize(size[::-1], Image.Resampling.NEAREST))


def _numbers(data, origin):
    """Stored pixel values, uint8 [h, w]."""
    with error_context(origin, "a whole mask"):
        image = apply_orientation(data, origin)
        stored = np.asarray(image)
    if image.mode not in MODES:
        raise ValueError(
            f"{origin} must have one byte per pixel (modes {MODES}), got mode "
            f"{image.mode}."
        )
    return stored.astype(np.uint8)


def check_classes_occur(
    counts: np.ndarray, pixels: int, encoding: MaskEncoding, path
) -> None:
    """Raise ValueError for a class without any pixel, whose IoU would be meaningless.

    Args:
      counts: [T, M] of `class_counts`.
      pixels: of all masks.
      path: what to call the set.
    """
    missing = np.flatnonzero(counts.sum(axis=0) == 0)
    if not len(missing):
        return
    unused = [(encoding.class_names[i], encoding.numbers[i]) for i in missing]
    share = 1 - counts.sum() / pixels
    raise ValueError(
        f"classes must each have pixels in the masks of {path}, got none of "
        f"{', '.join(f'{name} (number {number})' for name, number in unused)}, while "
        f"{share:.1%} of all pixels are ignored ({list(encoding.ignored)}). Remove it "
        "from classes; or, if masks have it under an ignored value, set for example "
        'classes={"background": 0, "object": 255}, ignore_values=[].'
    )


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
    return labels.astype(np.int32), tuple(names[i] for i in label_classes)


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
    first_class: Byte = 0,
    ignore_values: Sequence[Byte] = (IGNORE_INDEX,),
    labels: Labels = "largest",
    background: Sequence[str] = (),
) -> Source:
    """Open a directory or .zip of images, each with a mask of one byte per pixel.

    All masks are read once on opening, so that errors in them are raised then.

    Args:
      path: the directory or archive.
      classes: M names of the pixel values first_class, first_class + 1, ..., or names
        with their values, such as {"background": 0, "object": 255} with
        ignore_values=().
      image_size: side or (H, W) in pixels; images are stretched to it, masks take the
        nearest pixel. None is the size of the first image.
      images, masks: see above; the default is images/<name> and masks/<name>, the test
        part below images/test/ and masks/test/.
      first_class: pixel value of the first class.
      ignore_values: values of pixels that belong to no class.
      labels: label of an image as a whole, for partitions: "largest", the class of most
        of its pixels (see `largest_classes`), or "identity", the pattern's group.
      background: classes that count only in images without any other class.
    """
    encoding = build_encoding(classes, first_class, ignore_values)
    files = open_files(path)
    matches = _match_masks(files, images, "images", path)
    pairs = _match_masks(files, masks, "masks", path)
    used = {match.string for match in (*matches.values(), *pairs.values())}
    for pair, match in matches.items():
        if pair not in pairs:
            raise ValueError(
                f"{files.origin(match.string)} must have a mask, got none. Add one or "
                "remove the image from the set."
            )
    names = [match.string for match in matches.values()]
    mask_names = [pairs[pair].string for pair in matches]
    size = parse_size(image_size or files.image_size(names[0]))
    shape, preprocessing = (*size, channels), Preprocessing(resize="stretch")
    read_masks = _mask_reader(files, names, mask_names, encoding, size)
    image_matches = list(matches.values())
    test_groups = [match.groupdict().get("test") for match in image_matches]
    is_test = np.array([group is not None for group in test_groups])
    counts = class_counts(read_masks, len(names), len(encoding.class_names))
    check_classes_occur(counts, len(names) * size[0] * size[1], encoding, path)
    if labels == "largest":
        image_labels, label_names = largest_classes(
            counts, encoding.class_names, is_test, background
        )
    else:
        image_labels, label_names = _identities(image_matches, images)
    return Source(
        read=listed_reader(files, names, shape, preprocessing),
        labels=image_labels,
        names=label_names,
        input_shape=shape,
        is_test=is_test if is_test.any() else None,
        masks=Masks(read_masks, encoding.class_names),
        passed_over=files.passed_over(used),
        preprocessing=preprocessing,
        stored=_with_masks(files, names, mask_names),
    )


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
    one_of = lambda parts: "|".join(map(re.escape, parts))
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
    colored = source.masks._replace(class_colors=tuple(CAMVID.values()))
    return source._replace(masks=colored)


def _match_masks(files: Files, pattern: str, key: str, path) -> dict[str, re.Match]:
    """Match files against a pattern: {pair: match}."""
    compiled = re.compile(pattern)
    if "pair" not in compiled.groupindex:
        raise ValueError(
            f"{key} must be a regular expression with a group `pair`, got {pattern}."
        )
    matches = {}
    for match in filter(None, map(compiled.fullmatch, files.names)):
        other = matches.setdefault(match["pair"], match)
        if other is not match:
            raise ValueError(
                f"{path} must have one file of {key} for {match['pair']}, got "
                f"{other.string} and {match.string}."
            )
    if not matches:
        raise ValueError(
            f"{path} must have files that match {key} = {pattern}, got none (it has "
            f"{files.names[0]})."
        )
    return matches


def _mask_reader(files, names, mask_names, encoding: MaskEncoding, size):
    """`Masks.read` of the masks of the named images."""

    def load(row):
        image, mask = names[row], mask_names[row]
        origin, image_size = files.origin(mask), files.image_size(image)
        return read_mask(files.read(mask), origin, encoding, size, image_size)

    return reader(load, len(names), size)


def _with_masks(files, names, mask_names):
    """Stored images whose contents include their masks."""
    size = lambda row: files.size(names[row]) + files.size(mask_names[row])
    read = lambda row: files.read(names[row]) + files.read(mask_names[row])
    return stored_images(names, size, read)


def _identities(matches, pattern):
    """Labels [T] int32 and names from the pattern's group `identity`."""
    if "identity" not in re.compile(pattern).groupindex:
        raise ValueError(
            "labels must be 'largest' if the pattern images has no group `identity`, "
            "got 'identity'."
        )
    identities = [match["identity"] for match in matches]
    names, number = np.unique(identities, return_inverse=True)
    return number.astype(np.int32), tuple(names.tolist())
