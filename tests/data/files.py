"""Image files for tests, in folders and zip archives."""

import io
import zipfile

import numpy as np
from PIL import Image


def png(pixels, kind="png", size=(8, 6), **options):
    """An image file of an array, or of one value in an RGB image of `size` (H, W)."""
    if np.ndim(pixels) == 0:
        pixels = np.full((*size, 3), pixels)
    file = io.BytesIO()
    image = np.ascontiguousarray(pixels)
    if image.dtype not in (np.uint8, np.uint16):
        image = image.astype(np.uint8)
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


def fill(root, files):
    """Write {name: bytes or text} into a folder."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def zipped(path, files):
    """Write {name: bytes} into a zip archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path
