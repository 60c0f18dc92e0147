"""A work folder belongs to one config and one process."""

import pytest

from fedfr_jax.config.files import restore
from fedfr_jax.runs.workdir import claim, claim_on_all_processes, stored_config


def test_a_folder_belongs_to_one_config_and_one_process(tmp_path):
    text = '{"seed": 0, "model": {"depth": 20}, "evaluation": {"fars": [0.1]}}'
    with claim(tmp_path, text):
        with pytest.raises(ValueError, match="cannot be used by two processes"):
            claim(tmp_path, text).close()
    for change, message in [
        (("20", "64"), "got model.depth 20 there and 64 here"),
        (("0.1", "0.2"), "evaluation.fars.* here. Use another --workdir, or omit"),
    ]:
        with pytest.raises(ValueError, match=message):
            claim(tmp_path, text.replace(*change)).close()
    claim(tmp_path, text.replace("0.1", "0.2"), but_for="evaluation").close()


def test_overwrite_takes_nothing_from_a_live_run(tmp_path):
    with claim(tmp_path, '{"seed": 0}'):
        rows = tmp_path / "fedfr" / "rows.bin"
        rows.parent.mkdir()
        rows.write_text("of the live run")
        with pytest.raises(ValueError, match="cannot be used by two processes"):
            with claim_on_all_processes(tmp_path, '{"seed": 1}', is_fresh=True):
                pass
        assert rows.read_text() == "of the live run"
        assert stored_config(tmp_path) == {"seed": 0}
    elsewhere = tmp_path.parent / f"{tmp_path.name}-data"
    elsewhere.mkdir()
    (elsewhere / "image").write_text("not of the run")
    (tmp_path / "data").symlink_to(elsewhere)
    with claim_on_all_processes(tmp_path, '{"seed": 1}', is_fresh=True):
        left = {p.name for p in tmp_path.iterdir() if "manifest" not in p.name}
        assert left == {".lock", "config.json"}
        assert stored_config(tmp_path) == {"seed": 1}
        with pytest.raises(ValueError, match="cannot be used by two processes"):
            claim(tmp_path, '{"seed": 1}').close()
    assert (elsewhere / "image").exists()


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize(
    "name, text", [("notes.txt", "mine"), ("config.json", '{"name": "website"}')]
)
def test_a_folder_of_other_things_is_left_as_it_is(name, text, is_fresh, tmp_path):
    (tmp_path / name).write_text(text)
    says = f"must be empty or a run directory of fedfr_jax, got a folder with {name}. "
    with pytest.raises(ValueError, match=says):
        claim(tmp_path, '{"seed": 0}', is_fresh=is_fresh)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_what_shells_and_file_managers_leave_is_no_obstacle_and_stays(tmp_path):
    names = [".git", "desktop.ini", "slurm-7.out", "train.log"]
    for name in names:
        (tmp_path / name).touch()
    claim(tmp_path, '{"seed": 0}').close()
    (tmp_path / "fedavg").mkdir()
    claim(tmp_path, '{"seed": 1}', is_fresh=True).close()
    left = {x.name for x in tmp_path.iterdir() if "manifest" not in x.name}
    assert left == {*names, ".lock", "config.json"}


def test_a_run_is_known_without_its_lock(tmp_path):
    """As in a copy without hidden files."""
    claim(tmp_path, '{"seed": 0}').close()
    (tmp_path / "partition.json").touch()
    (tmp_path / ".lock").unlink()
    claim(tmp_path, '{"seed": 1}', is_fresh=True).close()
    assert not (tmp_path / "partition.json").exists()


def test_a_flipped_bit_of_a_kept_config_is_found(tmp_path):
    claim(tmp_path, '{"seed": 0, "rate": 0.10}').close()
    path = tmp_path / "config.json"
    whole = path.read_text()
    assert (
        restore(path).to_dict() == stored_config(tmp_path) == {"seed": 0, "rate": 0.1}
    )
    path.write_text(whole.replace("0.1", "0.5"))
    says = "config.json must be undamaged .*, but: its digest is not"
    for read in (restore, lambda path: claim(tmp_path, '{"seed": 0, "rate": 0.5}')):
        with pytest.raises(ValueError, match=says):
            read(path)
    path.write_text(whole.replace("\n", " "))  # the same values
    assert stored_config(tmp_path) == {"seed": 0, "rate": 0.1}
