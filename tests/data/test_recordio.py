"""RecordIO against mxnet's own bytes, both layouts, and damaged files."""

import io

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources.recordio import (
    MAGIC_BYTES,
    Record,
    read_labels,
    read_offsets,
    read_record,
    recordio,
)
from tests.data.files import png
from tests.data.recordio_files import write_recordio


def payloads(arrays, case):
    ends = np.cumsum(arrays[f"{case}_payload_len"])
    return [part.tobytes() for part in np.split(arrays[f"{case}_payload_concat"], ends)]


@pytest.fixture
def case(golden, tmp_path):
    """Put a golden case's files into a folder; return the .rec and the arrays."""

    def put(name):
        arrays = golden("bigface_recordio")
        for kind in ("rec", "idx"):
            (tmp_path / f"train.{kind}").write_bytes(arrays[f"{name}_{kind}"].tobytes())
        return tmp_path / "train.rec", arrays

    return put


def read_all(path):
    data = np.fromfile(path, np.uint8)
    _, offsets = read_offsets(path.with_suffix(".idx"))
    return [read_record(data, int(offset), "r") for offset in offsets]


def decode(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_classic_set_is_read_as_mxnet_reads_it(case):
    path, arrays = case("A")
    source = recordio(path)
    assert source.labels.tolist() == arrays["A_labels"].tolist()
    assert source.names == ("0", "1", "2")
    expected = [decode(data) for data in payloads(arrays, "A")[:-1]]
    np.testing.assert_array_equal(source.read(np.arange(7)), expected)
    np.testing.assert_array_equal(read_all(path)[0].label, arrays["A_header0"])


def test_im2rec_set_without_header_record_is_read(case):
    path, arrays = case("B")
    source = recordio(path.parent)  # the folder will do
    assert source.labels.tolist() == arrays["B_labels"].tolist()
    expected = [decode(data) for data in payloads(arrays, "B")[:-1]]
    np.testing.assert_array_equal(source.read(np.arange(5)), expected)


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_the_writer_makes_mxnets_bytes(case, tmp_path, name):
    path, arrays = case(name)
    write_recordio(tmp_path / "own.rec", read_all(path))
    assert (tmp_path / "own.rec").read_bytes() == arrays[f"{name}_rec"].tobytes()
    assert (tmp_path / "own.idx").read_bytes() == arrays[f"{name}_idx"].tobytes()


def test_any_payload_survives_writing_and_reading(tmp_path):
    random = np.random.default_rng(0)
    words = [MAGIC_BYTES, b"abcd", b"xyz", b"", b"\0", MAGIC_BYTES * 2]
    written = [
        Record(float(i), b"".join(random.choice(words, 6)), i, 2**40 + i)
        for i in range(60)
    ]
    write_recordio(tmp_path / "r.rec", written)
    assert read_all(tmp_path / "r.rec") == written
    # The header itself may hold the magic word, here as id.
    write_recordio(tmp_path / "h.rec", [Record(2.0, b"q", 0xCED7230A)])
    assert read_all(tmp_path / "h.rec") == [Record(2.0, b"q", 0xCED7230A)]


def test_labels_are_gathered_from_all_headers_at_once(tmp_path):
    written = [
        Record(1.0, MAGIC_BYTES + b"x"),
        Record(2.0, b""),
        Record(np.array([3.0, 9.0]), b"abc"),
        Record(np.array([4.0]), MAGIC_BYTES),
        Record(5.0, b"y", 0xCED7230A),
    ]
    write_recordio(tmp_path / "r.rec", written)
    data = np.fromfile(tmp_path / "r.rec", np.uint8)
    offsets = read_offsets(tmp_path / "r.idx")[1][::-1]
    assert read_labels(data, offsets, "r").tolist() == [5, 4, 3, 2, 1]


def test_more_images_than_float32_counts_are_counted_in_the_index(tmp_path):
    records = [Record(np.array([2**24, 2**24 + 4]), b"")]
    records += [Record(float(c), png(c)) for c in (0, 0, 1)]
    records += [Record(np.array(pair), b"") for pair in ([1, 3], [3, 4])]
    write_recordio(tmp_path / "train.rec", records)
    assert recordio(tmp_path).labels.tolist() == [0, 0, 1]


def test_property_fixes_classes_and_size(tmp_path):
    write_recordio(tmp_path / "train.rec", [Record(2.0, png(9)), Record(0.0, png(7))])
    (tmp_path / "property").write_text("5,8,8\n")
    source = recordio(tmp_path)
    assert source.names == tuple("01234") and source.labels.tolist() == [2, 0]
    assert source.input_shape == (8, 8, 3)
    assert recordio(tmp_path, image_size=4, channels=1).input_shape == (4, 4, 1)
    (tmp_path / "property").write_text("2,8,8")
    with pytest.raises(ValueError, match=r"labels in \[0, 2\), got 2.0 for image 0"):
        recordio(tmp_path)
    (tmp_path / "property").write_text("many")
    with pytest.raises(ValueError, match="property must be `classes,height,width`"):
        recordio(tmp_path)


def test_decoding_agrees_with_mxnet_and_opencv_within_jpeg_rounding(golden):
    arrays = golden("bigface_recordio")
    found = decode(arrays["E_jpeg"].tobytes()).astype(int)
    for name in ("E_mx_imdecode_rgb", "E_cv2_rgb"):
        np.testing.assert_allclose(found, arrays[name].astype(int), atol=4)


def test_real_im2rec_file_is_read(data_dir):
    source = recordio(data_dir("formats"))
    assert source.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert source.input_shape == (112, 112, 3)
    assert source.read(np.arange(8)).std() > 20


def test_ranges_that_do_not_cover_the_images_leave_labels_to_the_headers(tmp_path):
    images = [Record(float(c), png(c)) for c in (5, 5, 2)]
    records = [Record(np.array([4, 6]), b""), *images, Record(np.array([1, 3]), b"")]
    write_recordio(tmp_path / "train.rec", records)
    source = recordio(tmp_path)
    assert [source.names[c] for c in source.labels] == ["5", "5", "2"]


def test_damaged_files_are_named(case):
    path, _ = case("A")
    index = path.with_suffix(".idx")
    whole, lines = path.read_bytes(), index.read_text()
    first_image = lines.splitlines()[1]
    for rec, idx, message in [
        (whole[:-4], lines, r"train.rec record 10 must be a whole.*truncated: copy"),
        (b"", lines, "train.rec must be a RecordIO file"),
        (whole, lines.replace("0\t0", "0\t4"), "record 0 must be .*does not belong"),
        (whole, f"{lines}{first_image}", "train.idx must list each key once"),
        (whole, "key\tvalue", "train.idx must have lines `key<TAB>byte offset`"),
    ]:
        path.write_bytes(rec)
        index.write_text(idx)
        with pytest.raises(ValueError, match=message):
            recordio(path)


@pytest.mark.parametrize("label", [-1.0, 0.5, np.nan, 2.0**24])
def test_labels_that_are_no_class_numbers_are_refused(tmp_path, label):
    write_recordio(tmp_path / "train.rec", [Record(0, png(1)), Record(label, png(2))])
    with pytest.raises(ValueError, match="train.rec must have integer labels"):
        recordio(tmp_path)
