"""Face image loading: landmark alignment or center crop."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.decoding import plan_alignment
from fedfr_jax.data.sources.folder import read_landmarks
from fedfr_jax.data.sources.image_files import Files, open_files
from fedfr_jax.data.sources.index import image_reader, index_files
from fedfr_jax.deploy.detector import most_certain_faces, yunet
from fedfr_jax.deploy.trained_model import TrainedModel
from fedfr_jax.types import Preprocessing

CHUNK_SIZE = 1024  # pictures in memory at once
CENTER = "the center of every picture is taken"


class FaceImages(NamedTuple):
    """Face images of n files, prepared for a model."""

    names: list[str]
    read: Callable[[np.ndarray], np.ndarray]  # rows [m] -> [m, H, W, C] uint8
    alignment: str  # text on their alignment and on ignored files

    def embed(self, network: TrainedModel) -> np.ndarray:
        """Embed all images, a chunk at a time: [n, D]."""
        rows = np.arange(len(self.names))
        chunks = [rows[i : i + CHUNK_SIZE] for i in range(0, len(rows), CHUNK_SIZE)]
        return np.concatenate([network.embed(self.read(chunk)) for chunk in chunks])


def read_images(
    paths: Sequence[str | os.PathLike],
    image_shape: tuple[int, int, int],
    recorded: Preprocessing | None = None,
    *,
    landmarks: str | os.PathLike | None = None,
    detector: str | os.PathLike | None = None,
) -> FaceImages:
    """Prepare images for a model; they are read when needed.

    Args:
      paths: a folder or a .zip, or files.
      image_shape: (H, W, C) of the network.
      recorded: preprocessing of its training images, `TrainedModel.recorded`.
      landmarks: csv file of `read_landmarks`, by which faces are aligned.
      detector: file of OpenCV's YuNet, which detects landmarks; needs opencv-python.

    Raises:
      ValueError: naming the first file without landmarks or without a detected face.
      ImportError: for a detector without OpenCV.
    """
    if landmarks is not None and detector is not None:
        raise ValueError(
            "landmarks cannot be used with a detector. Remove one of them."
        )
    files, preprocessing = list_files(paths), recorded or Preprocessing()
    points, alignment, notes = None, None, f"aligned by {landmarks or detector}"
    if landmarks is not None:
        points = _listed(files, landmarks)
    elif detector is not None:
        points = most_certain_faces(files, yunet(detector), str(detector))
    else:
        notes = _skip_text(recorded, image_shape)
        if preprocessing.alignment:
            preprocessing = preprocessing._replace(resize="crop")
    if points is not None:
        alignment = plan_alignment(points, image_shape[:2])
        if recorded and not recorded.alignment:
            notes += "; training took its images as they were stored, without aligning"
    read = image_reader(index_files(files), image_shape, preprocessing, alignment)
    notes = "\n".join(filter(None, (notes, files.passed_over())))
    return FaceImages(files.names, read, notes)


def _skip_text(recorded: Preprocessing | None, image_shape: Sequence[int]) -> str:
    """Describe how images without landmarks are prepared."""
    if recorded is None:
        return f"the network comes without a record of its training images: {CENTER}"
    if recorded.alignment:
        return f"no landmarks, and training images were aligned by theirs: {CENTER}"
    if recorded.resize == "crop":
        return f"training images were no files, or prepared in several ways: {CENTER}"
    height, width = image_shape[:2]
    return f"as in training, pictures are stretched to {height} x {width} pixels"


def _listed(files: Files, landmarks) -> np.ndarray:
    """Landmarks [n, 5, 2] of every file, from a csv."""
    names, points = read_landmarks(landmarks, files)
    if len(names) < len(files.names):
        name = next(iter({*files.names} - {*names}))
        raise ValueError(
            f"{landmarks} must have landmarks of every image, got empty cells for "
            f"{name}. Remove the image."
        )
    return points


def list_files(paths: Sequence[str | os.PathLike]) -> Files:
    """Image files of a folder or a .zip, or single files by their paths."""
    if not paths:
        raise ValueError("images must be files or a folder, got none.")
    is_set = [pathlib.Path(x).is_dir() or str(x).endswith(".zip") for x in paths]
    if len(paths) == 1 and is_set[0]:
        return open_files(paths[0])
    for path, is_folder in zip(paths, is_set, strict=True):
        if is_folder or not pathlib.Path(path).is_file():
            raise ValueError(f"images must be files, or one folder, got {path}.")
    return Files([str(x) for x in paths], lambda x: pathlib.Path(x).read_bytes(), str)
