"""What is wrong with a set or with its settings is one line that names it."""

import io
import os
import pickle

import numpy as np
import pytest

from fedfr_jax.data.align import ARCFACE_TEMPLATE
from fedfr_jax.data.sources import SOURCES, open_source, path_settings
from tests.data.files import fill, png

NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
JPEG, WIDE = png(NOISE, "jpeg"), png(np.full((4, 4), 40000, np.uint16))
ONE = {"a/1.png": png(1)}
POINTS = ",".join(map(str, (ARCFACE_TEMPLATE * 0.05 + 1).reshape(-1)))
COLUMNS = "name," + ",".join(f"x{i},y{i}" for i in range(1, 6))
LFW = {"Ann/Ann_0001.png": png(1), "Ann/Ann_0002.png": png(2), "Bo/Bo_0001.png": png(3)}
LANDMARKS = [COLUMNS, *(f"{name},{POINTS}" for name in LFW)]
ALIKE = "Bo/Bo_0001.png" + ",5" * 10
PAIRS = "1\nAnn\t1\t2\nAnn\t2\tBo\t1\n"


def npz(**arrays):
    """Bytes of an .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def lfw(landmarks=LANDMARKS, pairs=PAIRS):
    """A small LFW with other lists."""
    lists = {"landmarks.csv": "\n".join(landmarks), "pairsDevTrain.txt": pairs}
    return {**LFW, **lists}


DIGITS = np.zeros((6, 5, 4), np.uint8)


def digits(**changed):
    """An .npz of six images with other arrays."""
    arrays = {"images": DIGITS, "labels": np.arange(6), **changed}
    return {"d.npz": npz(**arrays)}


TWICE = ("images", "images")
TWO_SHAPES = {"images": ("images", "small"), "labels": ("labels", "labels")}


def characters(*rows):
    """Omniglot with these rows of its table."""
    images, labels = np.ones((2, 2, 8, 8), bool), np.array([[0, 0], [1, 1]])
    listed = "\n".join(["label,alphabet,character", *rows])
    archive = npz(images=images, labels=labels)
    return {"images_background.npz": archive, "classes.csv": listed}


def pickled(*content):
    """A .bin set."""
    return {"s.bin": pickle.dumps(content)}


def listed(*lines):
    """Images and a csv for re-identification."""
    names = {name: png(1) for name in ("a.png", "b/c.png", "d.png")}
    return {**names, "set.csv": "\n".join(["file,identity,camera,split", *lines])}


def rated(*lines, header="worker,imagePair,score"):
    """FLICKR-AES of one rater and some more lines."""
    rows = [f"ann,{i}.png,{score}" for i, score in enumerate((1, 2, 3, 4, 5))]
    images = {f"40K/{i}.png": png(i) for i in range(5)}
    text = "\n".join([header, *rows, *lines])
    return {"FLICKR-AES_image_labeled_by_each_worker.csv": text, **images}


def mask(left, right, size=(4, 6)):
    """A mask whose halves are of two classes."""
    pixels = np.full(size, left)
    pixels[:, size[1] // 2 :] = right
    return png(pixels)


def masked(**changed):
    """Two images with masks; a mask may be another, or None."""
    masks = {"a": mask(0, 1), "b": mask(2, 2), **changed}
    files = {f"masks/{name}.png": data for name, data in masks.items() if data}
    return files | {f"images/{name}.png": png(1, size=(4, 6)) for name in "ab"}


def table(*lines):
    """A .csv of people."""
    return {"t.csv": "\n".join(lines)}


PEOPLE = ("age,job,where,ill", "20,cook,x,no", "40,cook,x,no")
RATERS = {"min_ratings": 4, "max_ratings": 9, "min_per_score": 1}
CASES = {  # source: (files, settings, words of the error)
    "folder": [
        ({"a/notes.txt": b""}, {}, "must have images .*got none"),
        ({"a/1.png": WIDE}, {}, "more than 8 bits"),
        (ONE, {"subfolder": "val"}, "must have images below val/"),
        (ONE, {"filename_pattern": "x"}, "filename_pattern must be one of directory"),
        (ONE, {"filename_pattern": "subject-view"}, "a/1.png in .*must match filen"),
        (ONE, {"align": True}, "landmarks must be a csv"),
        ({"a/1.jpg": JPEG[:300]}, {}, "a/1.jpg in .*must be a whole 8-bit image"),
        ({"a/1.jpg": b"text"}, {}, "a/1.jpg in .*Replace the file"),
        (ONE, {"channels": 4}, "one of .1, 3., got 4"),
        (ONE, {"image_size": 0}, "image_size must .*, got 0"),
        (ONE, {"sice": 3}, "source folder .*image_size.*'sice'"),
    ],
    "image_classes": [({"train/cat/1.png": png(0)}, {}, "below train/ and test/, got")],
    "lfw": [
        (lfw(LANDMARKS[:-1]), {}, "landmarks.csv.*got none for 1, .*Bo_0001"),
        (lfw([*LANDMARKS, LANDMARKS[1]]), {}, "list each image once, got Ann/Ann_0001"),
        (lfw([*LANDMARKS[:-1], ALIKE]), {}, "finite, distinct landmarks.*Bo"),
        (lfw(["name,x1", "a,b"]), {}, "csv with the columns name, x1, y1"),
        (lfw(), {"image_size": (56, 40)}, "image_size must be square or 112:96"),
        (lfw(pairs="1\nAnn\t1\t2\n"), {}, "two lines per pair .*'1' and 1 others"),
        (lfw(pairs="1\nAnn\t1\t2\nAnn\t1\tBo\n"), {}, "lines `name i other j`"),
        (lfw(pairs="1\nAnn\t1\t2\tx\nAnn\t1\tBo\t1\n"), {}, "lines `name i j`"),
        (lfw(pairs="1\nAnn\t1\t9\nAnn\t1\tBo\t1\n"), {}, "Ann_0009, which is not in"),
        (lfw(pairs=""), {}, "Train.txt must .* that its first line counts"),
    ],
    "mnist": [
        ({"x": b""}, {}, r"must have exactly one .npz, got \[\]"),
        ({"a.npz": b"", "b.npz": b""}, {}, "got .'a.npz', 'b.npz'.. Choose one"),
    ],
    "arrays": [
        (digits(), {"labels": "names"}, "undamaged .npz with the array names"),
        (digits(), {"images": "seen"}, "undamaged .npz with the array seen"),
        ({"d.npz": digits()["d.npz"][:-20]}, {}, "d.npz must be an undamaged .npz"),
        (digits(c=np.arange(5)), {"cameras": "c"}, "c must be integers, 6"),
        (digits(labels=np.ones(6)), {}, "labels must be integers, one per label"),
        (digits(images=DIGITS * 1.0), {}, r"images must be \[6, H, W\]"),
        (digits(images=DIGITS[:5]), {}, r"images must be \[6, H, W\]"),
        (digits(images=DIGITS[..., :0]), {}, r"images must be \[6, H, W\]"),
        (digits(), {"images": TWICE}, "one key each, or without is_test two each"),
        (digits(small=DIGITS[:, :3]), TWO_SHAPES, "must have images of one shape"),
    ],
    "omniglot": [
        (characters("0,Greek,a"), {}, "classes.csv.*every label, got none for 1"),
        (characters("0,A,a", "0,A,b", "1,A,c"), {}, "each label once, got 0 twice"),
    ],
    "bin_pairs": [
        (pickled([b"x"] * 3, [True]), {}, "two images per pair .*got 3 images and 1"),
        (pickled([], []), {}, "two images per pair"),
        (pickled(1, 2, 3), {}, "s.bin must be a pickle of"),
        (pickled([b"x"] * 2, ["no"]), {}, "a truth value, got 2 images and 1 val"),
    ],
    "listed_pairs": [
        ({**ONE, "p": "# x\na b 1\n\nb a 0\n"}, {"pairs": "p"}, "line 4 must be a new"),
        ({**ONE, "p": "a b yes\n"}, {"pairs": "p"}, "line 1 must be two images"),
        ({**ONE, "p": "\n"}, {"pairs": "p"}, "must have at least one pair"),
    ],
    "market1501": [({"3_s1_1.png": png(0)}, {}, "3_s1_1.png in .* no camera in the")],
    "3dpes": [({"2_c1s1_1.png": png(0)}, {}, "RGB/1_18_FRAME_2_RGB.bmp, got 2_c1s1")],
    "reid_csv": [
        (listed("a.png,x,3,train", "e.png,y,1,query"), {}, "1 of 2 .* first e.png"),
        (listed("a.png,ann,,train"), {}, "line 2 must have .* integer camera.* ''"),
        (listed("a.png, ,1,train"), {}, "line 2 must have an identity.* got ''"),
        (listed("a.png,ann,1,test"), {}, "split of train, query, gallery, got .*test"),
        (listed(*["a.png,ann,1,train"] * 2), {}, "list each image once, got a.png"),
        (listed("a.png,x,1,train", "d.png,x,2,query"), {}, "got x of a.png in .* both"),
        (listed("a.png,ann"), {}, "set.csv must be a csv with the columns file"),
        (listed(), {}, "set.csv must list images, got none"),
    ],
    "flickr_aes": [
        (rated(header="worker,image,score"), {}, "csv with the columns worker, image"),
        (rated("ann,1.png,good"), {}, "must be in .1, 5., got .good."),
        (rated("ann,1.png"), {}, "with the columns .* line 7 is not"),
        (rated("", "ann,1.png,6"), {}, "line 8: the score of 1.png by"),
        (rated(), {"min_ratings": 9}, "9 to 9 ratings and .* none of 1"),
        (rated("ann,99.png,1"), {}, "got 1 of 6 missing, the first 99.png"),
    ],
    "image_masks": [
        (masked(b=None), {}, "images/b.png in .* must have a mask, got none"),
        (masked(b=mask(0, 3)), {}, r"masks/b.png in .* ignore_values \[255\], got 3"),
        (masked(a=mask(0, 1, (6, 4))), {}, r"image's size \(4, 6\), got \(6, 4\)"),
        (masked(a=png(0)), {}, "masks/a.png in .* one byte per pixel.*got RGB"),
        (masked(a=b"cut"), {}, "masks/a.png in .* must be a whole mask"),
        ({**masked(), "x/images/a.png": png(0)}, {}, "list each pair of images once"),
        (masked(b=mask(255, 255)), {}, "got none of dog, while 50.0% .* ignored"),
        (masked(), {"ignore_values": (2,)}, "different numbers, got 0 to 2 and .2."),
        (masked(), {"masks": ".*"}, "masks must be a regular .* with a group `pair`"),
        (masked(), {"images": "(?P<pair>x)"}, "match images = .*got none"),
        (masked(), {"labels": "identity"}, "labels must be 'largest' .*got 'identity'"),
        (masked(), {"labels": "size"}, "labels must be one of .*got 'size'"),
        (masked(), {"background": ("see",)}, "background must be names .*got see"),
        (masked(), {"classes": {"a": 3, "b": 3}}, "different numbers, got 3 to 3"),
        (masked(), {"classes": ()}, "classes must have different names"),
        (masked(), {"classes": ("a", "a")}, "classes must have different names"),
        (masked(), {"classes": [*map(str, range(257))]}, r"numbers in \[0, 255\]"),
    ],
    "table": [
        (table(*PEOPLE), {"label": "sick"}, "must have the column 'sick'"),
        (table(*PEOPLE, "1,2"), {}, "t.csv, line 4, must have 4 cells, got 2"),
        (table(PEOPLE[0]), {}, "t.csv must have rows"),
        (table("ill,ill", "1,2"), {"client": None}, "distinct column names"),
        (table(), {}, "t.csv must have"),
        (table(*PEOPLE, "1,cook,x, "), {}, "line 4, must have a value in .* 'ill'"),
        (table(*PEOPLE, "1,cook,,no"), {}, "must have a value in column 'where'"),
    ],
    "fake_data": [({}, {"num_identities": 0}, "num_identities must be .*got 0")],
    "orl": [({}, {"data_dir": "nowhere"}, "data_dir must exist, got .*nowhere")],
    "imagenet": [({}, {}, "one of .'3dpes', .*, 'viper'., got 'imagenet'")],
}
DEFAULTS = {
    "folder": {"image_size": 4},
    "arrays": {"path": "d.npz"},
    "bin_pairs": {"path": "s.bin"},
    "reid_csv": {"path": "set.csv"},
    "flickr_aes": {"image_size": 4, **RATERS},
    "image_masks": {"classes": ("sky", "cat", "dog")},
    "table": {"path": "t.csv", "label": "ill", "client": "where"},
}


@pytest.mark.parametrize(
    "name, files, settings, words",
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_one_line_says_what_is_wrong(name, files, settings, words, tmp_path):
    settings = {**DEFAULTS.get(name, {}), **settings}
    for key in path_settings(name) if name in SOURCES else ():
        if key in ("path", "data_dir"):
            settings[key] = os.path.join(fill(tmp_path, files), settings.get(key, ""))
    with pytest.raises(ValueError, match=words) as error:
        open_source(name, **settings).read(np.arange(1))
    assert "\n" not in str(error.value)
