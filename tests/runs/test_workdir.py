"""What a changed config does to a work folder."""

import contextlib
import copy
import json
import shutil
import types

import jax
import pytest

from fedfr_jax import digest_json, manifest
from fedfr_jax.central.settings import Training
from fedfr_jax.federated.settings import Federation
from fedfr_jax.runs import workdir
from fedfr_jax.runs.stage_config import stage_config
from fedfr_jax.runs.stage_folders import check_stages
from fedfr_jax.types import CentralTrainer, FederatedTrainer, FinalAdaptation, Stage

CONFIG = {
    "seed": 0,
    "model": {"depth": 20},
    "pretrain": {"epochs": 3, "checkpoint_every": 1},
    "federation": {"rounds": 3, "clients_per_device": 1},
    "evaluation": {"fars": [0.1]},
    "methods": {"fedavg": {}, "fedfr": {"scale": 30}, "central": {"kind": "central"}},
}
NONE = CentralTrainer(*[None] * len(CentralTrainer._fields))
ROUNDS = FederatedTrainer(types.SimpleNamespace(privacy=None), None, None, None, None)
STAGES = {
    "pretrained": Stage(NONE),
    "fedavg": Stage(ROUNDS, "pretrained"),
    "fedfr": Stage(ROUNDS, "pretrained"),
    "central": Stage(NONE),
}


def changed(**values):
    """CONFIG with `section__key` at another value."""
    config = copy.deepcopy(CONFIG)
    for name, value in values.items():
        *sections, key = name.split("__")
        at = config
        for section in sections:
            at = at[section]
        at[key] = value
    return json.dumps(config)


@pytest.fixture
def folder(tmp_path):
    """A run whose stages all have a checkpoint."""
    workdir.claim(tmp_path, changed(), STAGES).close()
    for name in STAGES:
        (tmp_path / name / "checkpoints" / "3").mkdir(parents=True)
    return tmp_path


def trained(path):
    return (path / "checkpoints" / "3").is_dir()


def kept(folder):
    return [name for name in STAGES if trained(folder / name)]


def set_aside(folder, name):
    """The stage's folders of earlier settings."""
    return [path for path in folder.glob(f"{name}.old-*") if trained(path)]


@pytest.mark.parametrize(
    "change, left",
    [
        ({"methods__fedfr__scale": 64}, ["pretrained", "fedavg", "central"]),
        ({"federation__rounds": 2}, ["pretrained", "central"]),
        ({"methods__central__epochs": 1}, ["pretrained", "fedavg", "fedfr"]),
        ({"methods__mine": {}}, list(STAGES)),
        ({"evaluation__fars": [0.2]}, list(STAGES)),
        (
            {"federation__clients_per_device": 2, "pretrain__checkpoint_every": 2},
            list(STAGES),
        ),
    ],
)
def test_a_changed_setting_leaves_the_stages_that_it_does_not_touch(
    change, left, folder, capsys
):
    text = changed(**change)
    workdir.claim(folder, text, STAGES).close()
    assert kept(folder) == left
    assert workdir.stored_config(folder) == json.loads(text)
    lost = [name for name in STAGES if name not in left]
    assert [name for name in STAGES if set_aside(folder, name)] == lost
    says = capsys.readouterr().out
    assert says.count("\n") == bool(lost)
    if lost:
        names = f"kept are {', '.join(left)}; trained anew are {', '.join(lost)}, "
        assert names in says


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"seed": 1}, "seed 0 there and 1 here"),
        ({"model__depth": 64}, "model.depth 20 there and 64 here"),
    ],
)
def test_a_config_that_touches_every_stage_is_another_run(change, rule, folder):
    with pytest.raises(ValueError, match=rule):
        workdir.claim(folder, changed(**change), STAGES).close()
    assert kept(folder) == list(STAGES)
    assert workdir.stored_config(folder) == CONFIG


def test_a_correction_before_the_first_checkpoint_is_welcome(tmp_path):
    workdir.claim(tmp_path, changed(), STAGES).close()
    (tmp_path / "pretrained" / "store").mkdir(parents=True)  # of the wrong network
    workdir.claim(tmp_path, changed(model__depth=64), STAGES).close()
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    "restart, left",
    [
        (["fedfr"], ["pretrained", "fedavg", "central"]),
        (["pretrained"], ["central"]),
    ],
)
def test_a_stage_is_restarted_with_those_that_start_from_it(restart, left, folder):
    workdir.claim(folder, changed(), STAGES, restart=restart).close()
    assert kept(folder) == left
    with pytest.raises(ValueError, match="--restart must be one of .*got 'nosuch'"):
        workdir.claim(folder, changed(), STAGES, restart=["nosuch"])


def generation(folder, name):
    """Which training a stage's folder has, as `mark` has written it down."""
    return (folder / name / "checkpoints" / "3" / "training").read_text()


def mark(folder, training):
    """Write into the checkpoints of all stages which training they are of."""
    for name in STAGES:
        step = folder / name / "checkpoints" / "3"
        if not step.exists():
            step.mkdir(parents=True)
            (step / "training").write_text(training)


def test_going_back_takes_back_what_was_trained(tmp_path, capsys):
    scales = [30, 64, 16, 30, 64, 16]
    for number, scale in enumerate(scales):
        text = changed(methods__fedfr__scale=scale)
        workdir.claim(tmp_path, text, STAGES).close()
        mark(tmp_path, str(number))
        assert generation(tmp_path, "fedfr") == str(scales.index(scale))
        assert generation(tmp_path, "fedavg") == "0"
    assert len(set_aside(tmp_path, "fedfr")) == 2  # each of the other two, once
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        "config.methods.fedfr.scale was 64 and is 16: kept are pretrained, fedavg,"
        in last
    )
    assert last.endswith("central; taken back are fedfr.")


def test_a_row_that_is_taken_out_and_put_back_is_not_trained_anew(folder):
    mark(folder, "first")
    without = json.loads(changed())
    del without["methods"]["fedfr"]
    fewer = {name: stage for name, stage in STAGES.items() if name != "fedfr"}
    workdir.claim(folder, json.dumps(without), fewer).close()
    workdir.claim(folder, changed(), STAGES).close()
    assert kept(folder) == list(STAGES) and not set_aside(folder, "fedfr")


def test_every_restart_sets_aside_what_was_trained_before(folder):
    for training in ("1", "2", "3"):
        workdir.claim(folder, changed(), STAGES, restart=["fedfr"]).close()
        assert not trained(folder / "fedfr")
        workdir.claim(folder, changed(), STAGES).close()  # stopped, and started again
        assert not trained(folder / "fedfr")  # not the one that was to be replaced
        mark(folder, training)
    assert len(set_aside(folder, "fedfr")) == 3 and generation(folder, "fedfr") == "3"


def test_a_folder_of_an_earlier_version_has_records_from_then_on(folder):
    for name in STAGES:
        (folder / name / "settings.json").unlink()
    workdir.claim(folder, changed(methods__fedfr__scale=64), STAGES).close()
    assert kept(folder) == ["pretrained", "fedavg", "central"]
    workdir.claim(folder, changed(), STAGES).close()
    assert kept(folder) == list(STAGES)


def test_more_rounds_go_on_where_nothing_else_has_changed(folder, capsys):
    mark(folder, "first")
    workdir.claim(folder, changed(federation__rounds=5), STAGES).close()
    assert kept(folder) == list(STAGES)
    said = capsys.readouterr().out
    assert (
        "config.federation.rounds was 3 and is 5: kept are pretrained, fedavg" in said
    )
    assert "trained anew" not in said
    assert " fedavg resumes from its last checkpoint. fedfr resumes" in said
    more = {"federation__rounds": 7, "methods__fedfr__scale": 64}
    workdir.claim(folder, changed(**more), STAGES).close()
    assert kept(folder) == ["pretrained", "fedavg", "central"]
    workdir.claim(folder, changed(federation__rounds=4), STAGES).close()  # fewer
    assert kept(folder) == ["pretrained", "central"]


def test_a_last_round_that_has_adapted_clients_ends_a_stage(folder, capsys):
    adapted = ROUNDS._replace(final_adaptation=FinalAdaptation(None, 1))
    stages = {**STAGES, "fedfr": Stage(adapted, "pretrained")}
    workdir.claim(folder, changed(federation__rounds=5), stages).close()
    assert kept(folder) == ["pretrained", "fedavg", "central"]
    said = capsys.readouterr().out
    assert (
        "fedfr cannot continue from 3: its last round has adapted the clients." in said
    )


@pytest.mark.parametrize(
    "schedule, goes_on",
    [
        ({}, False),  # a cosine over all epochs
        ({"milestones": (0.9,), "warmup_fraction": 0.1}, False),  # in the fifth of six
        ({"milestones": (1.0,), "warmup_fraction": 0.0}, True),  # constant
    ],
)
def test_more_epochs_go_on_where_the_rates_so_far_stay(schedule, goes_on, folder):
    settings = Training(epochs=6, batch_size=8, **schedule)
    stages = {"pretrained": Stage(NONE._replace(settings=settings, num_rows=40))}
    says = "pretrained cannot continue from 3: its learning rates depend on all epochs"
    refused = (
        contextlib.nullcontext() if goes_on else pytest.raises(ValueError, match=says)
    )
    with jax.numpy_dtype_promotion("standard"), refused:  # for optax's schedules
        workdir.claim(folder, changed(pretrain__epochs=6), stages).close()
    assert trained(folder / "pretrained") and not set_aside(folder, "pretrained")


def test_another_config_in_the_place_of_the_runs_changes_no_stage(folder):
    """The records of stages say what they are, whatever config.json says."""
    digest_json.write(folder / "config.json", json.loads(changed(seed=1)))
    with pytest.raises(ValueError, match="got seed 0 there and 1 here"):
        workdir.claim(folder, changed(seed=1), STAGES).close()
    with pytest.raises(ValueError, match="pretrained must have .* got seed 0 there"):
        check_stages(folder, STAGES, json.loads(changed(seed=1)))
    workdir.claim(folder, changed(), STAGES).close()
    assert kept(folder) == list(STAGES)


def test_a_log_that_was_changed_is_named_before_anything_is_trained(folder):
    log = folder / "fedfr" / "clients.jsonl"
    log.write_text("1\n")
    entry = manifest.entry_of(b"1\n")._replace(is_log=True)
    manifest.cover(folder / "fedfr", {log.name: entry})
    for text in ("1\n", "1\n2\n"):
        log.write_text(text)
        check_stages(folder, STAGES, CONFIG)
        workdir.claim(folder, changed(), STAGES).close()
    log.write_text("2\n")
    with pytest.raises(ValueError, match="clients.jsonl must be as it was written"):
        check_stages(folder, STAGES, CONFIG)
    with pytest.raises(ValueError, match="clients.jsonl must be as it was written"):
        workdir.claim(folder, changed(), STAGES)
    workdir.claim(folder, changed(), STAGES, restart=["fedfr"]).close()


def test_a_damaged_record_names_its_file_once(folder):
    record = folder / "fedfr" / "settings.json"
    record.write_text("{")
    with pytest.raises(ValueError, match="but: it must be readable JSON") as error:
        check_stages(folder, STAGES, CONFIG)
    assert str(error.value).count(str(record)) == 1


def test_a_checkpoint_names_the_settings_that_it_was_trained_with(folder, tmp_path):
    place = folder / "fedfr" / "checkpoints" / "3" / "default"
    place.mkdir()
    (place / "manifest.json").touch()
    (place / "settings.sha256").write_text("0f" * 32)
    with pytest.raises(ValueError, match="fedfr must have .* the digest 0f0f.* there"):
        check_stages(folder, STAGES, CONFIG)
    copy = tmp_path / "copy"  # of the checkpoints alone, to go on under another config
    shutil.copytree(folder / "fedfr/checkpoints", copy / "fedfr/checkpoints")
    workdir.claim(copy, changed(seed=1), STAGES).close()
    assert trained(copy / "fedfr")
    check_stages(copy, STAGES, json.loads(changed(seed=1)))


ALL, ROUNDED = set(STAGES), {"fedavg", "fedfr"}
LEFT_AS_THEY_ARE = {
    "federation": {
        "checkpoint_every",
        "rounds_per_call",
        "steps_per_loop",
        "evaluate_every",
        "clients_per_device",
        "data_placement",
        "stream_buffer_gib",
    },
    "pretrain": {"checkpoint_every"},
}


@pytest.mark.parametrize(
    "section, keys, stages",
    [("federation", Federation._fields, ROUNDED), ("pretrain", Training._fields, ALL)],
)
def test_every_key_touches_the_stages_that_depend_on_it(section, keys, stages):
    old, new = {section: {}}, lambda key: {section: {key: "other"}}
    of = lambda name, config: stage_config(name, STAGES, config)
    found = {
        key: {name for name in STAGES if of(name, old) != of(name, new(key))}
        for key in keys
    }
    free = LEFT_AS_THEY_ARE[section]
    assert found == {key: set() if key in free else stages for key in keys}


def test_what_is_said_of_a_damaged_config_keeps_what_is_trained(folder, capsys):
    (folder / "config.json").write_text("[1, 2]")
    says = "config.json must be undamaged .* got .* Restore a copy, or move it away"
    with pytest.raises(ValueError, match=says):
        workdir.claim(folder, changed(), STAGES).close()
    capsys.readouterr()
    (folder / "config.json").rename(folder / "config.json.damaged")
    workdir.claim(folder, changed(), STAGES).close()
    said = capsys.readouterr().out
    assert "taken to be" not in said  # their records say what they are
    assert kept(folder) == list(STAGES)
    assert workdir.stored_config(folder) == CONFIG


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "[" * 99999])
def test_a_damaged_config_is_named_and_damaged_seconds_are_forgotten(text, tmp_path):
    workdir.claim(tmp_path, "{}").close()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json must be undamaged JSON"):
        workdir.claim(tmp_path, "{}").close()
    (tmp_path / "seconds.json").write_text(text)
    assert workdir.ElapsedTime(tmp_path / "seconds.json").note() < 60
