"""Config files."""

import runpy

from ml_collections import ConfigDict

from fedfr_jax.config import files

SHARED = """
from ml_collections import ConfigDict

def get_config():
    row = {"algorithm": {"name": "fedprox", "mu": 0.1}, "learning_rate": 0.1}
    config = ConfigDict({"seed": 3, "methods": {"a": row, "b": {**row, "rounds": 2}}})
    config.partition = {"seed": config.get_ref("seed")}
    return config.lock()
"""


def test_a_section_that_stands_twice_in_a_file_is_changed_in_one_place(tmp_path):
    path = tmp_path / "shared.py"
    path.write_text(SHARED)
    config = files.load(path)
    config.methods.a.algorithm.mu = 0.5
    config.seed = 4
    assert config.methods.b.algorithm.mu == 0.1
    assert config.partition.seed == 4 and config.is_locked


def test_no_two_places_of_a_shipped_config_are_one():
    offenders = []
    for name, path in files.shipped().items():
        for word in runpy.run_path(str(path)).get("DATA") or (None,):
            sections = list(sections_of(files.load(path, word), name))
            places = {id(section): place for place, section in sections}
            offenders += [x for x, section in sections if places[id(section)] != x]
    assert sections and not offenders


def sections_of(config, place):
    for key, value in vars(config)["_fields"].items():
        if isinstance(value, ConfigDict):
            yield f"{place}.{key}", value
            yield from sections_of(value, f"{place}.{key}")
