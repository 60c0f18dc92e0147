"""Judging on 1:N search of single images: folders of probes, mates and distractors.

TinyFace (Cheng, Zhu, Gong, "Low-Resolution Face Recognition", ACCV 2018) in its own
layout: Probe, Gallery_Match and Gallery_Distractor, with lists of the first two whose
identities nobody can read from the names.
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from fedfr_jax.data.sources.files import open_files
from fedfr_jax.data.sources.loose import loose_images
from fedfr_jax.data.sources.once import each_once
from fedfr_jax.evaluation.blocks import unit
from fedfr_jax.evaluation.identification import rank_k
from fedfr_jax.schema import naming
from fedfr_jax.tasks.faces.judged_files import JudgedFiles, ranks_of
from fedfr_jax.tasks.faces.mat_file import read_mat

SECTION = "evaluation.search"
LISTS = ("probe_img_ID_pairs.mat", "gallery_match_img_ID_pairs.mat")  # TinyFace's


def search_set(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike,
    probes: str = "Probe",
    gallery: str = "Gallery_Match",
    distractors: str | None = "Gallery_Distractor",
    ranks: int | Sequence[int] = (1, 5, 10, 20),
    flip: bool = True,
) -> JudgedFiles:
    """Images of probes and of a gallery; "rank@1", ..., shares of the probes.

    Identities are those of TinyFace's two .mat lists where `path` has them; else what
    stands before the first "_" of a file's name, or the folder that it lies in.

    Args:
      image_shape: of the network; images are stretched.
      path: the folder that holds the others.
      probes, gallery: folders or .zip files below it.
      distractors: of people whom nobody seeks; None for none.
      ranks: k of the top k.
      flip: whether the features of mirror images are added.

    Raises:
      ValueError: for a folder that is missing or empty, a listed image that it does not
        have, or a probe without a mate.
    """
    ranks = ranks_of(f"{SECTION}.ranks", ranks)
    with naming(f"config.{SECTION}"):
        people = [
            _listed(path, folder, listed)
            for folder, listed in zip((probes, gallery), LISTS, strict=True)
        ]
        folders = [probes, gallery]
        names = [list(one) for one in people]
        if distractors is not None:
            folders.append(distractors)
            names.append(list(open_files(pathlib.Path(path, distractors)).names))
        loose = [
            loose_images(pathlib.Path(path, folder), here, image_shape)
            for folder, here in zip(folders, names, strict=True)
        ]
        labels = [np.array(list(one.values())) for one in people]
        if not (is_mated := np.isin(*labels)).all():
            lonely = names[0][int(np.argmin(is_mated))]
            raise ValueError(
                f"{pathlib.Path(path, gallery)} must have a mate of every probe, got "
                f"none of {lonely}."
            )
    ends = np.cumsum([0, *map(len, names)])

    def read(rows):
        images = np.empty((len(rows), *image_shape), np.uint8)
        for one, low, high in zip(loose, ends, ends[1:], strict=False):
            here = (rows >= low) & (rows < high)
            if here.any():
                images[here] = one.read(rows[here] - low)
        return images

    def metrics(features):
        summed = np.asarray(unit(features.sum(axis=1)))
        parts = [summed[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        return rank_k(
            parts[0], labels[0], parts[1], labels[1], ranks=ranks, distractors=parts[2:]
        )

    passed_over = "\n".join(one.passed_over for one in loose if one.passed_over)
    return JudgedFiles(read, int(ends[-1]), flip, metrics, passed_over)


def _listed(path, folder: str, listed: str) -> dict[str, str]:
    """{image: identity} of a folder."""
    file = pathlib.Path(path, listed)
    if not file.exists():
        names = open_files(pathlib.Path(path, folder)).names
        return {name: _identity(name) for name in names}
    try:
        found, kind = read_mat(file), listed.partition("_")[0]
        names = [str(name) for name in found[f"{kind}_set"]]
        people = [str(int(one)) for one in found[f"{kind}_ids"]]
        if not names:
            raise ValueError(f"{kind}_set must hold names of images, got none.")
        return each_once(zip(names, people, strict=True), "image", file)
    except Exception as error:  # whatever a damaged file leads to
        raise ValueError(
            f"{file} must be TinyFace's list, got {type(error).__name__}: {error}."
        ) from error


def _identity(name: str) -> str:
    path = pathlib.PurePosixPath(name)
    if len(path.parts) > 1:
        return path.parts[-2]
    return path.stem.partition("_")[0]
