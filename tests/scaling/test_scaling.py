"""Scaling laws: known exponents come back, BigFace's points say what they say."""

import json

import numpy as np
import pytest
from scipy.optimize import least_squares

from fedfr_jax.cli.main import main
from fedfr_jax.scaling import fit, points, predict, read_rows, study
from fedfr_jax.scaling.intervals import hold_out, interval, replicates
from fedfr_jax.scaling.laws import JOINT, POWER, SATURATING, Coefficients, best_fit
from fedfr_jax.scaling.study import Cost, best_plan, fit_cost, plan_for_size

TRUTH = {
    POWER: Coefficients(np.array([0.2]), np.array([3.0]), np.array(0.0)),
    SATURATING: Coefficients(np.array([0.4]), np.array([30.0]), np.array(0.05)),
    JOINT: Coefficients(np.array([0.4, 0.3]), np.array([20.0, 8.0]), np.array(0.03)),
}
DRAWS = 60


def simulated(law, noise=0.01, seed=0):
    """Inputs [n, d] over decades, and errors [n] around the law of TRUTH."""
    n, d = np.geomspace(1e5, 1e8, 12), np.geomspace(1e4, 1e7, 4)
    inputs = n[:, None]
    if law is JOINT:
        inputs = np.stack(np.meshgrid(n[::3], d), -1).reshape(-1, 2)
    rng = np.random.default_rng(seed)
    expected = predict(TRUTH[law], inputs)
    return inputs, expected * np.exp(noise * rng.standard_normal(len(inputs)))


@pytest.mark.parametrize("law", [POWER, SATURATING, JOINT], ids=lambda law: law.name)
def test_known_exponents_lie_in_their_intervals(law):
    inputs, errors = simulated(law)
    found = fit(law, inputs, errors)
    drawn = replicates(found, inputs, draws=DRAWS)
    for true, values in zip(TRUTH[law], drawn.coefficients, strict=True):
        low, high = interval(values, 0.95)
        assert (low <= true).all() and (true <= high).all(), (true, low, high)
    exact = fit(law, inputs, predict(TRUTH[law], inputs))
    np.testing.assert_allclose(
        exact.coefficients.exponents, TRUTH[law].exponents, rtol=1e-3
    )


@pytest.mark.parametrize("true", [POWER, SATURATING], ids=lambda law: law.name)
def test_aicc_finds_whether_there_is_an_offset(true):
    chosen = []
    for seed in range(5):
        inputs, errors = simulated(true, seed=seed)
        fits = [fit(law, inputs, errors) for law in (POWER, SATURATING)]
        chosen.append(best_fit(fits).law is true)
    assert sum(chosen) >= 4


def test_the_minimum_is_that_of_another_optimizer():
    inputs, errors = simulated(SATURATING, noise=0.03)
    delta = 1e-3

    def residuals(theta):
        exponent, factor, offset = theta[0], np.exp(theta[1]), np.exp(theta[2])
        return np.log(offset + factor * inputs[:, 0] ** -exponent) - np.log(errors)

    def loss(r):
        inner = np.clip(r, -delta, delta)
        return inner @ (r - inner / 2)

    start = [0.4, np.log(30.0), np.log(0.05)]
    other = least_squares(residuals, start, loss="huber", f_scale=delta, xtol=1e-12)
    ours = fit(SATURATING, inputs, errors)
    assert loss(ours.residuals) <= loss(other.fun) * 1.001


def test_intervals_are_those_of_their_seed():
    inputs, errors = simulated(POWER)
    found = fit(POWER, inputs, errors)
    once, again, other = (
        replicates(found, inputs, seed=seed, draws=5).coefficients.exponents
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(once, again)
    assert (once != other).all()


def test_the_largest_run_tells_when_the_law_ends():
    inputs, errors = simulated(POWER)
    held = hold_out([POWER], inputs, errors, draws=DRAWS)
    assert held.is_inside and held.is_held_out.tolist() == [False] * 11 + [True]
    errors[-1] = errors[-2]  # the last doubling buys nothing
    held = hold_out([POWER], inputs, errors, draws=DRAWS)
    assert not held.is_inside and held.measured > held.high


def test_the_largest_runs_have_no_part_in_the_law_that_predicts_them():
    sizes = np.repeat(1e4 * 2.0 ** np.arange(6), 2)
    noise = 0.02 * np.random.default_rng(0).standard_normal(12)
    errors = 3 * sizes**-0.3 * np.exp(noise)
    chosen, predictions = [], set()
    for factor in (1.3, 1.0, 0.1):  # 1.3: a curve that flattens at its end alone
        measured = errors * np.where(sizes == sizes.max(), factor, 1)
        columns = zip(sizes, measured, strict=True)
        rows = [{"params_backbone": n, "error": error} for n, error in columns]
        (found,) = study(points(rows, "error"), draws=20).findings
        held = found.hold_out
        assert held.measured == pytest.approx(np.sqrt(measured[-1] * measured[-2]))
        chosen.append(found.best.law)
        predictions.add((held.fit.law, held.predicted, held.low, held.high))
    assert chosen[:2] == [SATURATING, POWER]
    ((law, predicted, _, _),) = predictions
    assert law is POWER
    assert predicted == pytest.approx(3 * sizes[-1] ** -0.3, rel=0.03)


# Exponents by least squares, as the digitized points give them: backbone, with head.
SQUARES = {
    ("masked_ijbc", "scratch"): (0.065, 0.268),
    ("ijbc", "scratch"): (0.044, 0.185),
    ("challenge", "scratch"): (0.362, 3.86),
    ("challenge", "distilled"): (0.447, 4.75),
}


@pytest.mark.parametrize("metric, series", SQUARES)
def test_bigfaces_points_have_these_exponents(metric, series):
    given = points(read_rows("bigface"), metric, is_score=metric != "challenge")
    own = given.take(np.array(given.series) == series)
    for name, expected in zip(own.sizes, SQUARES[metric, series], strict=True):
        sizes = own.sizes[name][:, None]
        squares = fit(POWER, sizes, own.errors, delta=1e3).coefficients.exponents[0]
        assert squares == pytest.approx(expected, rel=0.01)
        found = fit(POWER, sizes, own.errors)
        low, high = interval(
            replicates(found, sizes, draws=DRAWS).coefficients.exponents
        )
        assert low < squares < high
        assert found.rms < 0.025


def test_bigfaces_points_are_weak_evidence():
    given = points(read_rows("bigface"), "masked_ijbc", is_score=True)
    of = study(given, draws=DRAWS)
    assert [found.axes for found in of.findings] == [
        ("params_backbone",),
        ("params_with_head",),
    ]
    for found in of.findings:
        assert [law.law for law in found.fits] == [POWER]
        assert "5 different sizes, got 4" in found.refused[0]
        assert found.best.aicc == np.inf  # four points and three numbers
    low, _ = interval(of.findings[1].replicates.coefficients.exponents[:, 0])
    assert low < 0  # with the head counted, an exponent of 0 is not excluded
    assert given.errors[-2] - given.errors[-1] == pytest.approx(0.0006)


def test_the_best_network_of_a_budget_is_best():
    law, cost = TRUTH[JOINT], Cost(2400.0, 0.9)
    plan = best_plan(law, cost, 1e16)
    others = [
        plan_for_size(law, cost, 1e16, n).error for n in np.geomspace(1e4, 1e9, 4001)
    ]
    assert plan.error <= min(others) == pytest.approx(plan.error, rel=1e-6)
    assert cost.factor * plan.parameters**0.9 * plan.images == pytest.approx(1e16)
    inputs, _ = simulated(JOINT)
    n, d = inputs.T
    assert fit_cost(n, d, 2400 * n**0.9 * d) == pytest.approx(cost)


def rows(count=6, **columns):
    made = [
        {"params_backbone": 1e6 * 2**i, "error": 0.5 / (1 + i)} for i in range(count)
    ]
    return [{**row, **columns} for row in made]


def test_bad_tables_are_refused():
    for changed, metric, says in [
        ({}, "accuracy", "the column 'accuracy' with a value"),
        ({"error": 0.0}, "error", "error must be positive in every row, got 0"),
        ({"error": "high"}, "error", "finite number in every row, got 'high'"),
        ({"params_backbone": -1}, "error", "positive number in every row, got -1"),
        ({"params_backbone": None}, "error", "the table must have one of"),
    ]:
        with pytest.raises(ValueError, match=says):
            points(rows(**changed), metric)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\) in every row, got 1.5"):
        points(rows(error=1.5), "error", is_score=True)


@pytest.mark.parametrize(
    "data", ["num_images", "num_images_seen", "num_identities", "nothing"]
)
def test_a_law_of_networks_is_of_one_size_of_the_data(data):
    """Runs of 5 networks on more images, more passes, or more people, each apart."""
    counts = [(1e4, 1e5, 100), (1e4, 4e5, 100), (1e4, 4e5, 400), (5e3, 4e5, 400)]
    counts += [(1e4, 2e5, 400)]
    rows = []
    for images, seen, identities in counts:
        for size in np.geomspace(1e4, 1e6, 5):
            error = 3 * size**-0.2 * (1e7 / (images * seen**0.5 * identities)) ** 0.1
            row = {"params_backbone": size, "error": error, "num_images": images}
            rows.append({**row, "num_images_seen": seen, "num_identities": identities})
    of = study(points(rows, "error"), data=data, draws=3)
    (found,) = [x for x in of.findings if x.axes == ("params_backbone",)]
    assert len(found.inputs) == 5
    most = {"num_images": 1e4, "num_images_seen": 4e5, "num_identities": 400}
    for name, values in found.points.data.items():
        np.testing.assert_array_equal(values, most[name])
    assert found.best.coefficients.exponents[0] == pytest.approx(0.2, abs=1e-3)
    if data in most:
        (other,) = [x for x in of.findings if x.axes == (data,)]
        assert {*other.points.sizes["params_backbone"]} == {1e6}


def test_too_few_sizes_are_refused_however_many_runs():
    inputs = np.repeat([[1e6], [2e6], [4e6], [8e6]], 5, axis=0)
    errors = inputs[:, 0] ** -0.2
    with pytest.raises(ValueError, match="5 different sizes, got 4"):
        fit(SATURATING, inputs, errors)
    with pytest.raises(ValueError, match="3 different sizes, got 2"):
        fit(POWER, inputs[:10], errors[:10])
    both = np.geomspace(1e4, 1e6, 8)[:, None] * [1, 100]
    with pytest.raises(ValueError, match="vary independently"):
        fit(JOINT, both, both[:, 0] ** -0.2)


def test_the_command_reads_writes_and_draws(tmp_path, capsys):
    inputs, errors = simulated(JOINT)
    table = tmp_path / "runs.csv"
    runs = zip(*inputs.T, errors, strict=True)
    lines = [f"{n},{d},{2400 * n**0.9 * d},{e}" for n, d, e in runs]
    table.write_text("\n".join(["params_backbone,num_images,flops,error", *lines]))
    words = [f"--workdir={tmp_path}", "--num_resamples=5", "--budgets=h200-day"]
    assert main(["scaling", str(table), "--error=error", *words]) == 0
    found = json.loads((tmp_path / "scaling.json").read_text())
    joint = found["findings"][-1]
    assert joint["runs"] > 3 and joint["refused"] == []
    assert joint["inputs"] == ["params_backbone", "num_images"]
    assert joint["best"] == "joint"
    flops = [plan["flops"] for plan in found["budgets"][0]["best"]]
    assert 0.3 * 989e12 * 86400 in flops
    said = capsys.readouterr().out
    assert "| FLOPs |" in said and (tmp_path / "scaling.md").read_text() in said
    assert {"scores.png", "laws.pdf"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "words, says",
    [
        (["bigface"], "needs a TABLE and one of --error and --score"),
        (["none.csv", "--error=x"], "the table must be"),
        (["bigface", "--error=ijbc_c"], "the column 'ijbc_c'"),
        (["bigface", "--error=challenge", "--budgets=-1"], "positive numbers or"),
        (["bigface", "--error=challenge", "--num_resamples=0"], "draws must be at"),
        (
            ["bigface", "--error=challenge", "--compare=a,b", "--workdir=W"],
            "arrows must name two series, from ['distilled', 'scratch'], got ",
        ),
    ],
)
def test_mistakes_are_one_line(words, says, tmp_path, capsys):
    words = [word.replace("=W", f"={tmp_path}") for word in words]
    assert main(["scaling", *words]) == 2
    assert says in capsys.readouterr().err
