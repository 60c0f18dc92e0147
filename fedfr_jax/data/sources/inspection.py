"""Data set inspection for `fedfr prepare`: contents and unreadable images."""

import hashlib

import numpy as np

from fedfr_jax.types import Source

QUANTILES = {"min": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "max": 1.0}
CHUNK_SIZE = 256
MAX_LISTED = 20


def inspect(source: Source, *, sample: int | None = None) -> dict:
    """Count a source's identities, and read its images to find unreadable ones.

    Args:
      source: any source.
      sample: how many images to read, evenly spread; None reads all.

    Returns:
      A dict that json can write: images, identities, input_shape, images_per_identity
      (min, 25%, median, 75%, max, mean), landmarks (bool), cameras, pairs and
      test_images (counts, 0 for a set without), passed_over (text on ignored files),
      sampled, num_unreadable, unreadable (the first 20 messages), mean (pixel mean in
      [0, 255] of the images that were read), and checksum (SHA-256 of labels, names and
      these images' pixels; it changes with the decoder's version too).
    """
    num_images = len(source.labels)
    num_read = num_images if sample is None else min(sample, num_images)
    rows = np.unique(np.linspace(0, num_images - 1, num_read).astype(np.int64))
    counts = np.bincount(source.labels, minlength=len(source.names))
    digest = hashlib.sha256(np.ascontiguousarray(source.labels, "<i4").tobytes())
    digest.update("\n".join(source.names).encode())
    errors, total, num_pixels = [], 0, 0
    for start in range(0, len(rows), CHUNK_SIZE):
        for images in _read_readable(source, rows[start : start + CHUNK_SIZE], errors):
            digest.update(images.tobytes())
            total += int(images.sum(dtype=np.int64))
            num_pixels += images.size
    quantiles = {name: float(np.quantile(counts, q)) for name, q in QUANTILES.items()}
    cameras = source.cameras
    return {
        "images": num_images,
        "identities": len(source.names),
        "image_shape": list(source.input_shape),
        "images_per_identity": quantiles | {"mean": float(counts.mean())},
        "landmarks": source.landmarks is not None,
        "cameras": 0 if cameras is None else len(np.unique(cameras)),
        "pairs": 0 if source.pairs is None else len(source.pairs.is_same),
        "test_images": 0 if source.is_test is None else int(source.is_test.sum()),
        "passed_over": source.passed_over,
        "sampled": len(rows),
        "num_unreadable": len(errors),
        "unreadable": errors[:MAX_LISTED],
        "mean": total / num_pixels if num_pixels else None,
        "checksum": digest.hexdigest(),
    }


def _read_readable(source, rows, errors):
    """Yield the readable images of `rows`; append an error for each other one."""
    try:
        yield source.read(rows)
        return
    except ValueError:
        pass  # read one at a time, to find which
    for row in rows:
        try:
            image = source.read(np.array([row]))
        except ValueError as error:
            errors.append(str(error))
        else:
            yield image
