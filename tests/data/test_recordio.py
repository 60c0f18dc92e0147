"""RecordIO against mxnet's own bytes, both layouts, and damaged files."""

import io

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources.npz import ReadOnly
from fedfr_jax.data.sources.recordio import (
    MAGIC_BYTES,
    Record,
    read_headers,
    read_index,
    read_record,
    recordio,
)
from tests.data.recordio_files import write_face_set, write_recordio


def jpeg(value, size=(16, 12)):
    file = io.BytesIO()
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(file, "jpeg")
    return file.getvalue()


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
    index = read_index(path.with_suffix(".idx"))
    return [read_record(data, int(offset), "r") for offset in index.offsets]


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


def test_vector_labels_are_read_whole(case):
    path, arrays = case("C")
    records = read_all(path)
    np.testing.assert_array_equal(records[0].label, arrays["C_label2"])
    np.testing.assert_array_equal(records[1].label, arrays["C_label237"])
    assert [r.payload for r in records] == payloads(arrays, "C")[:-1]


def test_continuation_chunks_get_their_magic_word_back(case):
    path, arrays = case("D")
    records = read_all(path)
    assert [r.payload for r in records] == payloads(arrays, "D")[:-1]
    assert [(r.label, r.id, r.id2) for r in records] == [
        (i, 10 * i, 7) for i in range(5)
    ]


def test_chunks_out_of_order_are_no_record():
    """Flags: 0 whole, 1 first, 2 middle, 3 last."""
    body = bytes(24) + b"x" * 8  # a header, all of it 0, and an image

    def read(*flags):
        words = [(flag << 29 | len(body)).to_bytes(4, "little") for flag in flags]
        data = b"".join(MAGIC_BYTES + word + body for word in words)
        return read_record(np.frombuffer(data, np.uint8), 0, "r").payload

    for flags in [(0,), (0, 2), (1, 3), (1, 2, 3), (1, 2, 2, 3, 1)]:
        parts = flags.index(3) + 1 if 3 in flags else 1
        assert read(*flags) == MAGIC_BYTES.join([body] * parts)[24:]
    for flags in [(2, 3), (3,), (1, 0), (1, 1, 3), (1, 2, 0), (4,)]:
        with pytest.raises(ValueError, match="r must begin with the magic word"):
            read(*flags)
    for flags in [(1,), (1, 2)]:
        with pytest.raises(ValueError, match="r must end within the file"):
            read(*flags)


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_the_writer_makes_mxnets_bytes(case, tmp_path, name):
    path, arrays = case(name)
    write_recordio(tmp_path / "own.rec", read_all(path))
    assert (tmp_path / "own.rec").read_bytes() == arrays[f"{name}_rec"].tobytes()
    assert (tmp_path / "own.idx").read_bytes() == arrays[f"{name}_idx"].tobytes()


def test_a_written_face_set_is_the_classic_layout(golden, tmp_path):
    arrays = golden("bigface_recordio")
    images = payloads(arrays, "A")[:-1]
    write_face_set(tmp_path / "train.rec", images, arrays["A_labels"])
    assert (tmp_path / "train.rec").read_bytes() == arrays["A_rec"].tobytes()
    assert (tmp_path / "property").read_text() == "3,112,112"
    assert recordio(tmp_path).input_shape == (112, 112, 3)
    with pytest.raises(ValueError, match="labels must ascend from 0 without gaps"):
        write_face_set(tmp_path / "x.rec", images[:2], [0, 2])


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
    offsets = read_index(tmp_path / "r.idx").offsets[::-1]
    assert read_headers(data, offsets, "r")[0].tolist() == [5, 4, 3, 2, 1]


def test_header_labels_win_where_identity_ranges_differ(tmp_path):
    images = [jpeg(v) for v in (10, 20, 30)]
    records = [Record(np.array([4, 6]), b"")]
    records += [Record(float(c), image) for c, image in zip((5, 5, 2), images)]  # noqa: B905
    records += [Record(np.array([1, 3]), b""), Record(np.array([3, 4]), b"")]
    write_recordio(tmp_path / "train.rec", records)
    source = recordio(tmp_path)
    assert [source.names[c] for c in source.labels] == ["5", "5", "2"]


def test_more_images_than_float32_counts_are_counted_in_the_index(tmp_path):
    records = [Record(np.array([2**24, 2**24 + 4]), b"")]
    records += [Record(float(c), jpeg(c)) for c in (0, 0, 1)]
    records += [Record(np.array(pair), b"") for pair in ([1, 3], [3, 4])]
    write_recordio(tmp_path / "train.rec", records)
    assert recordio(tmp_path).labels.tolist() == [0, 0, 1]


def test_the_first_of_several_labels_is_the_identity(tmp_path):
    records = [Record(np.array([i, 7.5, -1]), jpeg(i)) for i in range(3)]
    write_recordio(tmp_path / "train.rec", records)
    assert recordio(tmp_path).labels.tolist() == [0, 1, 2]


def test_property_fixes_classes_and_size(tmp_path):
    write_recordio(tmp_path / "train.rec", [Record(2.0, jpeg(9)), Record(0.0, jpeg(7))])
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


@pytest.mark.parametrize("label", [-1.0, 0.5, np.nan, 2.0**24, 2.0**31, np.inf])
def test_labels_that_are_no_class_numbers_are_refused(tmp_path, label):
    write_recordio(tmp_path / "train.rec", [Record(0, jpeg(1)), Record(label, jpeg(2))])
    with pytest.raises(ValueError, match="train.rec must have integer labels"):
        recordio(tmp_path)


def test_the_cache_is_used_until_the_rec_changes(tmp_path):
    write_recordio(tmp_path / "train.rec", [Record(c, jpeg(c)) for c in (0, 1)])
    cache = tmp_path / "cache" / "index.npz"
    recordio(tmp_path, cache=cache)
    kept = cache.read_bytes()
    assert recordio(tmp_path, cache=cache).labels.tolist() == [0, 1]
    assert cache.read_bytes() == kept
    index = tmp_path / "train.idx"
    index.write_text(index.read_text().replace("0\t", "7\t"))  # the .idx alone
    assert recordio(tmp_path, cache=cache).labels.tolist() == [1, 0]
    write_recordio(tmp_path / "train.rec", [Record(c, jpeg(c)) for c in (1, 0, 1)])
    assert recordio(tmp_path, cache=cache).labels.tolist() == [1, 0, 1]
    cache.write_bytes(cache.read_bytes()[:-99])
    assert recordio(tmp_path, cache=cache).labels.tolist() == [1, 0, 1]
    with np.load(cache) as arrays:
        rows = dict(arrays)
    for name, forged in [("offsets", -4), ("offsets", 10**6), ("keys", 1.0)]:
        np.savez(cache, **{**rows, name: rows[name] + forged})
        assert recordio(tmp_path, cache=cache).labels.tolist() == [1, 0, 1]
    np.savez(cache, **{**rows, "offsets": rows["offsets"][[1, 0, 2]]})
    with pytest.raises(ValueError, match="train.rec record 0 must .*got id"):
        recordio(tmp_path, cache=cache).read(np.array([1, 0]))


@pytest.mark.parametrize("content", [b"", b"a diary", b"PK and more"])
def test_a_file_that_is_no_cache_stays_as_it_is(tmp_path, content):
    write_recordio(tmp_path / "train.rec", [Record(c, jpeg(c)) for c in (0, 1)])
    (tmp_path / "mine").write_bytes(content)
    with pytest.raises(ValueError, match="mine must be a new file or a cache"):
        recordio(tmp_path, cache=tmp_path / "mine")
    np.savez(tmp_path / "mine.npz", images=np.zeros(3))
    kept = (tmp_path / "mine.npz").read_bytes()
    with pytest.raises(ValueError, match="mine.npz must be a new file"):
        recordio(tmp_path, cache=tmp_path / "mine.npz")
    assert (tmp_path / "mine").read_bytes() == content
    assert (tmp_path / "mine.npz").read_bytes() == kept


def test_a_cache_that_is_only_read_is_not_written(tmp_path):
    write_recordio(tmp_path / "train.rec", [Record(c, jpeg(c)) for c in (0, 1)])
    cache = ReadOnly(tmp_path / "index.npz")
    assert recordio(tmp_path, cache=cache).labels.tolist() == [0, 1]
    assert not (tmp_path / "index.npz").exists()


def shift(path, key, by):
    """Change the offset of a key of an .idx, in place of another's."""
    lines = dict(line.split("\t") for line in path.read_text().splitlines())
    lines[key], lines[by] = lines[by], lines[key]
    path.write_text("".join(f"{k}\t{place}\n" for k, place in lines.items()))


def test_swapped_offsets_give_nobody_anothers_label(tmp_path):
    images, labels = [jpeg(30 * i) for i in range(8)], [0, 0, 1, 1, 2, 2, 3, 3]
    write_face_set(tmp_path / "train.rec", images, labels)
    shift(tmp_path / "train.idx", "2", "3")
    with pytest.raises(ValueError, match="record 2 must .* got id 3 with label 1"):
        recordio(tmp_path)
    (tmp_path / "property").unlink()
    numbered = [Record(float(c), jpeg(c), c) for c in range(8)]
    write_recordio(tmp_path / "train.rec", numbered)
    assert recordio(tmp_path, image_size=8).labels.tolist() == [*range(8)]
    shift(tmp_path / "train.idx", "0", "3")
    with pytest.raises(ValueError, match="record 0 must .* got id 3"):
        recordio(tmp_path)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_header_that_miscounts_the_images_is_refused(tmp_path, count):
    """4 images, then the records 5 and 6 of two people."""
    images = [Record(float(c), jpeg(c), k) for k, c in enumerate([0, 0, 1, 1], 1)]
    people = [Record(np.array(pair), b"") for pair in ([1, 3], [3, 5])]
    head = Record(np.array([count + 1, count + 3]), b"")
    write_recordio(tmp_path / "train.rec", [head, *images, *people])
    with pytest.raises(
        ValueError, match="train.rec must have the number of images in record 0"
    ):
        recordio(tmp_path)


def test_a_truncated_rec_is_told_when_it_is_opened(case):
    path, _ = case("A")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"train.rec record 10.*truncated, copy it"):
        recordio(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"train.rec record 10.*only 3000 bytes"):
        recordio(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="train.rec must be a RecordIO file"):
        recordio(path)


def test_an_offset_off_the_magic_word_blames_the_idx(case):
    path, _ = case("B")
    index = path.with_suffix(".idx")
    index.write_text(index.read_text().replace("\t992", "\t996"))
    with pytest.raises(ValueError, match="magic word, .*byte 996.*does not belong"):
        recordio(path)


def test_a_wrong_offset_outside_the_probes_is_told_when_read(tmp_path):
    images = [jpeg(i % 256) for i in range(600)]
    write_face_set(tmp_path / "train.rec", images, np.arange(600) // 2)
    index = tmp_path / "train.idx"
    shift(index, "13", "14")  # of one person
    with pytest.raises(ValueError, match="record 13 must .* got id 14 with label 6"):
        recordio(tmp_path).read(np.array([12]))
    shift(index, "13", "14")
    lines = index.read_text().splitlines()
    lines[2] = f"2\t{int(lines[2].split()[1]) + 4}"
    index.write_text("\n".join(lines))
    source = recordio(tmp_path)
    with pytest.raises(
        ValueError, match="train.rec record 2 must begin with the magic"
    ):
        source.read(np.array([1]))


def test_a_missing_key_and_broken_indices_are_named(case):
    path, _ = case("A")
    index = path.with_suffix(".idx")
    lines = index.read_text().splitlines()
    index.write_text("\n".join(lines[:3] + lines[4:]))
    with pytest.raises(ValueError, match="train.idx.*1 keys missing.*first 3"):
        recordio(path)
    index.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(
        ValueError, match="train.idx must list at least one key and each key once"
    ):
        recordio(path)
    for wrong in ("0\t0\n1\n", "key\tvalue\n", "0\t0.5\n", ""):
        index.write_text(wrong)
        with pytest.raises(ValueError, match="train.idx must "):
            recordio(path)
    index.unlink()
    with pytest.raises(ValueError, match="train.idx must "):
        recordio(path)


def test_a_record_that_is_no_image_is_named(tmp_path):
    write_recordio(tmp_path / "train.rec", [Record(0, jpeg(1)), Record(1, b"text")])
    with pytest.raises(ValueError, match="train.rec record 1 must be a whole 8-bit"):
        recordio(tmp_path).read(np.arange(2))


def test_an_index_of_millions_is_parsed_in_seconds(tmp_path):
    keys = np.arange(300_000)
    text = "".join(f"{k}\t{k * 3000}\n" for k in keys)
    (tmp_path / "train.idx").write_text(text)
    index = read_index(tmp_path / "train.idx")
    np.testing.assert_array_equal(index.keys, keys)
    np.testing.assert_array_equal(index.offsets, keys * 3000)


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
