"""What lanes="auto" decides: measured, remembered, and refused when it does not fit."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.data.stream import stream
from fedfr_jax.federated import programs
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.local import sgd, step_decay
from fedfr_jax.federated.model_parallel import put_on_mesh
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    simulate_round,
    start_simulation,
)
from fedfr_jax.mesh import first_devices, make_mesh
from fedfr_jax.runs import autotune
from fedfr_jax.runs.autotune import TuningChoice
from fedfr_jax.types import Cohort, LocalTraining
from tests.federated import toys
from tests.federated.test_engine import build

pytestmark = pytest.mark.ci

QUIET = {"say": lambda text: None}


class Toy:
    """A federation whose settings take the seconds that `took` says.

    The network has no convolution: these change nothing but the setting's name. Rounds
    are told apart by their sizes, unless `is_lowered`: a fingerprint takes long.
    """

    def __init__(
        self,
        monkeypatch,
        took=None,
        *,
        devices=1,
        cohort_size=3,
        is_lowered=False,
        **options,
    ):
        self.sim, self.server = build("fedavg", (devices, 1), 1, cohort_size, **options)
        self.store, self.timed = open_store(self.sim, self.server), []
        self.settings = {}  # of what was made
        if took:
            monkeypatch.setattr(autotune, "seconds", self.seconds)
        if took and not is_lowered:
            text = lambda sim, *_: f"{sim.cohort_size} of {sim.population.offsets}"
            monkeypatch.setattr(autotune, "lowered_text", text)
        self.record = took

    def make(self, setting):
        sim = self.sim
        made = build_simulation(
            sim.algorithm,
            sim.batching,
            sim.device_data,
            sim.population,
            mesh=first_devices(sim.mesh, setting.devices),
            cohort_size=sim.cohort_size,
            clients_per_device=setting.clients_per_device,
            reproducible_sum=sim.num_partial_sums is not None,
            num_partial_sums=sim.num_partial_sums or 8,
        )
        self.settings[made.programs] = setting
        return made

    def seconds(self, sim, server, store, cohort):
        setting = self.settings[sim.programs]._replace(
            clients_per_device=sim.clients_per_device
        )
        assert sim.mesh.size == (setting.devices or self.sim.mesh.size)
        assert {len(x.devices()) for x in jax.tree.leaves(server)} == {sim.mesh.size}
        self.timed.append(setting)
        return self.record(setting) * len(cohort.ids)

    def tune(self, **options):
        given = {**QUIET, **options}
        setting, sim = autotune.tune(self.make, self.server, self.store, **given)
        assert self.settings[sim.programs] == setting._replace(clients_per_device=1)
        assert sim.clients_per_device == setting.clients_per_device
        return setting


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_setting_is_measured_once_and_remembered(tmp_path, monkeypatch):
    took, said = (lambda setting: 2.0 / setting.clients_per_device), []
    toys_of = {"first": {}, "again": {}, "other": {"personal": "head"}}
    for name, options in toys_of.items():
        toy = Toy(monkeypatch, took, is_lowered=True, **options)
        assert toy.tune(lanes=(1, 2, 4), say=said.append) == TuningChoice(
            clients_per_device=2
        )
        # No lane without a client, and of an equal program none again.
        settings = [
            TuningChoice(clients_per_device=1),
            TuningChoice(clients_per_device=2),
        ]
        assert toy.timed == ([] if name == "again" else settings)
    begin = "clients_per_device: 2 (measured ms per client, clients_per_device 1 "
    assert said[0] == said[1] and said[0].startswith(begin)
    known = json.loads((tmp_path / "fedfr_jax" / "tuned.json").read_text())
    assert len(known) == 2


def lanes_of(name, *counts, devices=0):
    return [TuningChoice(name, devices, clients_per_device=count) for count in counts]


def test_implementations_are_tried_with_lanes_and_the_fastest_of_them_on_fewer_devices(
    monkeypatch,
):
    each = {"auto": 3.0, "im2col": 2.0, "slow": 7.0}
    on = {0: 1.0, 2: 0.5, 1: 0.7}
    took = lambda s: (
        each[s.conv_implementation]
        * on[s.devices]
        * (1 + 0.1 * (s.clients_per_device != 2))
    )
    toy = Toy(monkeypatch, took, devices=4, cohort_size=5)
    monkeypatch.setattr(autotune, "max_clients_per_device", lambda sim, devices=0: 4)
    assert toy.tune(implementations=each, lanes=(1, 2, 4)) == TuningChoice(
        "im2col", 2, 2
    )
    assert toy.timed == [
        *lanes_of("auto", 1, 2, 4),
        *lanes_of("im2col", 1, 2, 4),
        *lanes_of("slow", 1),  # hopeless: no more lanes of it
        TuningChoice("im2col", 2, 2),
        TuningChoice("im2col", 1, 2),  # not better: it would go no further
        *lanes_of("im2col", 4, devices=2),
    ]


def test_a_implementation_is_not_given_up_because_another_has_more_lanes(monkeypatch):
    took = lambda s: (
        {"auto": 10.0, "im2col": 6.0}[s.conv_implementation] / s.clients_per_device
    )
    toy = Toy(monkeypatch, took, cohort_size=5)
    best = toy.tune(implementations=("auto", "im2col"), lanes=(1, 2, 4))
    assert best == TuningChoice("im2col", clients_per_device=4)


def test_fewer_devices_are_tried_with_more_lanes_on_the_same_clients(monkeypatch):
    asked = []
    monkeypatch.setattr(autotune, "CLIENTS", 1)
    toy = Toy(monkeypatch, None, devices=4, cohort_size=5)

    def took(sim, server, store, cohort):
        asked.append((sim.mesh.size, sim.clients_per_device, len(cohort.ids)))
        return 1.0 * sim.mesh.size / sim.clients_per_device

    monkeypatch.setattr(autotune, "seconds", took)
    assert toy.tune(lanes=(1, 2, 4)) == TuningChoice("auto", 1, 4)
    assert asked == [(4, 1, 4), (2, 1, 4), (1, 1, 4), (1, 2, 5), (1, 4, 5)]


def test_settings_that_do_not_fit_give_way_to_fewer_devices(tmp_path, monkeypatch):
    took, kept = (lambda s: 1.0 if s.devices == 1 else math.inf), tmp_path / "kept"
    toy = Toy(monkeypatch, took, devices=4)
    assert toy.tune(lanes=(1,)) == TuningChoice(devices=1)
    nowhere = Toy(monkeypatch, lambda s: math.inf, devices=2, personal="head")
    nowhere.tune(lanes=(1,), choice_file=kept)
    known = json.loads((tmp_path / "fedfr_jax" / "tuned.json").read_text())
    assert len(known) == 1 and not kept.exists()  # it may find more memory later


def test_nothing_is_measured_for_canonical_sums(monkeypatch):
    """Whose bits would depend on the lanes that won on this machine."""
    toy, said = Toy(monkeypatch), []
    toy.sim = toy.sim._replace(
        num_partial_sums=1
    )  # `make` then asks for canonical sums
    assert toy.tune(say=said.append) == TuningChoice()
    assert not toy.timed and "clients_per_device: 1 (canonical sums" in said[0]


def test_a_single_choice_is_taken_as_it_is(monkeypatch):
    toy = Toy(monkeypatch, lambda setting: 1 / 0, cohort_size=5)
    assert toy.tune(lanes=(4,)) == TuningChoice(clients_per_device=4)


def test_a_choice_is_of_as_many_clients_as_the_cohort_has(monkeypatch):
    monkeypatch.setattr(autotune, "CLIENTS", 1)
    counts = []
    for cohort_size in (5, 2, 5, 2):
        toy = Toy(
            monkeypatch, lambda s: 1 / s.clients_per_device, cohort_size=cohort_size
        )
        assert toy.tune(lanes=(1, 2, 4)).clients_per_device == min(cohort_size, 4)
        counts.append(len(toy.timed))
    assert counts == [3, 2, 0, 0]  # both are remembered


def test_a_setting_changes_the_last_bits_at_most(monkeypatch):
    toy, ends = Toy(monkeypatch, devices=2), []
    for setting in (
        TuningChoice(),
        TuningChoice(devices=1),
        TuningChoice(clients_per_device=3),
    ):
        sim = toy.make(setting)
        server = put_on_mesh(sim.mesh, toy.server)
        ends.append(
            jax.device_get(simulate_round(sim, server, open_store(sim, server), 0)[0])
        )
    for end in ends[1:]:
        jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-5), ends[0], end)


def test_a_setting_is_timed_on_the_real_program(monkeypatch):
    toy, seen = Toy(monkeypatch, devices=2, cohort_size=5), {}
    measure = autotune.measure
    keep = lambda *given: seen.update(measure(*given)) or seen
    monkeypatch.setattr(autotune, "measure", keep)
    best = toy.tune(lanes=(1,))
    assert best == min(seen, key=seen.get) and 0 < min(seen.values()) < 10
    assert {setting.devices for setting in seen} == {0, 1}
    simulate_round(toy.sim, toy.server, toy.store, 0)  # the server is still there


def test_a_stream_is_measured_on_the_rows_of_the_clients_that_are_timed(monkeypatch):
    table, population = toys.problem()
    rows_read = []
    read = lambda rows: rows_read.append(np.asarray(rows)) or table.images[rows]
    algorithm, variables = toys.fedavg_toy()
    make = lambda setting, waves=1: build_simulation(
        algorithm,
        toys.feed(),
        stream(read, table.labels, waves=waves),
        population,
        mesh=make_mesh(1),
        cohort_size=2,
        clients_per_device=setting.clients_per_device,
    )
    sim, asked = make(TuningChoice()), []
    server = start_simulation(sim, variables)
    store = open_store(sim, server)
    seconds = autotune.time_once
    monkeypatch.setattr(
        autotune, "time_once", lambda *x: asked.append(seconds(*x)) or asked[-1]
    )
    makes = lambda setting: (make(setting), rows_read.pop())[0]  # the shape's own row
    rows_read.clear()
    chosen, _ = autotune.tune(makes, server, store, lanes=(1, 2, 4), **QUIET)
    assert len(asked) == 2 * (autotune.REPEATS + 1) and 0 < min(asked)
    own = np.arange(population.offsets[2])
    np.testing.assert_array_equal(np.unique(np.concatenate(rows_read)), own)
    spent = min(asked[1:4]), min(asked[5:])
    assert chosen == TuningChoice(clients_per_device=1 + int(np.argmin(spent)))
    sims = sim, make(TuningChoice(), waves=2)  # another stream
    assert len({autotune.fingerprint([x], server, store) for x in sims}) == 2


@pytest.mark.parametrize(
    "times, asked",
    [
        ((4, 3, 2, 1), [1, 2, 4, 8]),
        ((4, 3, 5, 2), [1, 2, 4, 8]),  # slower once is no reason to stop
        ((1, 1.5, 1.6, 0.5), [1, 2, 4]),
        ((4, math.inf, 1, 1), [1, 2]),  # more lanes do not fit either
    ],
)
def test_more_lanes_are_tried_until_they_do_not_pay_or_fit(monkeypatch, times, asked):
    seconds = dict(zip((1, 2, 4, 8), times, strict=True))
    toy = Toy(monkeypatch, lambda setting: seconds[setting.clients_per_device])
    space = autotune.TuningSpace(("auto",), (), (1, 2, 4, 8))
    monkeypatch.setattr(autotune, "max_clients_per_device", lambda sim, devices=0: 8)
    spent = autotune.measure(toy.make, toy.server, None, toy.sim, space)
    assert spent == {
        TuningChoice(clients_per_device=x): np.float32(seconds[x]) for x in asked
    }


@pytest.mark.parametrize("each, timed", [(1.0, {1}), (0.02, {3}), (1e-9, {4})])
def test_a_round_that_is_over_at_once_is_timed_with_more_clients(
    monkeypatch, each, timed
):
    monkeypatch.setattr(autotune, "CLIENTS", 1)
    toy, counts = Toy(monkeypatch, lambda setting: each, cohort_size=4), []
    seconds = autotune.seconds
    keep = lambda *given: counts.append(len(given[-1].ids)) or seconds(*given)
    monkeypatch.setattr(autotune, "seconds", keep)
    space = autotune.TuningSpace(("auto", "im2col"), (), (1,))
    autotune.measure(toy.make, toy.server, None, toy.sim, space)
    assert set(counts[-2:]) == timed


def test_an_accelerator_is_tried_with_more_lanes_than_a_cpu_and_whole(monkeypatch):
    device = lambda kind: types.SimpleNamespace(platform=kind)

    def space(kind, devices=8, model=1):
        mesh = types.SimpleNamespace(devices=np.array([[device(kind)]]))
        mesh.shape = {"clients": devices, "model": model}
        sim = types.SimpleNamespace(mesh=mesh)
        return autotune.build_space(sim, ("auto",))

    assert space("cpu").clients_per_device == (1, 2, 4, 8, 16)
    assert space("gpu").clients_per_device == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert space("cpu").devices == (4, 2, 1) and space("cpu", 3).devices == (1,)
    wholes = space("cpu", 1), space("gpu"), space("cpu", model=2)
    assert all(x.devices == () for x in wholes)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert space("cpu").devices == ()


def test_a_run_keeps_its_setting_as_long_as_it_is_possible(tmp_path, monkeypatch):
    kept, said = tmp_path / "run" / "lanes.json", []
    # Another machine has another cache and another opinion.
    for machine, devices, cohort_size, fastest, wanted in [
        ("a", 2, 4, TuningChoice("im2col", 1, 2), TuningChoice("im2col", 1, 2)),
        ("b", 2, 4, TuningChoice(), TuningChoice("im2col", 1, 2)),
        ("b", 1, 1, TuningChoice(), TuningChoice()),  # two lanes are too many now
    ]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        took = lambda setting, best=fastest: 1.0 + np.sum(np.not_equal(setting, best))
        toy = Toy(monkeypatch, took, devices=devices, cohort_size=cohort_size)
        names = ("auto", "im2col") if machine == "a" or devices == 2 else ("auto",)
        setting = toy.tune(implementations=names, choice_file=kept, say=said.append)
        assert setting == wanted
    begins = [
        "clients_per_device: 2, conv_implementation: im2col, devices: 1 (measured",
        "clients_per_device: 2, conv_implementation: im2col, devices: 1 (as this "
        "run began",
        "clients_per_device: 1 (the only",
    ]
    assert [x[: len(y)] for x, y in zip(said, begins, strict=True)] == begins
    assert json.loads(kept.read_text()) == TuningChoice()._asdict()


@pytest.mark.parametrize(
    "held, wanted",
    [
        (
            '{"clients_per_device": 2}',
            TuningChoice(clients_per_device=2),
        ),  # of before there were implementations
        (
            '{"devices": 1, "clients_per_device": 3}',
            TuningChoice(devices=1, clients_per_device=3),
        ),
        ('{"clients_per_device": 3}', None),  # too many for two devices
        ('{"conv_implementation": "forgotten", "clients_per_device": 2}', None),
        (
            '{"devices": 2, "clients_per_device": 2}',
            TuningChoice(clients_per_device=2),
        ),  # all of them
        ('{"devices": 3, "clients_per_device": 1}', None),
        ('{"devices": -1, "clients_per_device": 2}', None),
        ('{"clients_per_device": null}', None),
        ('{"clients_per_device": "2"}', None),
        ("[]", None),
        ("", None),
        ("{}", None),
    ],
)
def test_what_a_run_has_kept_is_taken_or_measured_anew(
    tmp_path, monkeypatch, held, wanted
):
    kept = tmp_path / "lanes.json"
    kept.write_text(held)
    toy = Toy(
        monkeypatch, lambda s: 1.0 + s.clients_per_device, devices=2, cohort_size=4
    )
    assert toy.tune(choice_file=kept) == (wanted or TuningChoice())
    assert bool(toy.timed) == (wanted is None)
    assert TuningChoice(**json.loads(kept.read_text())) == (wanted or TuningChoice())


def test_fewer_devices_are_not_kept_where_they_would_not_be_tried(
    tmp_path, monkeypatch
):
    kept = tmp_path / "lanes.json"
    kept.write_text('{"devices": 1, "clients_per_device": 1}')
    monkeypatch.setattr(autotune, "_is_cpu", lambda mesh: False)
    toy = Toy(
        monkeypatch, lambda s: 1.0 + s.clients_per_device, devices=2, cohort_size=4
    )
    assert toy.tune(choice_file=kept) == TuningChoice() and toy.timed


def test_a_damaged_or_missing_cache_stops_no_run(tmp_path, monkeypatch):
    took = lambda s: 1.0 + s.clients_per_device
    folder = tmp_path / "fedfr_jax"
    folder.mkdir()
    (folder / "tuned.json").write_text('{"half')
    toy = Toy(monkeypatch, took)
    assert toy.tune() == TuningChoice() and toy.timed
    (name,) = known = json.loads((folder / "tuned.json").read_text())
    for damaged in (1, {"seconds": None}):
        (folder / "tuned.json").write_text(json.dumps({**known, name: damaged}))
        toy = Toy(monkeypatch, took)
        assert toy.tune() == TuningChoice() and toy.timed
    said = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "tuned.json"))  # no folder
    toy = Toy(monkeypatch, took)
    assert toy.tune(say=said.append) == TuningChoice() and toy.timed
    assert "cannot be written, the choice is not remembered" in said[0]


def test_the_fingerprint_knows_every_implementation_and_the_flags(monkeypatch):
    toy = Toy(monkeypatch)
    sim = toy.sim

    def like(algorithm, feed):
        options = {"mesh": sim.mesh, "cohort_size": sim.cohort_size}
        return build_simulation(
            algorithm, feed, sim.device_data, sim.population, **options
        )

    # As another implementation: the same shapes, another program.
    other = like(sim.algorithm, sim.batching._replace(shuffle=False))
    name = lambda *sims: autotune.fingerprint(sims, toy.server, toy.store)
    names = {name(sim, sim), name(sim, other), name(sim, sim)}
    assert len(names) == 2
    optimizer = sgd(momentum=0.8, weight_decay=1e-2)
    local = LocalTraining(toys.norm_loss, optimizer, step_decay(0.2, every=2))
    faster = like(
        fedavg(local), sim.batching
    )  # other numbers: the program takes as long
    assert name(faster, faster) == name(sim, sim)
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    assert name(sim, sim) not in names


def out_of_reach(**fields):
    """A client that asks for 2^52 bytes: no machine has the addresses."""
    side = 2**25

    def client_update(key, server, personal, client):
        x = client.num_examples.astype(jnp.float32) + jnp.arange(
            side, dtype=jnp.float32
        )
        products = jnp.sort(x[:, None] * x[None, :], axis=1)
        return honest(key, server, personal, client)._replace(
            metrics={"middle": products[client.id, side // 2]}
        )

    sim, server = build("fedavg", cohort_size=3, **fields)
    honest = sim.algorithm.client_update
    algorithm = sim.algorithm._replace(client_update=client_update)
    table, population = toys.problem()
    options = {
        "mesh": sim.mesh,
        "cohort_size": 3,
        "clients_per_device": sim.clients_per_device,
    }
    return build_simulation(
        algorithm, sim.batching, table, population, **options
    ), server


def test_lanes_that_do_not_fit_say_what_is_needed():
    sim, server = out_of_reach(lanes=2)
    with pytest.raises(MemoryError, match="got 2: a round needs .* GiB to train"):
        simulate_round(sim, server, open_store(sim, server), 0)


def test_lanes_that_do_not_fit_are_not_chosen():
    sim, server = out_of_reach()
    store, cohort = open_store(sim, server), Cohort(np.arange(3), 0)
    assert autotune.seconds(sim, server, store, cohort) == math.inf


@pytest.mark.parametrize(
    "personal, most_lanes, message",
    [
        ("", 2, "clients_per_device must .*, got 4: .* at most 2 lanes fit"),
        ("head", 0, "cohort_size must fit .*, got 3: the personal rows"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_compiled(
    monkeypatch, personal, most_lanes, message
):
    sim, server = build("fedavg", lanes=4, cohort_size=3, personal=personal)
    free = (most_lanes + 0.5) * trees.num_bytes(server)
    monkeypatch.setattr(programs, "free_bytes", lambda mesh: free)
    with pytest.raises(MemoryError, match=message):
        simulate_round(sim, server, open_store(sim, server), 0)
    assert sim.programs.run_whole.num_compiled() == 0
