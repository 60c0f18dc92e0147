"""Configs by name and file, their mistakes, and what the launcher says about itself."""

import json
import re
import sys

import jax
import pytest
from ml_collections import ConfigDict

import fedfr_jax
from fedfr_jax import distributed
from fedfr_jax.cli import describe, flags, launch
from fedfr_jax.cli.main import main
from fedfr_jax.config import files
from fedfr_jax.config.build import plain
from fedfr_jax.config.files import find, load, restore, shipped
from fedfr_jax.runs import workdir

FAMILIES = describe.load_families()
MINE = """from {place} import base


def get_config():
    config = base.get_config()
    config.seed = 7
    return config
"""


@pytest.fixture(autouse=True)
def imports_of_its_own(monkeypatch):
    """What a config makes importable is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {name for name in sys.modules if name.partition(".")[0] == "configs"}
    yield
    for name in {n for n in sys.modules if n.partition(".")[0] == "configs"} - before:
        del sys.modules[name]


def config_in(folder, text, name="mine.py"):
    """A config file of `text` in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def parsed(*argv):
    """What a command with the shared flags reads."""
    parser = flags.new_parser("fedfr some", "")
    flags.define(parser)
    return flags.parse(parser, list(argv))


def test_a_shipped_config_has_a_short_and_a_long_name():
    path = shipped()["fedfr/demo"]
    names = ["demo", "fedfr/demo", "fedfr/demo.py", "configs/fedfr/demo.py", str(path)]
    assert [find(name).resolve() for name in names] == [path] * len(names)
    assert "base" not in shipped()


def test_a_config_may_be_handed_a_word(tmp_path):
    text = MINE.format(place="configs").replace("get_config():", "get_config(of=1):", 1)
    path = config_in(tmp_path, text.replace("seed = 7", "task = str(of)"))
    assert parsed(f"--config={path}").config.task == "1"
    assert parsed(f"--config={path}:two").config.task == "two"
    plain = config_in(tmp_path, MINE.format(place="configs"), "plain.py")
    with pytest.raises(
        ValueError, match="must run without errors, got TypeError: .*argument"
    ):
        parsed(f"--config={plain}:two")
    comparison = parsed("--config=comparison:cifar100_resnet").config
    assert comparison.data.name == "cifar100" and "fedbn" in comparison.methods
    with pytest.raises(ValueError, match="data must be one of .*got 'svhn'"):
        parsed("--config=classification/comparison:svhn")


def test_an_unknown_config_lists_names_and_not_every_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config_in(tmp_path, MINE, "other.py")
    with pytest.raises(ValueError) as error:
        find("nosuch.py")
    assert "'fedfr/demo'" in str(error.value) and "other" not in str(error.value)
    for i in range(40):
        config_in(tmp_path, MINE, f"many{i}.py")
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="and 11 more"):
        find("nosuch")


@pytest.mark.parametrize("place", ["fedfr_jax.configs", "configs"])
@pytest.mark.parametrize("folder", ["anywhere", "configs/deep"])
def test_a_config_may_lie_anywhere(place, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(config_in(tmp_path / folder, MINE.format(place=place))).seed == 7


def test_a_folder_called_configs_goes_before_the_shipped_one(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name / "configs"
        config_in(folder, f"NAME = '{name}'", "settings.py")
        text = "from configs import base, settings\n"
        text += "def get_config():\n    return base.ConfigDict({'n': settings.NAME})"
        assert load(config_in(folder / "deep", text)).n == name


def test_a_config_imports_what_lies_beside_it(tmp_path):
    config_in(tmp_path, "SEED = 3", "beside_the_config.py")
    text = "import beside_the_config\n" + MINE.format(place="configs")
    assert load(config_in(tmp_path, text)).seed == 7
    assert sys.modules.pop("beside_the_config").SEED == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1\ndef get_config(:", "line 2, RAN SyntaxError: "),
        ("x = 1\0", "mine.py RAN "),
        ("# coding: nosuch", "mine.py RAN SyntaxError: unknown encoding"),
        ("raise ValueError", "line 1, RAN ValueError."),
        ("x = 1", "must define get_config(), got no such function."),
        ("\n\ndef get_config():\n  return 3", "line 3, must return an ml_collections"),
        ("\nimport nosuch", "line 2, RAN ModuleNotFoundError: No module"),
        ("def get_config():\n  return x", "line 2, RAN NameError: name 'x'"),
        ("def get_config(x):\n  return x", " RAN TypeError: get_config()"),
        ("raise OSError('two\\nlines')", "line 1, RAN OSError: two lines."),
        ("import sys; sys.exit('enough')", "line 1, RAN SystemExit: enough."),
    ],
)
def test_a_mistake_in_a_config_is_a_line_with_its_place(text, message, tmp_path):
    path = config_in(tmp_path, text)
    with pytest.raises(ValueError) as error:
        load(path)
    assert message.replace("RAN", "must run without errors, got") in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_neighbor_is_placed_there(tmp_path):
    other = config_in(tmp_path, "x = (", "broken_neighbor.py")
    with pytest.raises(
        ValueError, match="must run without errors, got SyntaxError"
    ) as error:
        load(config_in(tmp_path, "import broken_neighbor"))
    assert str(error.value).startswith(f"{other}, line 1, ")


def test_the_work_folder_keeps_the_config(tmp_path):
    path = config_in(tmp_path, MINE.format(place="configs"))
    values = parsed(f"--config={path}", "--config.model.widths=(4, 8)")
    text = values.config.to_json_best_effort(indent=1)
    run = tmp_path / "run"
    workdir.claim(run, text, {}).close()
    again = parsed("--workdir", str(run), "--config.evaluation.fars=(0.5,)").config
    assert again.model.widths == (4, 8)
    assert again.evaluation.fars == (0.5,)
    assert flags.CONFIG_FILE == workdir.CONFIG
    stored = json.loads(again.to_json_best_effort())
    workdir.check_config(run, stored, but_for="evaluation")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_kept_config_is_the_config(name, tmp_path):
    text = load(shipped()[name]).to_json_best_effort()
    (tmp_path / "config.json").write_text(text)
    config = restore(tmp_path / "config.json")
    assert isinstance(config, ConfigDict)
    assert json.loads(config.to_json_best_effort()) == json.loads(text)
    is_list = lambda value: isinstance(value, list)
    assert not any(map(is_list, jax.tree.leaves(config.to_dict(), is_leaf=is_list)))


@pytest.mark.parametrize("text", ["{", "[3]", "\xff", "[" * 9999])
def test_a_damaged_kept_config_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json"):
        restore(tmp_path / "config.json")


@pytest.mark.parametrize(
    "word, value",
    [
        ("--config.seed=3", 3),
        ("--config.seed=None", None),
        ("--config.seed=true", True),
        ("--config.seed=1e-3", 1e-3),
        ("--config.seed=(1, 2)", (1, 2)),
        ("--config.seed=[a", "[a"),
        ("--config.seed=a=b", "a=b"),
    ],
)
def test_a_value_is_a_python_literal_or_text(word, value):
    assert parsed("--config=demo", word).config.seed == value


@pytest.mark.parametrize("words", [["--fast=maybe"], ["--slow"], ["fast"], ["--fas"]])
def test_a_wrong_flag_is_one_line(words):
    def some(*, fast: bool = False):
        """Do something.

        Args:
          fast: at once
        """

    parser = flags.build_parser("fedfr some", some)
    assert [flags.parse_flags(parser, x).fast for x in ([], ["--fast"])] == [
        False,
        True,
    ]
    with pytest.raises(ValueError, match="fedfr some: .*'?" + words[0][-4:]):
        flags.parse_flags(parser, words)


@pytest.mark.parametrize(
    "words, handed",
    [
        (["--processes_per_host=3", "train", "--config=x"], ["train", "--config=x"]),
        (
            ["--processes_per_host", "3", "--", "train", "--host_index=1"],
            ["train", "--host_index=1"],
        ),
        (["--processes_per_host=3", "train", "--help"], ["train", "--help"]),
    ],
)
def test_launch_hands_on_everything_after_its_own_flags(words, handed, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "start", lambda *args, **of: started.append(args))
    assert main(["launch", *words]) == 0
    command, ids = started[0]
    assert command[3:] == handed and ids == range(3)


def test_launch_refuses_flags_of_others_before_the_command(capsys):
    assert main(["launch", "--config=x", "train"]) == 2
    assert "got '--config=x'" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys, monkeypatch):
    monkeypatch.setattr(fedfr_jax, "__version__", "1.2.3", raising=False)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "fedfr_jax 1.2.3\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_listed_with_settings_and_a_line(family, capsys):
    assert main(["describe", family]) == 0
    text = capsys.readouterr().out
    for name in FAMILIES[family]:
        starts = f"{name}(", f"{name}\n", f'"{name}": {{'  # of a task, a variant
        assert any(start in text for start in starts)


def test_keys_of_rows_of_every_task_are_described(capsys):
    known = {"label_smoothing", "class_weights", "triplet_margin"}
    known |= {"contrastive_weight", "identities_per_batch", "personal_epochs"}
    known |= {"use_public_data", "loss"}
    assert main(["describe", "sections"]) == 0
    text = capsys.readouterr().out
    keys = set(re.findall(r"\w+(?=[=,)])", text))
    sections = {"methods.algorithm.fedfr", "methods.loss.reid", "evaluation.faces"}
    assert sections <= set(re.findall(r"^[\w.]+", text, re.MULTILINE))
    assert known <= keys
    assert main(["describe", "scenarios", "by_camera"]) == 0
    assert "camera_groups=None" in capsys.readouterr().out


def test_a_member_is_described_whole(capsys):
    assert main(["describe", "models", "iresnet"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("iresnet(input_shape, depth=50, ")
    assert "Args:" in text and "<function" not in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["nosuch"], "got 'nosuch'"),
        (["algorithm"], "got 'algorithm' (did you mean algorithms?)"),
        (["models", "nosuch"], "member must be one of ["),
        (["models", "resnt"], "got 'resnt' (did you mean resnet?)"),
    ],
)
def test_an_unknown_family_or_member_lists_the_known(words, message, capsys):
    assert main(["describe", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_member_is_found_without_its_family(capsys):
    assert main(["describe", "folder"]) == 0
    assert capsys.readouterr().out.startswith("folder(path")
    assert main(["describe", "fedadam"]) == 0  # a server optimizer, and a method
    found = capsys.readouterr().out
    assert "fedadam(" in found and "\"fedadam\": {'algorithm'" in found


def test_a_sections_own_seed_leaves_the_runs_seed_alone():

    def seeds(*words):
        config = parsed("--config=fedfr/table_lfw", *words).config
        return config.seed, config.partition.seed

    assert seeds("--config.seed=3") == (3, 3)
    assert seeds("--config.partition.seed=5") == (0, 5)
    both = ["--config.partition.seed=5", "--config.seed=3"]
    assert seeds(*both) == seeds(*reversed(both)) == (3, 5)


def test_methods_keep_the_order_of_the_config(tmp_path):
    methods = {name: {"learning_rate": 0.1} for name in ("zeta", "alpha", "mid")}
    config = ConfigDict({"task": "faces", "methods": methods})
    assert list(plain(config)["methods"]) == ["zeta", "alpha", "mid"]
    (tmp_path / "config.json").write_text(flags.config_text(config))
    again = restore(tmp_path / "config.json")
    assert list(plain(again)["methods"]) == ["zeta", "alpha", "mid"]


def test_near_names_are_offered(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"did you mean fedper/cifar10\?"):
        find("fedper/cifar")
    with pytest.raises(ValueError, match=r"config must have keys of .*mean seed\?"):
        flags.set_key(ConfigDict({"seed": 0, "data": {}}), "sede", 1)
    assert main(["trian"]) == 2
    assert "(did you mean train?)" in capsys.readouterr().out
    (tmp_path / "README.md").write_text("# Title\n")
    words = ["train", "--config=demo", f"--workdir={tmp_path / 'README.md'}"]
    assert main(words) == 2
    assert "--workdir must be a folder, got the file" in capsys.readouterr().err


def test_a_system_that_does_not_say_which_cores_are_ours_counts_all(monkeypatch):
    monkeypatch.delattr(distributed.os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(distributed.os, "cpu_count", lambda: 6)
    environment = {}
    distributed.use_every_core(environment, num_processes=2)
    assert f"{distributed.DEVICES_FLAG}=3" in environment["XLA_FLAGS"]
    assert distributed.num_cores() == 6


def test_a_part_that_a_method_does_not_have_yet_is_set_by_its_settings():
    config = ConfigDict({"methods": {"fedfr": {"algorithm": "fedfr"}}, "pretrain": {}})
    flags.set_key(config, "methods.fedfr.loss.margin", 0.3)
    flags.set_key(config, "methods.fedfr.algorithm.branch.weight", 3.0)
    flags.set_key(config, "pretrain.loss.scale", 64.0)
    algorithm = {"name": "fedfr", "branch": {"weight": 3.0}}
    assert config.to_dict() == {
        "methods": {"fedfr": {"algorithm": algorithm, "loss": {"margin": 0.3}}},
        "pretrain": {"loss": {"scale": 64.0}},
    }
    with pytest.raises(ValueError, match="config.methods must have keys of .'fedfr'"):
        flags.set_key(config, "methods.fedrf.loss.margin", 0.3)
    with pytest.raises(ValueError, match="config must have keys of .*mean methods"):
        flags.set_key(config, "method.fedfr.loss.margin", 0.3)
