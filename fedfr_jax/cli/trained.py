"""Commands that use trained models: images, galleries, thresholds, weight files."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from fedfr_jax.cli.flags import DataChanged
from fedfr_jax.json_files import parse_json
from fedfr_jax.text import normalize_unicode, printable

# Folders of the parts of a data set, which may be around those of identities.
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")


class Weights(NamedTuple):
    """Which trained model is used.

    Args:
      weights: PATH run directory, its folder of a stage, or a file of weights (fedfr
        export)
      method: METHOD method of the run (default the last)
      client: I client whose personalized model is used (default the global model)
    """

    weights: str
    method: str | None = None
    client: int | None = None
    data_changed: DataChanged = None

    def load(self):
        """Load the model."""
        from fedfr_jax.loading import load_model

        return load_model(
            self.weights,
            method=self.method,
            client=self.client,
            data_changed=self.data_changed,
        )


class Alignment(NamedTuple):
    """How faces on images are aligned.

    Args:
      landmarks: CSV to align faces by: columns name, x1, y1 ... x5, y5 of eyes, nose
        and mouth
      detector: ONNX file of OpenCV's YuNet, which finds the landmarks
    """

    landmarks: str | None = None
    detector: str | None = None

    def read(self, paths: Sequence[str], model: Weights):
        """Load the model, and read the images as it takes them: (network, images)."""
        network = model.load()
        from fedfr_jax.deploy.face_images import read_images

        images = read_images(
            paths, network.image_shape, network.recorded, **self._asdict()
        )
        print(printable(images.alignment, keep="\n"))
        return network, images


class Threshold(NamedTuple):
    """From which cosine on two images show one person.

    Args:
      far: RATE false accept rate, by the evaluation of the model's run (default 0.001,
        or the smallest one that its pairs can measure)
      threshold: COSINE minimum cosine of one person, instead of --far
    """

    far: float | None = None
    threshold: float | None = None

    def choose(self, calibration: str) -> tuple[float, str]:
        """(value of --threshold, else the threshold of --far; where it comes from)."""
        if self.threshold is None:
            from fedfr_jax.deploy.calibration import threshold

            return threshold(calibration, self.far)
        if not math.isfinite(self.threshold):
            raise ValueError(f"--threshold must be a number, got {self.threshold}.")
        return self.threshold, "given"


def parse_model(text: str) -> dict:
    """Parse --model, the config of a network as JSON."""
    return parse_json(text, "--model")


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse --input_shape."""
    return tuple(int(word) for word in text.split(","))


def convert(
    *,
    input: str,
    output: str,
    key: str = "",
    model: Annotated[dict | None, parse_model] = None,
    input_shape: Annotated[tuple[int, ...] | None, parse_shape] = None,
) -> None:
    """Convert external checkpoints to a file of weights.

    Weights of InsightFace's IResNets and ViTs, TreB1eN-style IR networks (face.evoLVe,
    TFace, AdaFace), FedFR's SphereFace, torchvision's ResNets and ConvNeXts, and vision
    transformers of timm, DINOv2 and CLIP are written with our names.

    --input=FILE is a .safetensors, a .npz or, where PyTorch is installed, a .pt, .pth,
    .pth.tar, .ckpt or .bin of torch.save, whose code is not run. In a file with several
    networks --key names one, such as --key=state_dict_ema, or --key=state_dict/model
    for the names that begin with "model.". The network is found from names and shapes;
    --model and --input_shape set another one, such as --model='{"name": "iresnet",
    "depth": 50}' --input_shape=112,112,3.

    Args:
      input: FILE file to read
      output: FILE file to write: .safetensors, .npz or .pt
      key: KEY weights to read from several
      model: JSON model of the weights
      input_shape: H,W,C shape of its images
    """
    from fedfr_jax.deploy import export

    print(export.convert(input, output, model=model, input_shape=input_shape, key=key))


def export(*, model: Weights, output: str) -> None:
    """Export trained weights as ONNX, StableHLO, safetensors or PyTorch's.

    The file runs or opens without this library. --output=FILE ends in one of
      .onnx          images [N, C, H, W] -> embedding [N, D], any N
      .stablehlo     images [N, H, W, C] -> embedding [N, D], any N, for jax.export
      .safetensors   weights with what they are of: --weights takes it
      .npz           the weights alone
      .pt            a state dict with PyTorch's names, where PyTorch is installed
    Images are RGB in [-1, 1]: pixel / 127.5 - 1.

    Args:
      output: FILE file to write
    """
    network = model.load()
    from fedfr_jax.deploy.export import export as write

    print(f"{output}: {write(network, output)}")


def embed(
    images: Sequence[str], *, model: Weights, alignment: Alignment, output: str
) -> None:
    """Write the embeddings of a folder of images.

    The .npz has names [n], features [n, D] (as the network gives them, not of unit
    length) and the network's fingerprint.

    Args:
      images: IMAGE a folder, a .zip, or files
      output: NPZ file to write
    """
    network, read = alignment.read(images, model)
    import numpy as np

    features = read.embed(network)
    with open(output, "wb") as file:
        fingerprint = network.fingerprint
        np.savez(file, names=read.names, features=features, fingerprint=fingerprint)
    print(f"{output}: {len(features)} embeddings of {features.shape[1]} numbers")


def verify(
    images: Sequence[str], *, model: Weights, alignment: Alignment, limit: Threshold
) -> None:
    """Verify whether two face images show the same person.

    Printed are the cosine of their embeddings, the threshold and the decision. The
    threshold has the false accept rate --far on pairs of identities that the model's
    run evaluated and did not train on.

    Args:
      images: IMAGE two files
    """
    if len(images) != 2:
        raise ValueError(f"images must be two files, got {[*images]}.")
    network, read = alignment.read(images, model)
    from fedfr_jax.deploy.calibration import curve_text
    from fedfr_jax.deploy.gallery import unit_length

    first, second = unit_length(read.embed(network))
    cosine = float(first @ second)
    curve = curve_text(network.roc) if limit.threshold is None else ""
    threshold, source = limit.choose(curve)
    verdict = "one person" if cosine >= threshold else "two people"
    print(f"{verdict}: cosine {cosine:.4f}, threshold {threshold:.4f} ({source})")


def enroll(
    images: Sequence[str], *, model: Weights, alignment: Alignment, gallery: str
) -> None:
    """Enroll identities in a gallery.

    The gallery's file, which is created if missing, has one vector each, the mean of
    their images. An identity's name is that of the folder of its images
    (people/<name>/<image>; folders around that one, such as train/, are no names), or
    of the file if it is in no folder. Identities that are enrolled already are
    replaced.

    Args:
      images: IMAGE a folder, a .zip, or files
      gallery: NPZ gallery file to write or to add to
    """
    network, read = alignment.read(images, model)
    from fedfr_jax.deploy.gallery import check_network, enroll_images, read_gallery

    path = pathlib.Path(gallery)
    if path.exists():
        check_network(read_gallery(path), network)
    is_folder = len(images) == 1 and read.names != [*images]
    people = identities_of_files(read.names, is_folder)
    enrolled = enroll_images(network, people, read.embed(network), path)
    names = sorted({*people})
    listed = ", ".join(map(printable, names[:5])) + (", ..." if names[5:] else "")
    total = len(enrolled.names)
    print(f"{path}: {total} people, {len(names)} of them new or again: {listed}")


def identify(
    images: Sequence[str],
    *,
    model: Weights,
    alignment: Alignment,
    limit: Threshold,
    gallery: str,
    top_k: int = 1,
    search_backend: Literal["numpy", "faiss"] = "numpy",
) -> None:
    """Identify the people on images by a gallery.

    Printed are the identities of the gallery that are on each image, by exact search:
    those whose cosine reaches the threshold of --far, the false accept rate of one
    comparison; with a gallery of G identities an image takes part in G of them.

    Args:
      images: IMAGE a folder, a .zip, or files
      gallery: NPZ gallery file of fedfr enroll
      top_k: K names per image
      search_backend: library that searches the gallery, exact in both
    """
    network, read = alignment.read(images, model)
    from fedfr_jax.deploy import gallery as galleries

    enrolled = galleries.read_gallery(gallery)
    galleries.check_network(enrolled, network)
    threshold, source = limit.choose(enrolled.calibration)
    is_faiss = search_backend == "faiss"
    find = galleries.faiss_search() if is_faiss else galleries.search
    people = [printable(str(name)) for name in enrolled.names]
    rows, cosines = find(enrolled, read.embed(network), max(top_k, 1))
    print(f"threshold {threshold:.4f} ({source}), {len(people)} people")
    for name, indices, scores in zip(read.names, rows, cosines, strict=True):
        best = [(people[i], score) for i, score in zip(indices, scores, strict=True)]
        matches = [f"{who} {score:.4f}" for who, score in best if score >= threshold]
        no_match = f"nobody (nearest {best[0][0]} {best[0][1]:.4f})"
        print(f"{printable(name)}: {', '.join(matches) or no_match}")


def identities_of_files(names: Sequence[str], is_in_folder: bool) -> list[str]:
    """Identity of each image, from its path below the given folder.

    It is the name of the folder that the image is in.

    >>> identities_of_files(["Ada/1.jpg", "Bo.jpg"], True)
    ['Ada', 'Bo']
    >>> identities_of_files(["some/Bo.png"], False)
    ['Bo']
    >>> identities_of_files(["a/Ada/1.jpg", "a/Bo/1.jpg", "b/Cy/1.jpg"], True)
    ['Ada', 'Bo', 'Cy']
    """
    paths = [pathlib.PurePath(name) for name in names]
    if not is_in_folder:
        return [normalize_unicode(path.stem) for path in paths]
    first = {path.parent: str(path) for path in reversed(paths) if path.parent.name}
    _check_folders(dict(sorted(first.items())))
    return [normalize_unicode(path.parent.name or path.stem) for path in paths]


def _check_folders(images: Mapping[pathlib.PurePath, str]) -> None:
    """Raise ValueError for folders that are not one identity each.

    Args:
      images: {folder: the path of an image in it}.
    """
    folders, named = {}, {part for x in images for part in x.parts}
    splits = {part for part in named if part.lower() in SPLITS}
    if len(splits) == 1:  # "Val" alone is a person
        splits &= {*SPLITS}
    for folder, image in images.items():
        if folder.name in splits:
            raise ValueError(
                f"images must be in <name>/<image>, got {image}: {folder.name} is a "
                "split of a data set and no identity. Give each identity a folder."
            )
        if direct := next(filter(None, map(images.get, folder.parents)), None):
            raise ValueError(
                f"images must be in <name>/<image>, got both {direct} and {image}. "
                "Move the first to a folder of its own, or pass the parent folder, "
                "which has one folder per person."
            )
        above = [x for x in folder.parts if x not in splits]
        other = folders.setdefault(normalize_unicode(folder.name), (above, image))
        if other[0] != above:
            raise ValueError(
                f"{folder.name} must be one identity, got {other[1]} and {image}. "
                "Rename one of the folders, or enroll one of those around them."
            )
