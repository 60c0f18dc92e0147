"""The one decoder of picture files: formats, orientation, preparation."""

import pathlib
import re

import numpy as np
import pytest
from PIL import Image

import fedfr_jax
from fedfr_jax.data.sources.decoding import FORMATS, decode, prepare_image, read_size
from fedfr_jax.data.sources.folder import folder
from fedfr_jax.data.sources.segmentation import image_masks
from fedfr_jax.types import Preprocessing
from tests.data.files import fill, png

UPRIGHT = np.random.default_rng(0).integers(256, size=(6, 10, 3), dtype=np.uint8)
STORED = {  # how a camera stores the upright picture, by the orientation that it notes
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: UPRIGHT.transpose(1, 0, 2)[::-1],
    7: UPRIGHT.transpose(1, 0, 2)[::-1, ::-1],
    8: UPRIGHT.transpose(1, 0, 2)[:, ::-1],
}


def noting(orientation):
    """EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_is_turned_as_its_file_says(kind, orientation):
    data = png(STORED[orientation], kind, exif=noting(orientation))
    np.testing.assert_array_equal(np.asarray(decode(data, "x", 3)), UPRIGHT)
    assert read_size(data, "x") == (6, 10)


def test_a_mask_belongs_to_the_turned_picture(tmp_path):
    mask = np.arange(60).reshape(6, 10) % 2
    image = png(STORED[6], "JPEG", exif=noting(6))
    fill(tmp_path, {"images/a.jpg": image, "masks/a.png": png(mask)})
    source = image_masks(tmp_path, classes=("a", "b"))
    assert source.input_shape == (6, 10, 3)
    np.testing.assert_array_equal(source.masks.read([0])[0], mask)


def test_landmarks_lie_in_the_turned_picture(tmp_path):
    """A spot at each landmark of the upright picture, which is stored on its side."""
    points = np.array([[60, 50], [90, 50], [75, 70], [62, 90], [88, 90]])
    image = np.zeros((140, 180), np.uint8)
    for x, y in points:
        image[y - 3 : y + 4, x - 3 : x + 4] = 255
    columns = ",".join(f"x{i},y{i}" for i in range(1, 6))
    row = ",".join(map(str, points.reshape(-1)))
    listed = f"name,{columns}\na/1.png,{row}\n"
    stored = png(image.T[::-1], exif=noting(6))
    fill(tmp_path, {"a/1.png": stored, "points.csv": listed})
    options = {"landmarks": tmp_path / "points.csv", "align": True, "channels": 1}
    source = folder(tmp_path, image_size=112, **options)
    x, y = source.landmarks[0].round().astype(int).T
    assert (source.read([0])[0, y, x, 0] > 200).all()
    assert source.preprocessing.alignment == "arcface"


@pytest.mark.parametrize("data", [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GRIB", b"no picture"])
def test_a_format_that_starts_programs_is_refused_with_the_file(data):
    with pytest.raises(ValueError) as error:
        decode(data, "face.jpg in people", 3)
    says = str(error.value)
    assert says.startswith("face.jpg in people must be a whole 8-bit image, got a file")
    assert "JPEG, PNG" in says and "\n" not in says and "BytesIO" not in says


def test_pictures_are_opened_in_one_place_with_a_list_of_formats():
    package = pathlib.Path(fedfr_jax.__file__).parent
    found = [
        (path.name, line.strip())
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\bImage\.open\b|\bimread\b|\bcv2\.imdecode\b", line)
    ]
    assert found == [
        ("decoding.py", "return Image.open(io.BytesIO(data), formats=FORMATS)")
    ]
    assert set(FORMATS) == {"BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}


@pytest.mark.parametrize("kind", [*FORMATS, "MPO"])
def test_known_formats_are_read(kind):
    image = decode(png(UPRIGHT, kind), "x", 3)
    assert image.size == (10, 6) and image.mode == "RGB"


def test_a_picture_is_stretched_cut_or_inverted():
    image = Image.fromarray(UPRIGHT)
    of = lambda size, **how: prepare_image(image, size, Preprocessing(**how))
    cut = np.asarray(Image.fromarray(UPRIGHT[:, 2:8]))
    np.testing.assert_array_equal(of((6, 6)), cut)
    np.testing.assert_array_equal(of((6, 10), inverted=True), 255 - UPRIGHT)
    kernels = [of((3, 5), resize="stretch", kernel=x) for x in ("bilinear", "bicubic")]
    assert kernels[0].shape == (3, 5, 3) and (kernels[0] != kernels[1]).any()
