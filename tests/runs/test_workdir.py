"""A work folder belongs to one process, and its trained stages to one config."""

import contextlib
import copy
import json
import types

import jax
import pytest

from fedfr_jax import manifest
from fedfr_jax.central.settings import Training
from fedfr_jax.config.files import restore
from fedfr_jax.federated.settings import Federation
from fedfr_jax.runs import timing, workdir
from fedfr_jax.runs.workdir import check_stages, stage_settings
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
    """CONFIG as JSON, with `section__key` at another value."""
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


def kept(folder):
    return [x for x in STAGES if (folder / x / "checkpoints" / "3").is_dir()]


ALL = "pretrained,fedavg,fedfr"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"methods__mine": {}}, None),
        ({"evaluation__fars": [0.2]}, None),
        ({"federation__clients_per_device": 2, "pretrain__checkpoint_every": 2}, None),
        (
            {"methods__fedfr__scale": 64},
            "methods.fedfr.scale 30 in the trained stage fedfr and 64 here. .* another "
            "--workdir, or train again with --overwrite=fedfr.",
        ),
        ({"federation__rounds": 2}, "rounds 3 .* fedavg and 2 here.*=fedavg."),
        (
            {"federation__rounds": 5, "methods__fedfr__scale": 64},
            "federation.rounds 3 in",
        ),
        ({"seed": 1}, f"seed 0 in .*pretrained and 1 here.*--overwrite={ALL}."),
        ({"model__depth": 64}, f"model.depth 20 .* 64 here.*--overwrite={ALL}."),
    ],
)
def test_a_trained_stage_with_other_settings_is_refused(change, words, folder):
    text = changed(**change)
    if words:
        with pytest.raises(ValueError, match=words):
            workdir.claim(folder, text, STAGES)
        with pytest.raises(ValueError, match=words):
            check_stages(folder, STAGES, json.loads(text))
    else:
        workdir.claim(folder, text, STAGES).close()
    assert kept(folder) == [*STAGES]
    assert workdir.stored_config(folder) == (CONFIG if words else json.loads(text))


def test_a_named_stage_is_trained_again_with_those_that_start_from_it(folder):
    change = changed(methods__fedfr__scale=64)
    with pytest.raises(ValueError, match="--overwrite must be one of .*got 'nosuch'"):
        workdir.claim(folder, change, STAGES, overwrite=["nosuch"])
    with pytest.raises(ValueError, match="pretrain.fars None .* 0 here"):
        text = changed(methods__fedfr__scale=64, pretrain__fars=0)
        workdir.claim(folder, text, STAGES, overwrite=["fedfr"])
    assert kept(folder) == [*STAGES]
    workdir.claim(folder, change, STAGES, overwrite=["fedfr"]).close()
    assert kept(folder) == ["pretrained", "fedavg", "central"]
    workdir.claim(folder, change, STAGES, overwrite=["pretrained"]).close()
    assert kept(folder) == ["central"]
    (folder / "fedfr" / "store").mkdir()  # of a network that no checkpoint has
    workdir.claim(folder, changed(methods__fedfr__scale=2), STAGES).close()
    assert not (folder / "fedfr" / "store").exists()


def test_more_rounds_go_on_where_nothing_else_has_changed(folder, capsys):
    workdir.claim(folder, changed(federation__rounds=5), STAGES).close()
    assert kept(folder) == [*STAGES]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{x} continues from its last checkpoint." for x in STAGES][1:3]
    adapted = ROUNDS._replace(final_adaptation=FinalAdaptation(None, 1))
    stages = {**STAGES, "fedfr": Stage(adapted, "pretrained")}
    with pytest.raises(ValueError, match="fedfr cannot continue from 5: its last roun"):
        workdir.claim(folder, changed(federation__rounds=7), stages)


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
    words = "pretrained cannot continue from 3: its learning rates depend on all epochs"
    refused = pytest.raises(ValueError, match=words)
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        with contextlib.nullcontext() if goes_on else refused:
            workdir.claim(folder, changed(pretrain__epochs=6), stages).close()
    assert kept(folder) == [*STAGES]


def test_settings_and_logs_that_were_changed_are_named_before_training(folder):
    stage = folder / "fedfr"
    manifest.write_object(folder / "config.json", json.loads(changed(seed=1)))
    with pytest.raises(ValueError, match="got seed 0 in the trained stage pretrained"):
        workdir.claim(folder, changed(seed=1), STAGES)
    log, settings = stage / "clients.jsonl", stage / "settings.json"
    log.write_text("1\n")
    entry = manifest.entry_of(b"1\n")._replace(is_log=True)
    manifest.cover(stage, {log.name: entry})
    log.write_text("1\n2\n")
    workdir.claim(folder, changed(), STAGES).close()
    for path in (log, settings):
        whole = path.read_text()
        path.write_text(whole.replace("1", "9").replace("3", "4"))
        for check in (
            lambda: check_stages(folder, STAGES, CONFIG),
            lambda: workdir.claim(folder, changed(), STAGES),
        ):
            with pytest.raises(ValueError, match=f"{path.name} must be as it was writ"):
                check()
        path.write_text(whole)
    workdir.claim(folder, changed(), STAGES).close()


def test_checkpoints_alone_go_on_under_any_config(folder):
    """As of a finished run, to train it on with other identities."""
    for path in (folder / "fedfr").glob("*.json"):
        path.unlink()
    workdir.claim(folder, changed(methods__fedfr__scale=64), STAGES).close()
    assert kept(folder) == [*STAGES]


LEFT_AS_THEY_ARE = {
    "federation": {
        "checkpoint_every",
        "rounds_per_call",
        "steps_per_loop",
        "evaluate_every",
        "log_clients_every",
        "clients_per_device",
        "data_placement",
        "stream_buffer_gib",
    },
    "pretrain": {"checkpoint_every"},
}


@pytest.mark.parametrize(
    "section, keys, stages",
    [
        ("federation", Federation._fields, {"fedavg", "fedfr"}),
        ("pretrain", Training._fields, {*STAGES}),
    ],
)
def test_every_key_touches_the_stages_that_depend_on_it(section, keys, stages):
    def touched(key):
        new = {section: {key: "other"}}
        return {
            name
            for name in STAGES
            if stage_settings(name, STAGES, {section: {}})
            != stage_settings(name, STAGES, new)
        }

    free = LEFT_AS_THEY_ARE[section]
    assert {x: touched(x) for x in keys} == {
        x: set() if x in free else stages for x in keys
    }


def test_a_folder_is_of_one_process_and_is_evaluated_with_its_config(tmp_path):
    text = '{"seed": 0, "model": {"depth": 20}, "evaluation": {"fars": [0.1]}}'
    with workdir.claim(tmp_path, text, {}):
        with pytest.raises(ValueError, match="cannot be used by two processes"):
            workdir.claim(tmp_path, text, {})
    other = json.loads(text.replace("0.1", "0.2"))
    workdir.check_config(tmp_path, other, but_for="evaluation")
    with pytest.raises(ValueError, match="got model.depth 20 there and 64 here"):
        workdir.check_config(tmp_path, json.loads(text.replace("20", "64")))
    with pytest.raises(ValueError, match="fars.* here. Use another --workdir, or omit"):
        workdir.check_config(tmp_path, other)


def test_overwrite_takes_nothing_from_a_live_run_nor_behind_a_link(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "data"
    anew = lambda: workdir.claim_on_all_processes(
        run, '{"seed": 1}', {}, overwrite=True
    )
    with workdir.claim(run, '{"seed": 0}', {}):
        (run / "rows.bin").write_text("of the live run")
        with pytest.raises(ValueError, match="cannot be used by two processes"):
            with anew():
                pass
        assert (run / "rows.bin").exists()
        assert workdir.stored_config(run) == {"seed": 0}
    elsewhere.mkdir()
    (elsewhere / "image").write_text("not of the run")
    (run / "data").symlink_to(elsewhere)
    for name in (".git", "desktop.ini", "slurm-7.out", "train.log"):
        (run / name).touch()
    with anew():
        left = {x.name for x in run.iterdir() if x.name[0] != "."}
        kept = {"desktop.ini", "slurm-7.out", "train.log"}
        assert left == {"config.json", "manifest.json", *kept}
        assert workdir.stored_config(run) == {"seed": 1}
    assert (elsewhere / "image").exists() and (run / ".git").exists()


@pytest.mark.parametrize("overwrite", [(), True])
@pytest.mark.parametrize(
    "name, text", [("notes.txt", "mine"), ("config.json", '{"name": "website"}')]
)
def test_a_folder_of_other_things_is_left_as_it_is(name, text, overwrite, tmp_path):
    (tmp_path / name).write_text(text)
    words = f"must be empty or a run directory of fedfr_jax, got a folder with {name}. "
    with pytest.raises(ValueError, match=words):
        workdir.claim(tmp_path, '{"seed": 0}', {}, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_a_run_is_known_without_its_lock(tmp_path):
    """As in a copy without hidden files."""
    workdir.claim(tmp_path, '{"seed": 0}', {}).close()
    (tmp_path / ".lock").unlink()
    workdir.claim(tmp_path, '{"seed": 1}', {}, overwrite=True).close()
    assert workdir.stored_config(tmp_path) == {"seed": 1}


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "[" * 99999, '{"seed": 3}'])
def test_a_damaged_config_is_named(text, tmp_path):
    workdir.claim(tmp_path, '{"seed": 0}', {}).close()
    path = tmp_path / "config.json"
    assert restore(path).to_dict() == workdir.stored_config(tmp_path) == {"seed": 0}
    path.write_text(text)
    with pytest.raises(ValueError, match="config.json must be as it was written"):
        restore(path)


def test_seconds_of_a_run_are_of_all_its_starts(tmp_path):
    path = tmp_path / "seconds.json"
    manifest.write_object(path, {"seconds": 60.0, "uses": {"training": 50.0}})
    times = timing.RunTime(path)
    times.uses["training"] += 1
    assert 60 < times.save() < 90
    assert timing.RunTime(path).uses["training"] == 51
