"""A work folder belongs to one config and one process."""

import pytest

from fedfr_jax.runs.workdir import claim, claim_for_all


def test_a_folder_belongs_to_one_config_and_one_process(tmp_path):
    text = '{"seed": 0, "model": {"depth": 20}, "evaluation": {"fars": [0.1]}}'
    with claim(tmp_path, text):
        with pytest.raises(ValueError, match="must be used by one process"):
            claim(tmp_path, text).close()
    for change, message in [
        (("20", "64"), "got model.depth 20 there and 64 here"),
        (("0.1", "0.2"), "evaluation.fars"),
    ]:
        with pytest.raises(ValueError, match=message):
            claim(tmp_path, text.replace(*change)).close()
    claim(tmp_path, text.replace("0.1", "0.2"), but_for="evaluation").close()


def test_overwrite_takes_nothing_from_a_live_run(tmp_path):
    with claim(tmp_path, '{"seed": 0}'):
        rows = tmp_path / "fedfr" / "rows.bin"
        rows.parent.mkdir()
        rows.write_text("of the live run")
        with pytest.raises(ValueError, match="must be used by one process"):
            with claim_for_all(tmp_path, '{"seed": 1}', is_fresh=True):
                pass
        assert rows.read_text() == "of the live run"
        assert (tmp_path / "config.json").read_text() == '{"seed": 0}'
    elsewhere = tmp_path.parent / f"{tmp_path.name}-data"
    elsewhere.mkdir()
    (elsewhere / "image").write_text("not of the run")
    (tmp_path / "data").symlink_to(elsewhere)
    with claim_for_all(tmp_path, '{"seed": 1}', is_fresh=True):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "config.json"]
        assert (tmp_path / "config.json").read_text() == '{"seed": 1}'
        with pytest.raises(ValueError, match="must be used by one process"):
            claim(tmp_path, '{"seed": 1}').close()
    assert (elsewhere / "image").exists()
