"""JSON files that are damaged are named in one line."""

import pytest

from fedfr_jax.json_files import parse_json_lines, read_json

DAMAGED = [b"", b"{", b"\x00", b"\xff\xfe", b"[" * 10**5, b'{"a": 1} 2']


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_file_that_is_no_json_is_named(text, tmp_path):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(
        ValueError, match=r"a.json must be readable JSON, got "
    ) as error:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="b.json"):
        read_json(tmp_path / "b.json")


def test_the_kind_of_value_is_checked(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    assert read_json(path, list) == [1, 2]
    with pytest.raises(ValueError, match=r"a.json must be a JSON object, got \[1, 2\]"):
        read_json(path)


def test_lines_name_the_first_that_is_no_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"run": "x"}\n\n{"run": "y"}\n{"ru')
    rows = [{"run": "x"}, {"run": "y"}]
    assert parse_json_lines(path.read_bytes(), path, "run", torn=True) == rows
    with pytest.raises(ValueError, match="a.jsonl, line 4, must be a JSON object"):
        parse_json_lines(path.read_bytes(), path, "run")
    for line in ("[]", '{"run": [1]}', "{}", "[" * 10**5):
        path.write_text(f'{{"run": "x"}}\n{line}\n{{"run": "y"}}\n')
        with pytest.raises(
            ValueError, match='line 2, must be a JSON object with a "run"'
        ):
            parse_json_lines(path.read_bytes(), path, "run", torn=True)
