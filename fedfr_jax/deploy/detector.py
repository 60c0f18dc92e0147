"""Face detection in photographs, with five landmarks per face."""

import csv
import io
import os
import pathlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.decoding import decode
from fedfr_jax.data.sources.image_files import Files
from fedfr_jax.files import write_text
from fedfr_jax.text import printable

Detector = Callable[[Image.Image], np.ndarray]  # -> [F, 5, 2] x, y, by falling score
COLUMNS = ["name", *(f"{axis}{point}" for point in range(1, 6) for axis in "xy")]
MAX_NAMED = 5


def yunet(path: str | os.PathLike) -> Detector:
    """YuNet detector (Wu et al., "YuNet", 2023), run by OpenCV.

    Its file is in github.com/opencv/opencv_zoo. A row of its result is a box, five
    points x, y and a score; the points are the eye at image left, the eye at image
    right, the nose and the corners of the mouth, left and right.

    Raises:
      ImportError: without OpenCV.
      ValueError: when there is no such file.
    """
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            "--detector needs OpenCV: pip install 'fedfr_jax[detect]'."
        ) from error
    if not pathlib.Path(path).is_file():
        raise ValueError(f"detector must be a YuNet .onnx file, got {path}.")
    model = cv2.FaceDetectorYN.create(str(path), "", (320, 320))

    def detect(image):
        model.setInputSize(image.size)
        _, faces = model.detect(np.asarray(image)[..., ::-1].copy())  # BGR
        if faces is None:
            return np.empty((0, 5, 2), np.float32)
        faces = faces[np.argsort(-faces[:, 14], kind="stable")]
        return faces[:, 4:14].reshape(-1, 5, 2).astype(np.float32)

    return detect


def most_certain_faces(files: Files, detect: Detector, name: str) -> np.ndarray:
    """Landmarks [n, 5, 2] of the most certain face in each of n images.

    Args:
      name: what to call the detector in an error.
    """
    points = []
    for file in files.names:
        faces = _faces(files, file, detect)
        if not len(faces):
            raise ValueError(f"{name} cannot find a face in {file}. Remove the image.")
        points.append(faces[0])
    return np.stack(points)


def write_landmarks(files: Files, detect: Detector, path: str | os.PathLike) -> str:
    """Write the csv that `read_landmarks` reads, with a row for every image.

    The face with the highest score is taken; an image without a face has empty cells.

    Returns:
      text for people, with the first images that do not show exactly one face.
    """
    text, without_face, with_several = io.StringIO(), [], []
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for name in files.names:
        faces = _faces(files, name, detect)
        numbers = faces[0].reshape(-1).tolist() if len(faces) else [""] * 10
        table.writerow([name, *numbers])
        if not len(faces):
            without_face.append(name)
        elif len(faces) > 1:
            with_several.append(name)
    write_text(path, text.getvalue())
    lines = [f"{path}: landmarks of {len(files.names) - len(without_face)} images"]
    if without_face:
        lines.append(f"no face, left out of training: {_count_text(without_face)}")
    if with_several:
        lines.append(f"several faces, the surest is taken: {_count_text(with_several)}")
    return "\n".join(lines)


def _faces(files: Files, name: str, detect: Detector) -> np.ndarray:
    return detect(decode(files.read(name), files.origin(name), 3))


def _count_text(names: list[str]) -> str:
    more = ", ..." if len(names) > MAX_NAMED else ""
    return f"{len(names)} ({', '.join(map(printable, names[:MAX_NAMED]))}{more})"
