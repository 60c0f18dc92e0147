"""FLICKR-AES: photographs with aesthetic ratings by several raters each.

Ren, Shen, Lin, Mech, Foran, "Personalized Image Aesthetics", ICCV 2017,
https://github.com/alanspike/personalizedImageAesthetics. A row is a rating, so an image
comes once for each of its raters; the rater is the row's client (see `natural`), the
class its score. Raters are chosen as by the FedPer baseline of Flower, because the
paper (arXiv:1912.00818, section 4.1) gives the numbers of ratings only.
"""

import os
import pathlib

import numpy as np

from fedfr_jax.data.sources.decoding import ImageSize
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.index import index_files, open_index
from fedfr_jax.files import read_csv
from fedfr_jax.ranges import Count, Whole
from fedfr_jax.types import Source

RATINGS = "FLICKR-AES_image_labeled_by_each_worker.csv"
COLUMNS = ("worker", "imagePair", "score")
SCORES = 5
KNOWN_SCORES = [str(score + 1) for score in range(SCORES)]


def flickr_aes(
    data_dir: str | os.PathLike,
    *,
    image_folder: str = "40K",
    ratings: str = RATINGS,
    image_size: ImageSize = 224,
    min_ratings: Whole = 60,
    max_ratings: Whole = 290,
    min_per_score: Count = 4,
) -> Source:
    """FLICKR-AES with ratings 1 to 5 as classes, of raters with enough ratings of each.

    Args:
      data_dir: folder of the ratings file and of the images.
      image_folder: folder or .zip in `data_dir` with the images that the file names.
      ratings: csv in `data_dir` with the columns of COLUMNS.
      image_size: side or (H, W) in pixels, to which images are stretched.
      min_ratings, max_ratings: of a rater, both included.
      min_per_score: ratings that a rater gave of every score, at least 1.
    """
    path = pathlib.Path(data_dir, ratings)
    workers, names, scores = read_ratings(path)
    raters, rater = np.unique(workers, return_inverse=True)
    counts = np.zeros((len(raters), SCORES), int)
    np.add.at(counts, (rater, scores - 1), 1)
    total, fewest = counts.sum(axis=1), counts.min(axis=1)
    is_kept = (min_ratings <= total) & (total <= max_ratings)
    is_kept &= fewest >= min_per_score
    if not is_kept.any():
        raise ValueError(
            f"{path} must have raters with {min_ratings} to {max_ratings} ratings and "
            f"at least {min_per_score} of each score, got none of "
            f"{len(raters)}. Change min_ratings, max_ratings or min_per_score."
        )
    rows = np.flatnonzero(is_kept[rater])
    index = index_files(
        open_files(pathlib.Path(data_dir, image_folder)),
        [names[row] for row in rows],
        # A row is a rating: a share of each rater's ratings is held out, not of images.
        is_named=False,
        labels=scores[rows] - 1,
        identities=KNOWN_SCORES,
        client_ids=workers[rows],
    )
    return open_index(index, image_size)


def read_ratings(path: pathlib.Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Read a ratings file: (rater [T], image name T, score [T] int).

    Blanks around words are passed over, and so is a worker's second rating of an image,
    which would put one image into training and test.
    """
    first = {}
    for line, (worker, image, score) in read_csv(path, COLUMNS).items():
        if score not in KNOWN_SCORES:
            raise ValueError(
                f"{path}, line {line}: the score of {image} by {worker} must be in "
                f"[1, {SCORES}], got {score!r}."
            )
        first.setdefault((worker, image), int(score))
    if not first:
        raise ValueError(f"{path} must have at least one rating, got none.")
    workers, names = zip(*first, strict=True)
    return np.array(workers), list(names), np.array([*first.values()])
