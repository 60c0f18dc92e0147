"""Pictures of faces as a network takes them: aligned, or the centre of a picture."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.files import Files, open_files
from fedfr_jax.data.sources.folder import read_landmarks
from fedfr_jax.data.sources.images import (
    align_and_resize,
    decode,
    plan_alignment,
    reader,
    resize,
)
from fedfr_jax.deploy.network import Network

BLOCK = 1024  # pictures in memory at once
CENTRE = "no landmarks: the centre of every picture is taken for the face"


class Pictures(NamedTuple):
    """Faces of n files."""

    names: list[str]
    read: Callable[[np.ndarray], np.ndarray]  # rows [m] -> [m, H, W, C] uint8
    how: str  # they were cut out, and what was passed over, to be told

    def embedded(self, network: Network) -> np.ndarray:
        """Their embeddings [n, D], of a block of pictures after the other.

        Raises:
          ValueError: naming the first file that is no image.
        """
        rows, block = np.arange(len(self.names)), BLOCK
        starts = range(0, len(rows), block)
        found = [network.embed(self.read(rows[i : i + block])) for i in starts]
        return np.concatenate(found)


def read_pictures(
    paths: Sequence[str | os.PathLike],
    image_shape: Sequence[int],
    *,
    landmarks: str | os.PathLike | None = None,
    detector: str | os.PathLike | None = None,
) -> Pictures:
    """The faces of some pictures, which are read when they are asked for.

    Args:
      paths: a folder or a .zip, or files.
      image_shape: (H, W, C) of the network.
      landmarks: csv file of `read_landmarks`, by which faces are aligned.
      detector: file of OpenCV's YuNet, which finds the landmarks; needs opencv-python.

    Raises:
      ValueError: naming the first file that has no row of landmarks, or not one face
        for the detector.
      ImportError: for a detector without OpenCV.
    """
    if landmarks is not None and detector is not None:
        raise ValueError("landmarks must come without a detector, got both.")
    *size, channels = image_shape
    files = files_of(paths)
    picture = lambda name: decode(files.read(name), files.origin(name), channels)
    if landmarks is not None:
        points, how = read_landmarks(landmarks, files), f"aligned by {landmarks}"
    elif detector is not None:
        points, how = _found(files, detector), f"aligned by {detector}"
    else:
        cut = lambda row: centre(picture(files.names[row]), size)
        read = reader(cut, len(files.names), tuple(image_shape))
        return Pictures(files.names, read, _told(CENTRE, files))
    matrices, canvas, _ = plan_alignment(points, tuple(size))
    align = lambda row: align_and_resize(
        picture(files.names[row]), matrices[row], canvas, tuple(size)
    )
    read = reader(align, len(files.names), tuple(image_shape))
    return Pictures(files.names, read, _told(how, files))


def _told(how: str, files: Files) -> str:
    return "\n".join(filter(None, (how, files.passed_over())))


def files_of(paths: Sequence[str | os.PathLike]) -> Files:
    """The images of a folder or a .zip, or single files by the paths that name them.

    Raises:
      ValueError: for no path, a path without a file, or several with a folder.
    """
    if not paths:
        raise ValueError("pictures must be files or a folder, got none.")
    is_set = [pathlib.Path(x).is_dir() or str(x).endswith(".zip") for x in paths]
    if len(paths) == 1 and is_set[0]:
        return open_files(paths[0])
    for path, is_folder in zip(paths, is_set, strict=True):
        if is_folder or not pathlib.Path(path).is_file():
            raise ValueError(f"pictures must be files, or one folder, got {path}.")
    return Files([str(x) for x in paths], lambda x: pathlib.Path(x).read_bytes(), str)


def centre(image: Image.Image, size: Sequence[int]) -> np.ndarray:
    """The largest part around the centre with the shape of (H, W), at that size."""
    height, width = size
    scale = min(image.height / height, image.width / width)
    inside = round(scale * width), round(scale * height)
    left, top = (image.width - inside[0]) // 2, (image.height - inside[1]) // 2
    part = image.crop((left, top, left + inside[0], top + inside[1]))
    return resize(part, (height, width))


def _found(files: Files, detector) -> np.ndarray:
    detect = yunet(detector)
    points = [detect(decode(files.read(x), files.origin(x), 3), x) for x in files.names]
    return np.stack(points)


def yunet(path: str | os.PathLike) -> Callable[[Image.Image, str], np.ndarray]:
    """detect(image, what to call it) -> five landmarks [5, 2] of its surest face.

    YuNet (Wu et al., "YuNet: A Tiny Millisecond-level Face Detector", 2023) as OpenCV
    runs it; its file is in github.com/opencv/opencv_zoo. A row of its result is a box,
    five points x, y and a score; the points are the eye at image left, the one at
    image right, the nose and the corners of the mouth, left and right.
    """
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            "detector must have OpenCV, got none: pip install 'fedfr_jax[detect]'."
        ) from error
    if not pathlib.Path(path).is_file():
        raise ValueError(f"detector must be the file of YuNet, got {path}.")
    found = cv2.FaceDetectorYN.create(str(path), "", (320, 320))

    def detect(image, name):
        found.setInputSize(image.size)
        _, faces = found.detect(np.asarray(image)[..., ::-1].copy())  # BGR
        if faces is None:
            raise ValueError(f"{name} must show a face to {path}, got none.")
        best = faces[np.argmax(faces[:, 14])]
        return best[4:14].reshape(5, 2).astype(np.float32)

    return detect
