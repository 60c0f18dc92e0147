"""A plan of a config: memory as the compiler has it, and nothing read."""

import json
import pathlib
import runpy

import jax
import pytest
from PIL import Image

from fedfr_jax import mesh
from fedfr_jax.cli.main import main
from fedfr_jax.configs import base
from fedfr_jax.convolutions import use_forms
from fedfr_jax.federated.privacy.accountant import Mechanism, build_accountant
from fedfr_jax.plan.aot import stage_programs
from fedfr_jax.plan.devices import DEVICES
from fedfr_jax.plan.dummy_inputs import SIZES, blind_experiment
from fedfr_jax.plan.needs import needs_function, privacy_notes
from fedfr_jax.plan.stages import max_that_fits, plan_stage
from fedfr_jax.runs.shapes import stage_shapes
from fedfr_jax.types import CentralTrainer
from tests.tasks import tiny
from tests.tasks.test_privacy import config_of

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if p.stem != "base")
SPLIT = {
    "num_clients": 2,
    "ids_per_client": 3,
    "num_public_ids": 16,
    "client_images": (10, 20),
    "public_images": (6, 10),
    "num_test_images": 4,
    "num_unseen_ids": 6,
}
FEDAVG = base.FEDAVG
FEDFR = {"algorithm": {"name": "fedfr", "max_hard_negatives": 5}}
NETWORK = {"name": "sphereface", "blocks": (1, 1), "widths": (8, 16)}
# Of few operations, where a plan is traced a dozen times.
SMALL = {"name": "cnn", "widths": (8, 16), "embedding_dim": 32}
TINY = {"name": "mlp", "hidden_dim": 32}


@pytest.fixture(autouse=True)
def as_in_a_run():
    """Schedules of optax count on it; a plan traces XLA's own convolutions."""
    with jax.numpy_dtype_promotion("standard"), use_forms("xla"):
        yield


def faces(pretrain=None, **methods):
    """A config of faces that are not there."""
    return {
        "seed": 0,
        "data": {"name": "recordio", "path": "faces_emore/train.rec", "image_size": 16},
        "partition": {"name": "ms1m", **SPLIT},
        "model": {**NETWORK, "embedding_dim": 32},
        "pretrain": {"batch_size": 64, "epochs": 2, **(pretrain or {})},
        "federation": {"rounds": 3, "batch_size": 8, "local_epochs": (2, 1)},
        "evaluation": {},
        "methods": methods,
    }


def lowered(config, name):
    """A stage's program, its examples on the devices."""
    federation = {**config["federation"], "data_placement": "device"}
    with mesh.use_described(jax.devices(), memory=10**12):
        experiment = blind_experiment(
            {**config, "federation": federation}, is_placed=True
        )
        (program,) = stage_programs(experiment, name).values()
    return program


FROZEN = {
    "task": "classification",
    "data": {"name": "fake_data", "num_identities": 4, "image_size": 16},
    "partition": {"num_clients": 8},
    "model": {"name": "mlp", "hidden_dim": 2048},
    "federation": {"rounds": 3, "batch_size": 4, "clients_per_device": 4},
    "methods": {"head": {"learning_rate": 0.1, "frozen": "fc", "features": "off"}},
}
ZERO3 = {
    "sharding": (("kernel", "zero3"),),
    "class_parallel": True,
    "class_chunk_size": 2,
}


@pytest.mark.parametrize(
    "name, config",
    [
        pytest.param(
            "pretrained", faces({**ZERO3, "gradient_accumulation_steps": 2}), id="zero3"
        ),
        pytest.param("fedfr", faces(fedfr=FEDFR), id="fedfr"),
        pytest.param("head", FROZEN, id="frozen"),
    ],
)
def test_memory_is_the_compilers_within_a_factor_of_two_and_a_half(name, config):
    """XLA's convolutions on a CPU keep transposed copies, which no GPU has."""
    experiment = blind_experiment(config)
    needs = needs_function(experiment, name)()
    found = lowered(config, name).compile().memory_analysis()
    told = found.temp_size_in_bytes + found.argument_size_in_bytes
    told += found.output_size_in_bytes - found.alias_size_in_bytes
    stored = experiment.task.dataset
    if not isinstance(experiment.stages[name].trainer, CentralTrainer):
        told -= stored.num_examples * stored.example_bytes  # on every device
    assert told / 2.5 < needs.memory < 2.5 * told


def test_a_ring_of_server_versions_and_all_who_are_asked_are_counted():
    """Of FedBuff, and of twice as many clients as count."""
    profiles = {"name": "log_normal"}
    late = {"name": "fedbuff", "concurrency": 2, "buffer_size": 1, "max_staleness": 4}
    config = config_of(systems={"profiles": profiles, "asynchronous": late})
    found = needs_function(blind_experiment(config), "row")().parts
    server = found["server, before and after the round"]
    assert found["earlier versions of the server, before and after"] == 5 * server
    config = config_of(systems={"profiles": profiles, "over_selection": 2.0})
    sim = stage_shapes(blind_experiment(config), "row").sim
    assert sim.num_places == 4 and sim.settings.cohort_size == 2


@pytest.mark.parametrize("rounds", [3, 50])
def test_epsilon_of_the_rounds_that_are_played_is_told(rounds):
    privacy = {"clip_norm": 0.5, "delta": 1e-2, "noise_multiplier": 2.0, "epsilon": 4.0}
    experiment = blind_experiment(config_of(privacy, rounds=rounds))
    trainer = experiment.stages["row"].trainer
    played = trainer.accountant.rounds_within_budget(rounds)
    spent = build_accountant(Mechanism(6, 2, 2.0, 1e-2)).epsilon(played)
    assert spent <= 4.0
    first, *more = privacy_notes(experiment, trainer)
    assert first.startswith(f"epsilon {spent:.3g} at delta 0.01 after {played} rounds,")
    told = [f"{played} of 50 rounds are within the budget"]
    assert more == (told if rounds == 50 else [])


def test_sharding_divides_what_its_rule_says():
    def wide(pretrain):
        return {**faces(pretrain), "model": {**NETWORK, "widths": (64, 128)}}

    whole, cut = (
        needs_function(blind_experiment(config), "pretrained")().parts
        for config in (wide({}), wide({"sharding": (("kernel", "zero3"),)}))
    )
    assert whole["parameters"] == pytest.approx(whole["gradients"])
    for part in ("parameters", "optimizer", "gradients"):
        assert whole[part] / 8 <= cut[part] < whole[part] / 6
    rows = "rows of classes, with momentum and gradient"
    assert whole[rows] == cut[rows] == 3 * 16 * 512 * 4


def test_what_fits_fits_and_a_little_more_does_not():
    config = {**faces({"class_parallel": True}, fedavg=FEDAVG), "model": TINY}
    config["federation"]["data_placement"] = "stream"
    experiment = blind_experiment(config)
    small = DEVICES["v100"]._replace(memory=64e6)
    for name in experiment.stages:
        planned = plan_stage(experiment, name, small)
        assert planned["bytes"]["examples"] == 2**30 > small.capacity  # of the stream
        assert planned["max_that_fit"]["batch_size"] == 0 and not planned["fits"]
    experiment = experiment._replace(
        federation=experiment.federation._replace(stream_buffer_gib=2**-8)
    )
    planned = plan_stage(experiment, "pretrained", small)
    needs_of = needs_function(experiment, "pretrained")
    room = small.capacity - planned["bytes"]["examples"]
    classes = planned["max_that_fit"]["classes"]
    assert needs_of(num_classes=classes).memory <= room
    assert needs_of(num_classes=classes * 21 // 20).memory > room


def test_a_batch_that_does_not_fill_a_tpus_rows_is_told():
    config = faces(fedavg=FEDAVG) | {"model": TINY}
    config["federation"]["batch_size"] = 20
    experiment = blind_experiment(config)
    planned = {x: plan_stage(experiment, "fedavg", DEVICES[x]) for x in PAIR}
    notes = {x: planned[x]["notes"] for x in PAIR}
    assert notes["v5p"] == [
        "a client's batch of 20 takes a TPU's tiles of 24, as 24 do"
    ]
    assert notes["h200"] == []
    # Images of 16 x 16 pixels, each in two tiles of 8 x 128.
    sizes = [planned[x]["bytes"] for x in PAIR]
    copy = "copy of the examples, in tiles"
    assert sizes[0][copy] == pytest.approx(8 * sizes[0]["examples"], rel=0.01)
    assert sizes[1][copy] == 0


PAIR = ("v5p", "h200")


def test_stairs_longer_than_the_unit_do_not_hold_up_the_largest():
    def stairs(number):
        rows = 32_768 * -(-number // 32_768)
        return 1e6 + 16 * rows + 16 * max(rows - 200_000, 0)

    found = max_that_fits(stairs, 4 * 32_768, 8, room=1.082e9)
    assert stairs(found) <= 1.082e9 < stairs(found * 51 // 50)


def test_as_many_lanes_fit_as_are_reported():
    config = faces(fedavg=FEDAVG)
    many = {"num_clients": 400, "client_images": (2000, 3000), "num_public_ids": 4000}
    config["partition"] = {**config["partition"], **many, "ids_per_client": 1}
    config["model"] = SMALL
    experiment = blind_experiment(config)
    device = DEVICES["v100"]._replace(memory=2e7)
    few = experiment.federation._replace(stream_buffer_gib=0, data_placement="stream")
    experiment = experiment._replace(federation=few)
    most = plan_stage(experiment, "fedavg", device)["max_that_fit"]["lanes"]

    def memory(count):
        lanes = few._replace(clients_per_device=count)
        return needs_function(experiment._replace(federation=lanes), "fedavg")().memory

    assert 2 < most and memory(most) <= device.capacity
    assert memory(most + max(most // 20, 1)) > device.capacity


@pytest.mark.slow
def test_a_teachers_files_are_neither_read_nor_written(tmp_path):
    views = {
        "flip_probability": 0.5,
        "augment": ({"name": "face_mask", "fixed_per_image": True},),
    }
    wide = {**SMALL, "widths": (16, 32)}
    teacher = {"weights": str(tmp_path / "run"), "model": wide}
    (tmp_path / "run").mkdir()
    kept = tmp_path / "kept.npy"
    kept.write_bytes(b"no embeddings")

    def needed(**told):
        told = {"distill": told} if told else {}
        row = {**FEDAVG, **told}
        config = faces({**views, **told}, fedavg=row) | {"model": SMALL}
        config["federation"] |= views
        experiment = blind_experiment(config)
        if "cache" in told.get("distill", {}):
            needs_function(experiment, "fedavg")()
        return experiment, needs_function(experiment, "pretrained")()

    _, alone = needed()
    online = needed(teacher=teacher)[1]
    plain = needed(teacher={"weights": str(tmp_path / "other.npz")})[1]
    assert online.flops - alone.flops > 1.5 * (plain.flops - alone.flops) > 0
    for file in (kept, tmp_path / "missing.npy"):
        experiment, cached = needed(cache=str(file), teacher=teacher)
        assert experiment.task.dataset.example.targets["teacher"].shape == (6, 32)
        assert cached.flops == pytest.approx(alone.flops, rel=0.01)
    assert {x.name for x in tmp_path.iterdir()} == {"run", "kept.npy"}


def test_fedfrs_rounds_have_the_images_of_its_steps_and_its_cap():
    config = faces(fedfr=FEDFR, fedavg=FEDAVG)
    experiment = blind_experiment(config)
    fedfr = needs_function(experiment, "fedfr")()
    # 33 own images and 5 negatives: 5 steps of 8; 2 + 1 + 1 epochs of 2 clients.
    assert (fedfr.images, fedfr.added) == (4 * 2 * 5 * 8, 5)
    assert fedfr.notes == ("5 of at most 5 hard negatives for each client",)
    assumed = needs_function(experiment, "fedfr", 3)()
    assert (assumed.images, assumed.added) == (4 * 2 * 5 * 8, 3)
    fedavg = needs_function(experiment, "fedavg")()
    assert fedavg.images == 4 * 2 * 5 * 8
    # A step is three passes but for the images' gradient; FedFR adds its two frozen
    # networks in two views, once a round, and its branch.
    assert 2.5 * fedavg.forward < fedavg.flops < 3.1 * fedavg.forward
    assert fedfr.flops > fedavg.flops + fedavg.forward


def test_devices_that_share_a_client_share_its_operations():
    def planned(shards):
        config = faces(fedavg=FEDAVG)
        config["federation"] |= {"model_shards": shards}
        return needs_function(blind_experiment(config), "fedavg")()

    alone, shared = planned(1), planned(2)
    assert shared.flops == pytest.approx(alone.flops, rel=0.01)
    assert shared.parameters == alone.parameters


@pytest.fixture
def nothing_read(monkeypatch, tmp_path):
    """No data, and an error where an image is decoded."""

    def decode(*args):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image, "open", decode)
    monkeypatch.setenv("FEDFR_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))


# One of each task; the others take minutes.
FAST = {"comparison", "market_parts", "table_camvid", "table_faces"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=() if p.stem in FAST else pytest.mark.slow, id=p.stem)
        for p in CONFIGS
    ],
)
def test_every_config_is_planned_without_an_image(path, nothing_read):
    config = runpy.run_path(str(path))["get_config"]()
    experiment = blind_experiment(config)
    name = list(experiment.stages)[-1]
    needs = needs_function(experiment, name)()
    assert needs.images > 0 and needs.memory > 0 and needs.forward > 0
    assert needs.flops > needs.forward
    assert all(size >= 0 for size in needs.parts.values())
    assert 0 < needs.utilization(DEVICES["h200"]) < 0.5


def test_the_published_rates_of_eight_v100_are_met_within_a_quarter(
    nothing_read, monkeypatch
):
    """arcface_torch of an IResNet-50, 93 thousand classes, 128 images a device."""
    name = "ms1m-retinaface-t1"
    few = SIZES[name]._replace(images=8 * SIZES[name].classes)
    monkeypatch.setitem(SIZES, name, few)
    path = ROOT / "configs" / "bigface" / "r50_93k.py"
    config = runpy.run_path(str(path))["get_config"]()
    needs = needs_function(blind_experiment(config), "pretrained")()
    rate = needs.images / needs.seconds(DEVICES["v100"])
    assert rate == pytest.approx(5552, rel=0.25)


def test_the_command_prints_a_table_and_keeps_its_numbers(tmp_path, capsys):
    config = tmp_path / "config.py"
    text = json.dumps(faces(fedavg=FEDAVG) | {"model": TINY}).replace("null", "None")
    text = text.replace("false", "False").replace("[", "(").replace("]", ")")
    config.write_text(
        f"import ml_collections\ndef get_config():\n"
        f"    return ml_collections.ConfigDict({text})\n"
    )
    kept = tmp_path / "plan.json"
    words = ["plan", f"--config={config}", "--num_devices=8", "--methods=fedavg"]
    assert main([*words, f"--json={kept}", "--device=a100"]) == 0
    said = capsys.readouterr().out
    assert "faces_emore/train.rec is not there: 506 made-up images" in said
    assert "8 x NVIDIA A100" in said and "largest that fit" in said
    numbers = json.loads(kept.read_text())["stages"]["fedavg"]
    assert numbers["fits"] and numbers["max_that_fit"]["lanes"] == 1
    # Two clients on eight devices: six wait.
    assert numbers["idle_ratio"] == 4 and numbers["fastest_lanes"] == 1
    assert "1, 4.00; expected fastest: 1 lanes" in said
    assert main([*words[:-1], "--methods=nosuch"]) == 2
    says = capsys.readouterr().err
    assert "--methods must be one of ['fedavg', 'pretrained'], got 'nosuch'" in says
    assert main([*words[:2], "--num_devices=3"]) == 2
    assert "--num_devices=3 cannot change the 8 that JAX" in capsys.readouterr().err


def test_a_set_of_unknown_size_that_is_not_there_is_named():
    config = faces()
    config["data"] = {"name": "folder", "path": "nowhere"}
    config["partition"] = {"num_clients": 2, "ids_per_client": 2}
    with pytest.raises(ValueError, match="config.data must exist on disk or be one of"):
        blind_experiment(config)


def test_a_plan_of_an_adapter_counts_the_network_that_it_is_in():
    flops = []
    for method in ({}, {"adapter": {"name": "lora", "rank": 1, "targets": "fc"}}):
        experiment = blind_experiment(tiny.config("classification", method))
        flops.append(needs_function(experiment, "x")().forward)
    plain, adapted = flops
    assert plain < adapted < 1.5 * plain
