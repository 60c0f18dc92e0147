"""Image decoding: encoded images to uint8 arrays, within limits.

All image files are opened here, for every command and data set. They are rotated by
their EXIF orientation; sizes and landmarks are those of the rotated image.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Interval
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from fedfr_jax.data.align import (
    arcface_template,
    rescale_points,
    similarity,
    transform,
)
from fedfr_jax.data.preprocessing import KERNELS
from fedfr_jax.data.sources.decode_process import process_of_thread
from fedfr_jax.distributed import num_cores
from fedfr_jax.types import Preprocessing

NUMBERS = 16  # that a thread takes at a time
# From where processes decode: with so many cores, and images in one read.
MIN_CORES, MIN_IMAGES = 2, 4096
MAX_PIXELS = 2**26  # of an image: 8192 x 8192
# Pillow opens other formats with external programs (Ghostscript for EPS) or system
# libraries.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
ORIENTATIONS = {  # EXIF orientation: the transposition that makes an image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MODES = {1: "L", 3: "RGB"}
Channels = Literal[1, 3]  # gray or color
Side = Annotated[int, Interval(ge=1, le=2**13)]  # pixels
ImageSize = Side | tuple[Side, Side]  # one side, or (H, W)
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError)
UNREADABLE += (Image.DecompressionBombError, Image.DecompressionBombWarning)


def parse_size(image_size: ImageSize) -> tuple[int, int]:
    """Convert an `image_size`, one side or (H, W), to (H, W)."""
    is_side = isinstance(image_size, int)
    height, width = (image_size, image_size) if is_side else image_size
    return int(height), int(width)


def decode(data: bytes, origin: str, channels: int) -> Image.Image:
    """Decode the bytes of an image file to gray or color.

    Args:
      origin: what to call the image in an error.
      channels: 1 or 3.
    """
    with error_context(origin, "a whole 8-bit image"):
        image = apply_orientation(data)
        if image.mode[0] in "IF":  # Pillow would clip 16 and 32 bits to white
            raise ValueError(f"mode {image.mode} has more than 8 bits per pixel")
        return image.convert(MODES[channels])


def apply_orientation(data: bytes) -> Image.Image:
    """Open an image in its file's mode, rotated by its EXIF orientation."""
    with _open_image(data) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"more than {MAX_PIXELS} pixels: {image.size}")
        image.load()  # Pillow itself turns a TIFF here
        turn = ORIENTATIONS.get(_orientation(image))
        return image if turn is None else image.transpose(turn)


def warp_picture(
    picture: Image.Image, matrix: np.ndarray, size: tuple[int, int]
) -> Image.Image:
    """Warp a Pillow image (mode L or RGB) bilinearly; black outside the image.

    Args:
      matrix: [2, 3] invertible forward map, image x, y -> output x, y.
      size: (H', W') of the output.
    """
    inverse = np.linalg.inv(matrix[:, :2].astype(np.float64))
    shift = -inverse @ matrix[:, 2]
    # Pillow maps output to input, both with integers at pixel corners, and repeats the
    # border pixel for half a pixel: one black frame makes the border blend to black.
    shift = shift + 1.5 - inverse @ np.array([0.5, 0.5])
    coefficients = np.concatenate([inverse, shift[:, None]], axis=1).reshape(-1)
    return ImageOps.expand(picture, border=1).transform(
        (size[1], size[0]),
        Image.Transform.AFFINE,
        tuple(coefficients.tolist()),
        resample=Image.Resampling.BILINEAR,
    )


def read_size(data: bytes, origin: str) -> tuple[int, int]:
    """(H, W) of an image file after EXIF rotation, from its header if possible."""
    with error_context(origin, "an image"), _open_image(data) as image:
        is_on_its_side = image.format != "TIFF" and _orientation(image) in (5, 6, 7, 8)
        width, height = image.size
        return (width, height) if is_on_its_side else (height, width)


@contextlib.contextmanager
def error_context(origin: str, expected: str):
    """Raise any error of an image as one ValueError that names `origin`."""
    try:
        yield
    except UNREADABLE as error:
        reason = str(error)
        if isinstance(error, UnidentifiedImageError):
            reason = f"a file of no known format ({', '.join(FORMATS)})"
        raise ValueError(
            f"{origin} must be {expected}, got {reason}. "
            "Replace the file or remove it from the set."
        ) from error


def _open_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; 1 (upright) if it is missing or unreadable."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises any exception for damaged EXIF data
        return 1


class Warp(NamedTuple):
    """Affine map of an image to a canvas."""

    matrix: np.ndarray  # [2, 3]
    canvas: tuple[int, int]  # (H, W)


def prepare_image(
    image: Image.Image,
    size: tuple[int, int],
    preprocessing: Preprocessing,
    warp: Warp | None = None,
) -> np.ndarray:
    """Prepare a decoded image as a model's input, before normalization.

    Data sets and deployed models share this function, so that an image is the same
    array to both.

    Args:
      size: (H, W) of the result.
      preprocessing: its fields `inverted`, `resize` and `kernel` are applied here.
      warp: of a face to the template, instead of cropping the image.

    Returns:
      uint8 [H, W, C].
    """
    if preprocessing.inverted:
        image = ImageOps.invert(image)
    if warp is not None:
        image = warp_picture(image, warp.matrix, warp.canvas)
    elif preprocessing.resize == "crop":
        image = _center_crop(image, size)
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), KERNELS[preprocessing.kernel])
    return np.asarray(image).reshape(height, width, -1)


def _center_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Crop the largest centered part with the aspect ratio of (H, W)."""
    height, width = size
    scale = min(image.height / height, image.width / width)
    inside = round(scale * width), round(scale * height)
    left, top = (image.width - inside[0]) // 2, (image.height - inside[1]) // 2
    return image.crop((left, top, left + inside[0], top + inside[1]))


def check_landmarks(landmarks: np.ndarray, names: Sequence[str], path) -> np.ndarray:
    """Return landmarks [T, 5, 2]; raise ValueError if some cannot align a face."""
    is_usable = np.isfinite(landmarks).all((1, 2)) & (landmarks.std(1).max(1) > 0)
    if not is_usable.all():
        bad = names[int(np.argmin(is_usable))]
        raise ValueError(
            f"{path} must have five finite, distinct landmarks per image, "
            f"got others for {bad}. Correct the row."
        )
    return landmarks


class Alignment(NamedTuple):
    """Warps of T faces to a canvas, which is then resized."""

    matrices: np.ndarray  # [T, 2, 3]
    canvas: tuple[int, int]  # (H, W)
    landmarks: np.ndarray  # [T, 5, 2] float32 in the resized canvas

    def warp(self, row: int) -> Warp:
        """The warp of one face."""
        return Warp(self.matrices[row], self.canvas)


def plan_alignment(landmarks: np.ndarray, size: tuple[int, int]) -> Alignment:
    """Plan the alignment of faces to the ArcFace template at `size`.

    The warp itself is not antialiased, so faces are warped to a canvas that is a
    multiple of 112 pixels high and never smaller than the result, then reduced.

    Args:
      landmarks: [T, 5, 2] x, y in the stored images.
      size: (H, W), square or 112:96 as the template's two crops are.
    """
    height, width = size
    if height != width and height * 96 != width * 112:
        raise ValueError(
            f"image_size must be square or 112:96 when faces are aligned, got {size}."
        )
    times = -(-height // 112)
    canvas = (112 * times, 112 * times if height == width else 96 * times)
    template = arcface_template(canvas)
    matrices = np.asarray(similarity(landmarks.astype(np.float64), template))
    moved = rescale_points(transform(matrices, landmarks), canvas, size)
    return Alignment(matrices, canvas, moved.astype(np.float32))


def reader(
    load: Callable[[int], np.ndarray], num_images: int, image_shape: tuple[int, ...]
) -> Callable[[np.ndarray], np.ndarray]:
    """Build `Source.read` from a function that loads one row, on a thread per core."""

    def read(indices):
        rows = check_rows(indices, num_images)
        images = np.empty((len(rows), *image_shape), np.uint8)

        def fill(index):
            images[index] = load(int(rows[index]))

        in_threads(fill, len(rows))
        return images

    return read


class ImageDecoder(NamedTuple):
    """How the encoded images of a set are decoded; can be pickled."""

    image_shape: tuple[int, int, int]  # (H, W, C) of the result
    preprocessing: Preprocessing
    stored_size: tuple[int, int] | None = None  # that every image must have

    def __call__(self, data: bytes, origin: str, warp: Warp | None) -> np.ndarray:
        """Pixels [H, W, C] uint8 of the bytes of an image file."""
        height, width, channels = self.image_shape
        image = decode(data, origin, channels)
        if self.stored_size not in (None, (image.height, image.width)):
            raise ValueError(
                f"{origin} must have the first image's size {self.stored_size}, "
                f"got {(image.height, image.width)}. Set align=True."
            )
        return prepare_image(image, (height, width), self.preprocessing, warp)


def encoded_reader(
    encoded: Callable[[int], tuple[bytes, str, Warp | None]],
    decoder: ImageDecoder,
    num_images: int,
) -> Callable[[np.ndarray], np.ndarray]:
    """Build `Source.read` of encoded images, from the arguments of `decoder` by row.

    Many are decoded by a process for each thread, see `decode_process`.
    """

    def read(indices):
        rows = check_rows(indices, num_images).tolist()
        images = np.empty((len(rows), *decoder.image_shape), np.uint8)
        has_processes = num_cores() >= MIN_CORES and len(rows) >= MIN_IMAGES

        def fill(start, stop):
            items = [encoded(row) for row in rows[start:stop]]
            if has_processes:
                process_of_thread().decode(decoder, items, images[start:stop])
                return
            for index, item in enumerate(items, start):
                images[index] = decoder(*item)

        parts_in_threads(fill, len(rows))
        return images

    return read


def in_threads(work: Callable[[int], object], count: int) -> list:
    """[work(0), ..., work(count - 1)], on a thread per core.

    Pillow and zlib release the interpreter's lock while they work.
    """
    results: list = [None] * count

    def take(start, stop):
        for index in range(start, stop):
            results[index] = work(index)

    parts_in_threads(take, count)
    return results


def parts_in_threads(work: Callable[[int, int], None], count: int) -> None:
    """Do work(start, stop) for all of `count` numbers, on a thread per core.

    Threads take a few numbers at a time, so that neither slow ones nor many cost much.
    """
    starts = iter(range(0, count, NUMBERS))

    def take(_):
        for start in starts:
            work(start, min(start + NUMBERS, count))

    list(_pool().map(take, range(min(num_cores(), -(-count // NUMBERS)))))


def check_rows(indices: np.ndarray, num_images: int) -> np.ndarray:
    """Indices as int64 [n]; raise ValueError unless all are in [0, num_images)."""
    rows = np.asarray(indices, np.int64).reshape(-1)
    if rows.size and (rows.min() < 0 or rows.max() >= num_images):
        raise ValueError(
            f"indices must be in [0, {num_images}), got {rows.min()} to {rows.max()}."
        )
    return rows


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_cores(), thread_name_prefix="decode")
