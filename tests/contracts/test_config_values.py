"""Every shipped config by value, as a seed of 7 makes it: nothing drifts unseen.

A config that is changed on purpose is written down anew by
`python -m tests.contracts.test_config_values`, and the difference read.
"""

import json
import os
import pathlib
import runpy

from fedfr_jax.config.files import load, shipped

KEPT = pathlib.Path(__file__).with_name("configs.json")


def values() -> dict[str, dict]:
    """{"comparison:mnist": {section: its value}} of all configs."""
    os.environ["FEDFR_DATA"] = "data"
    found = {}
    for name, path in shipped().items():
        module = runpy.run_path(str(path))
        words = list(module.get("DATA") or [None])
        for word in words:
            config = load(path, word)
            with config.unlocked():
                config.seed = 7  # what refers to it follows
            text = config.to_json_best_effort()
            found[name if word is None else f"{name}:{word}"] = json.loads(text)
    return found


def test_configs_have_the_values_that_are_written_down(monkeypatch):
    monkeypatch.setenv("FEDFR_DATA", "data")  # and put back
    kept, found = json.loads(KEPT.read_text()), values()
    changed = [
        f"{name}.{section}: {kept.get(name, {}).get(section)} is now {value}"
        for name, config in found.items()
        for section, value in config.items()
        if kept.get(name, {}).get(section) != value
    ]
    gone = [name for name in kept if kept[name].keys() - found.get(name, {}).keys()]
    assert not changed + gone, "\n".join(changed + gone)


def text_of(found: dict[str, dict]) -> str:
    """JSON with a line for every section, so that a difference can be read."""
    configs = []
    for name, config in sorted(found.items()):
        lines = [f"  {json.dumps(key)}: {json.dumps(config[key])}" for key in config]
        configs.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(configs) + "\n}\n"


if __name__ == "__main__":
    KEPT.write_text(text_of(values()))
