"""Sets of labelled images for classification, with their own test parts.

Each entry only knows how its set is laid out; `folder` and `arrays` read it.
"""

import os
import pathlib
import re

from fedfr_jax.data.sources.arrays import arrays
from fedfr_jax.data.sources.folder import archive_in, folder
from fedfr_jax.types import Source

FASHION = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag".split()
FASHION += ["Ankle boot"]
# Two arrays each, of the training and of the test part.
TWO_PARTS = {
    "images": ("train_images", "test_images"),
    "labels": ("train_labels", "test_labels"),
}


def image_classes(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    train: str = "train",
    test: str = "test",
    min_images: int = 1,
) -> Source:
    """A folder or .zip of images, <part>/<class>/<image>, with a test part.

    Args:
      path: the directory or archive; folders above the parts are passed over.
      image_size: side or (H, W) in pixels; None is the size of the first image.
      channels: 1 for grey, 3 for colour.
      train: name of the folder of the training part.
      test: name of the folder of the test part, such as "val".
      min_images: classes with fewer images are left out.

    Raises:
      ValueError: naming the file, for one outside the two parts, a part without an
        image, or (when read) an unreadable image.
    """
    parts = f"(?:{re.escape(train)}|(?P<test>{re.escape(test)}))"
    source = folder(
        path,
        image_size=image_size,
        channels=channels,
        naming=rf"(?:.*/)?{parts}/(?P<identity>[^/]+)/[^/]+",
        min_images=min_images,
    )
    for name, is_there in (
        (train, not source.is_test.all()),
        (test, source.is_test.any()),
    ):
        if not is_there:
            raise ValueError(f"{path} must hold images below {name}/, got none.")
    return source


def cifar10(
    data_dir: str | os.PathLike, *, image_size: int | tuple[int, int] | None = None
) -> Source:
    """CIFAR-10 as images: {train,test}/<class>/<number>.jpg in a .zip or a folder."""
    return image_classes(archive_in(data_dir), image_size=image_size)


def cifar100(
    data_dir: str | os.PathLike, *, image_size: int | tuple[int, int] | None = None
) -> Source:
    """CIFAR-100 with fine labels: a .npz of {train,test}_images and _labels."""
    return arrays(_npz_in(data_dir), image_size=image_size, **TWO_PARTS)


def fashion_mnist(
    data_dir: str | os.PathLike, *, image_size: int | tuple[int, int] | None = None
) -> Source:
    """Fashion-MNIST, grey: a .npz of {train,test}_images and _labels."""
    source = arrays(_npz_in(data_dir), image_size=image_size, **TWO_PARTS)
    return source._replace(names=tuple(FASHION))


def mnist(
    data_dir: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    is_test: str | None = "official_test",
) -> Source:
    """MNIST, grey: a .npz of images, labels and the mask of its test part.

    Args:
      data_dir: folder with one .npz.
      image_size: side or (H, W); None keeps 28.
      is_test: key of the mask [T] bool; None for one set without a test part.
    """
    return arrays(_npz_in(data_dir), image_size=image_size, is_test=is_test)


def _npz_in(data_dir: str | os.PathLike) -> pathlib.Path:
    """The one .npz in a data set's folder."""
    found = sorted(pathlib.Path(data_dir).glob("*.npz"))
    if len(found) != 1:
        raise ValueError(
            f"{data_dir} must hold one .npz, got {[file.name for file in found]}: "
            "name the file with the `arrays` source."
        )
    return found[0]
