"""FedReID's tables on rows that are made up: cases, claims and files."""

import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedreid_tables"
sys.path[:0] = map(str, (FOLDER, FOLDER.parent, FOLDER.parent / "fedfr_tables"))

import backbone  # noqa: E402
import market_parts  # noqa: E402
import reid_cases as cases  # noqa: E402
import reid_claims as claims  # noqa: E402
import reid_findings as findings  # noqa: E402
import reid_measures as measures  # noqa: E402

from fedfr_jax.config.files import find, load  # noqa: E402
from fedfr_jax.data.sources import SOURCES  # noqa: E402
from fedfr_jax.models import MODELS  # noqa: E402
from fedfr_jax.models.external_checkpoints import fill_resnet  # noqa: E402
from fedfr_jax.types import GALLERY, QUERY, TRAIN  # noqa: E402
from tests.tasks.reid.given import source_of  # noqa: E402


def load_script():
    """run.py, under a name that no other experiment's has."""
    spec = importlib.util.spec_from_file_location("fedreid_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_script()
CLIENTS = {"names": list("bacd"), "images": [900, 40, 100, 600]}


def row(rank, *, swing=0.0, local=(), has_network=True, is_central=False):
    """A row whose curve goes up and down by `swing` and ends at `rank`."""
    curve = [rank - swing * (i % 2) for i in range(9)]
    one = {"rank1": rank, "mAP": rank / 2}
    local = list(local or 4 * [rank])
    mean = {"rank1": float(np.mean(local)), "mAP": 0.1}
    return {
        "made": "2026-01-01, commit abc",
        "settings": {},
        "clients": CLIENTS,
        "generic": one if has_network else {},
        "personalized": one,
        "local": {} if is_central else mean,
        "of_client": {"personalized": 4 * [rank]}
        | ({} if is_central else {"local": local}),
        "of_round": [] if is_central else curve,
        "cost": {"seconds": 2.0, "core_seconds": 3.0},
    }


PAPER = {  # as the paper finds, and statistics to blame for the swing
    "fedpav": row(0.4, swing=0.2, local=(0.48, 0.6, 0.6, 0.48)),
    "standalone": row(0.5, local=(0.55, 0.3, 0.3, 0.55), has_network=False),
    "fedprox": row(0.4, swing=0.2, local=(0.5, 0.6, 0.6, 0.5)),
    "kd": row(0.39, local=(0.5, 0.5, 0.5, 0.5)),
    "cdw": row(0.41, swing=0.2, local=(0.6, 0.65, 0.65, 0.6)),
    "kd_cdw": row(0.45),
    "clustering": row(0.4, local=(0.6, 0.4, 0.4, 0.6)),
    "merged": row(0.6, is_central=True),
    "fedpav_first": row(0.4, swing=0.4),
    "kd_first": row(0.4, swing=0.3),
    "fedpav_local": row(0.5, swing=0.1, has_network=False),
    "kd_local": row(0.5, has_network=False),
    "merged_strong": row(0.8, is_central=True),
}


def shifted(found, by):
    """A row whose numbers are a little other ones, as another seed's are."""
    words = {k: round(v + by, 6) for k, v in found["generic"].items()}
    return {**found, "generic": words}


def results_of(**change):
    """All cases of three seeds as the paper would have them, but for `change`."""
    results = {}
    for case, names in cases.CASES.items():
        rows = {name: PAPER[name] for name in names}
        if case == cases.IDENTITY:
            rows["fedpav"] = shifted(rows["fedpav"], 0.03)
        rows.update({k: v for k, v in change.items() if k in rows})
        results[case] = {
            str(seed): {
                k: shifted(v, 0.001 * seed * i) for i, (k, v) in enumerate(rows.items())
            }
            for seed in range(3)
        }
    return results


def verdicts(results):
    lines = claims.claims_table(results).splitlines()[2:]
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    return {(text, case): found[-1] for text, _, case, *found in cells}


def test_every_claim_is_told_and_holds_where_the_papers_numbers_do():
    found = verdicts(results_of())
    asked = {(c.text, case) for c in claims.CLAIMS for case in c.cases}
    assert set(found) == asked and len(asked) > 25
    assert set(found.values()) == {"yes"}
    calm = verdicts(results_of(fedpav=row(0.4)))
    assert calm["KD removes the fluctuation", cases.PARTS] == "unclear"  # no swing
    assert calm["averaging statistics calms more than KD", cases.PARTS] == "yes"
    assert calm["federation pays small clients", cases.PARTS] == "yes"
    weak = verdicts(results_of(merged=row(0.1, is_central=True)))
    assert weak["the center is above FedPav", cases.IDENTITY] == "no"


def test_halves_are_by_images_and_a_peak_is_of_three_rounds():
    one = row(0.4, local=(0.1, 0.2, 0.3, 0.5))
    assert measures.small(one) == pytest.approx((0.2 + 0.3) / 2)
    assert measures.large(one) == pytest.approx((0.1 + 0.5) / 2)
    assert measures.peak({"of_round": [0.9, 0.1, 0.5, 0.7]}) == pytest.approx(0.7)
    rising = [9, 9, 9, 9, 0.1, 0.3, 0.4, 0.6]  # 0.11, 0.27, 0.43, 0.59 on the line
    assert measures.swing({"of_round": rising}) == pytest.approx(0.0005**0.5)
    assert np.isnan(measures.swing(PAPER["merged"]))
    assert np.isnan(measures.small(PAPER["merged"]))
    assert measures.last(PAPER["standalone"]) == 0.5  # of clients' own networks


def test_rows_of_another_case_are_those_of_the_same_seeds():
    results = results_of()
    assert len(measures.runs_of(results, cases.IDENTITY, "merged")) == 3
    del results[cases.CAMERA]["2"]
    assert not measures.runs_of(results, cases.IDENTITY, "merged")
    found = verdicts(results)
    assert ("the center is above FedPav", cases.IDENTITY) not in found
    assert found["the center is above FedPav", cases.PARTS] == "yes"
    text = findings.text(results)
    assert "| merged_strong | 80.0 ± 0.0 | 40.0 ± 0.0 |  |  |  |  |  |  | 3 |" in text
    assert "### strong_center" in text and text.count("| merged |") == 2


def test_a_case_is_the_config_with_its_own_clients_rows_and_seed():
    config = load(find("fedreid/tables"))
    made = {case: cases.config_of(config, case, seed=2) for case in cases.CASES}
    for case, one in made.items():
        assert set(one.methods) == set(cases.CASES[case])
        assert one.seed == one.partition.public.seed == 2
        rounds = one.federation.rounds
        assert {x.epochs for x in one.methods.values() if "kind" in x} <= {rounds}
    parts = made[cases.PARTS]
    assert parts.federation.rounds == 2 * config.federation.rounds
    assert [p.seed for p in parts.data.sources.values()] == 6 * [2]
    assert made[cases.IDENTITY].partition.num_clients == 6
    assert made[cases.CENTER].model.neck == "bnneck"
    own = made[cases.OWN_STATISTICS]
    assert own.data == parts.data and own.evaluation.personalized_every_evaluation
    assert config.seed == 0 and config.model.get("neck") is None  # as it was


def test_parts_share_nobody_and_see_by_their_own_cameras(monkeypatch):
    people, cameras = (x.ravel() for x in np.indices((501, 7))[:, :, 1:])
    roles = np.where(people < 351, TRAIN, np.where(cameras % 2, QUERY, GALLERY))
    source = source_of(people, cameras, roles)
    monkeypatch.setitem(SOURCES, "market1501", lambda path, **_: source)
    parts = market_parts.parts_of("there", (4, 2), seed=1)["sources"]
    seen, trained = [], []
    for name, of in parts.items():
        made = market_parts.market_part(**{k: v for k, v in of.items() if k != "name"})
        assert set(made.cameras.tolist()) == set(of["cameras"])
        is_train = made.roles == TRAIN
        number = len(set(made.labels[is_train].tolist()))
        assert name == f"c{''.join(map(str, of['cameras']))}_{number}"
        tested = {made.names[i] for i in made.labels[~is_train]}
        assert len(tested) == 75 and tested <= set(source.names[351:])
        seen.append((of["cameras"], tested))
        trained += [made.names[i] for i in set(made.labels[is_train].tolist())]
    assert sorted(trained) == sorted(source.names[:351])
    for cameras in market_parts.PAIRS.values():
        one, other = (tested for at, tested in seen if at == cameras)
        assert not one & other


def test_the_pretrained_cases_identities_are_apart_from_the_backbones():
    config = load(find("fedreid/tables"))
    made = cases.config_of(config, cases.PRETRAINED, seed=2)
    assert made.federation.rounds == 30
    below = {"^(stem|stage)": 0.1}
    for row in (*made.methods.values(), made.evaluation.local_training):
        assert row.learning_rate_multipliers.to_dict() == below
    assert {row.batch_stats for row in made.methods.values()} == {"random_client"}
    central = backbone.backbone_config(made)
    intervals = [part.trained for part in made.data.sources.values()]
    intervals += [central.data.trained, made.partition.public.source.trained]
    taken = [number for first, end in intervals for number in range(first, end)]
    assert sorted(taken) == list(range(501 - market_parts.TESTED))
    assert central.methods.to_dict().keys() == {backbone.ROW}
    assert made.methods.to_dict().keys() == {"fedpav", "kd", "cdw", "kd_cdw"}


def test_a_backbones_tensors_are_those_that_model_weights_takes():
    model = ConfigDict({"depth": 18, "blocks": (1, 1), "widths": (4, 8)})
    network = lambda key: MODELS["reid"]((8, 4, 3), num_classes=3, **model).init(key)
    trained, fresh = (network(jax.random.key(seed)) for seed in (1, 2))
    tensors = backbone.tensors_of(trained, (8, 4, 3), model)
    found = fill_resnet(fresh, tensors)
    for name in ("stem", "stage1", "stage2"):
        same = jax.tree.map(
            np.array_equal, found["params"][name], trained["params"][name]
        )
        assert all(jax.tree.leaves(same)), name
    assert np.array_equal(
        found["params"]["classifier"]["kernel"], fresh["params"]["classifier"]["kernel"]
    )
