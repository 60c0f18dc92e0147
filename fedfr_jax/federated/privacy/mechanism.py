"""User-level differential privacy for any algorithm that averages updates.

McMahan et al. 2018, arXiv:1710.06963: each client's whole update is clipped, all
clients count equally, the sum is divided by a constant, and Gaussian noise is added to
it once. The clip norm may follow a quantile of the updates' norms (Andrew et al. 2021,
arXiv:1905.03871).

What a client sends besides its update would bypass the mechanism, and is refused when
the round is traced, see `check_covered`. Metrics of single clients exist in a
simulation only: they are not private.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.aggregation.exact_sum import INT32_MAX, as_int32, decode
from fedfr_jax.federated.aggregation.mean import to_float32
from fedfr_jax.federated.privacy.accountant import Accountant, build_accountant
from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.privacy.ledger import Ledger, Mechanism
from fedfr_jax.federated.privacy.skellam import (
    Skellam,
    check_skellam,
    draw,
    noise_table,
    norm_before_rounding,
    round_to_norm,
)
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.ranges import Count, NonNegative, OpenShare, Positive, Whole
from fedfr_jax.schema import check_values, kinds_of
from fedfr_jax.types import (
    LAST,
    MEAN,
    Aggregator,
    Algorithm,
    AnyArray,
    ClientOutput,
    PyTree,
    Summary,
)

CLIP_NORM = "clip_norm"  # metric of a round


class Privacy(NamedTuple):
    """Settings of an algorithm's privacy mechanism."""

    # C, the largest L2 norm of all leaves that a client sends together, running
    # statistics among them; where it moves, the first.
    clip_norm: Positive
    # z, the noise's standard deviation on the sum over C, see `calibrate_noise`; 0
    # clips only.
    noise_multiplier: NonNegative
    cohort_size: Count  # K of a round, the mean of a Poisson cohort; divides the sum
    delta: OpenShare  # chance that epsilon does not hold, at most 1 / N
    epsilon: Positive = math.inf  # no round is trained that would exceed it
    # Of the updates' norms that C follows, such as 0.5; None keeps C. Then C is
    # C exp(-eta (b - quantile)), b the noisy share of updates that were not clipped.
    clip_quantile: OpenShare | None = None
    clip_learning_rate: Positive = 0.2  # eta
    # Of the noise on how many were not clipped, which is taken from z; 0: K / 20.
    clip_count_std: NonNegative = 0.0
    # A small cohort simulates one of this size, whose noise on the mean, and whose
    # epsilon, it has; 0: K itself.
    noise_cohort_size: Whole = 0
    # Clients that these stand for, from which such a cohort is sampled; 0: N.
    population: Whole = 0
    # Every client adds the noise to what it sends: no trust in the server, and K times
    # the variance on the sum.
    is_local: bool = False
    # `banded_noise(...)` or `blt_noise(...)`; `skellam_noise(...)` of clients whose
    # updates go into a secure sum; None: independent in each round.
    noise: Strategy | Skellam | None = None

    @property
    def strategy(self) -> Strategy | None:
        """Strategy of correlated noise; None: independent."""
        return self.noise if isinstance(self.noise, Strategy) else None

    @property
    def skellam(self) -> Skellam | None:
        """Noise of clients in whole numbers; None: real."""
        return self.noise if isinstance(self.noise, Skellam) else None

    @property
    def count_std(self) -> float:
        """Standard deviation of the noise on the number of unclipped updates."""
        return self.clip_count_std or self.cohort_size / 20

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of updates of norm at most 1."""
        std = self.noise_multiplier
        if self.clip_quantile is not None and std:
            # z^-2 = z_sum^-2 + (2 s)^-2: both releases together have noise z.
            std = (std**-2 - (2 * self.count_std) ** -2) ** -0.5
        if self.strategy:
            std *= self.strategy.sensitivity(self.strategy.rounds)
        return std * self.cohort_size / (self.noise_cohort_size or self.cohort_size)


def private(algorithm: Algorithm, settings: Privacy) -> Algorithm:
    """Add user-level differential privacy to an algorithm.

    The clients' weights are ignored. Personal leaves are not sent, and need no noise:
    `private` may go inside or outside of `with_personal_layers`.

    Raises:
      ValueError: for an algorithm that sends no plain mean, or settings that exclude
        each other.
    """
    check_privacy(settings)
    if algorithm.aggregator is None or algorithm.aggregator.role != MEAN:
        raise ValueError(
            "privacy needs an algorithm that aggregates by a plain mean, got "
            f"{algorithm}. Choose an algorithm like fedavg, without ranks or widths "
            "of clients, and remove the key aggregation."
        )

    def server_update(server, result):
        # The algorithm sees the aggregate only, as of K clients, not who took part.
        mean = result._replace(
            metrics={},
            per_client=(),
            sums=(),
            is_received=None,
            weights=jnp.ones(settings.cohort_size),
        )
        return algorithm.server_update(server, mean)

    def check_cohort(number):
        algorithm.check_cohort(number)
        if number != settings.cohort_size:
            raise ValueError(
                "federation.cohort_size must equal that of privacy, "
                f"{settings.cohort_size}, by which the sum is divided, got {number}."
            )

    covered = algorithm._replace(
        server_update=server_update, check_cohort=check_cohort, privacy=settings
    )
    if noise := settings.skellam:
        return with_aggregation(covered, skellam_mean(settings, noise))
    return with_aggregation(covered, private_mean(settings))


def check_privacy(settings: Privacy) -> None:
    """Raise ValueError for settings out of range, or that exclude each other."""
    chosen, defaults = settings._asdict(), Privacy._field_defaults
    chosen = {k: x for k, x in chosen.items() if x is not defaults.get(k)}
    check_values("privacy.", chosen, kinds_of(Privacy))
    others = ("noise", "noise_cohort_size", "clip_quantile")
    pairs = [*(("is_local", name) for name in others), ("noise", "clip_quantile")]
    if settings.skellam:
        pairs.append(("noise", "noise_cohort_size"))
        check_skellam(settings.skellam, settings.noise_multiplier, settings.cohort_size)
    for pair in pairs:
        if chosen.keys() >= {*pair}:
            raise ValueError(
                "privacy.{} cannot be set together with privacy.{}: both change what "
                "noise there is. Remove one of them.".format(*pair)
            )
    has_count = settings.clip_quantile is not None
    if has_count and settings.noise_multiplier >= 2 * settings.count_std:
        raise ValueError(
            "privacy.clip_count_std must be above half the noise multiplier of "
            f"{settings.noise_multiplier:.4g}, got {settings.count_std:.4g}: the count "
            "of updates that were not clipped takes its share of the noise."
        )


def clip_update(update: PyTree, max_norm: AnyArray) -> tuple[PyTree, dict]:
    """Clip an update, (clipped, metrics); one that is not finite becomes zeros."""
    from jax_privacy import clipping  # of the extra [privacy]

    # One pass for the norm, which is finite if all numbers are, and one to scale.
    clipped, norm = clipping.clip_pytree(update, max_norm, nan_safe=False)
    is_finite = jnp.isfinite(norm)
    clipped = trees.where(is_finite, clipped, optax.tree.zeros_like(clipped))
    norm = jnp.where(is_finite, norm, 0)
    is_inside = norm <= jnp.asarray(max_norm, norm.dtype)
    metrics = {
        "clip_fraction": jnp.where(is_inside, 0.0, 1.0),
        "dropped": jnp.where(is_finite, 0.0, 1.0),
    }
    return clipped, metrics


class MechanismState(NamedTuple):
    """State of the mechanism between rounds."""

    clip_norm: jax.Array  # [] C
    noise: PyTree  # of the strategy: () of independent noise


def private_mean(settings: Privacy) -> Aggregator:
    """Sum of clipped updates plus noise, divided by K, in place of the mean.

    The noise is a function of (seed, round), the same on any devices.
    """
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import streaming_matrix

    noise_std = settings.noise_std  # a number, before anything is traced
    strategy, is_local = settings.strategy, settings.is_local
    noising = strategy.noising if strategy else streaming_matrix.identity()

    def server_noise(std) -> Any:
        return noise_addition.matrix_factorization_privatizer(
            noising, stddev=std, prng_key=0
        )

    def init(like):
        clip_norm = jnp.asarray(settings.clip_norm, jnp.result_type(float))
        like = jax.tree.map(to_float32, like)
        noise = () if is_local else server_noise(1.0).init(like)[1]
        return MechanismState(clip_norm, noise)

    def summarize(key, state, update, weight):
        del weight
        clipped, metrics = clip_update(
            jax.tree.map(to_float32, update), state.clip_norm
        )
        if is_local:
            std = noise_std * state.clip_norm
            own_noise: Any = noise_addition.gaussian_privatizer(stddev=std, prng_key=0)
            clipped = own_noise.update(clipped, (key, ()))[0]
        # With a constant clip norm the count is not sent.
        count = () if settings.clip_quantile is None else 0.5 - metrics["clip_fraction"]
        return Summary(clipped, jnp.float32(1), count), metrics

    def finish(key, state, total):
        noise_key, count_key = jax.random.split(key)
        noisy, (clip_norm, noise) = total.update, state
        if not is_local:
            # jax_privacy's state is (key, noise of the strategy); the key is the
            # round's.
            add_noise = server_noise(noise_std * clip_norm).update
            with jax.numpy_rank_promotion("allow"):  # jax_privacy's buffers broadcast
                noisy, (_, noise) = add_noise(noisy, (noise_key, noise))
        mean = jax.tree.map(lambda x: x / settings.cohort_size, noisy)
        if settings.clip_quantile is not None:
            count_noise = settings.count_std * jax.random.normal(count_key)
            clip_norm = next_clip_norm(clip_norm, total.extra + count_noise, settings)
        # The metric is the norm that this round was clipped to.
        return mean, MechanismState(clip_norm, noise), {CLIP_NORM: state.clip_norm}

    # An empty cohort is no exception: that it is empty is private too.
    return Aggregator(init, summarize, finish, role=LAST, min_clients=0)


def next_clip_norm(
    clip_norm: jax.Array, centered_count: jax.Array, settings: Privacy
) -> jax.Array:
    """Update the clip norm: C exp(-eta (b - quantile)), b the unclipped share.

    Args:
      centered_count: noisy sum over clients of 1/2 where the update was not clipped
        and -1/2 where it was, which is of sensitivity 1/2.
    """
    assert settings.clip_quantile is not None
    share = centered_count / settings.cohort_size + 0.5
    rate = settings.clip_learning_rate
    return clip_norm * jnp.exp(-rate * (share - settings.clip_quantile))


def skellam_mean(settings: Privacy, noise: Skellam) -> Aggregator:
    """Sum of clipped, rounded and noised updates, divided by K, in place of the mean.

    The noise is a function of (seed, round, client).
    """
    clip_norm = settings.clip_norm
    std = noise.share_std(settings.noise_multiplier, settings.cohort_size)
    table, scale = noise_table(std), noise.levels / clip_norm
    largest = noise.levels + table.largest  # of a client's numbers, in absolute value

    def summarize(key, state, update, weight):
        del state, weight
        update = jax.tree.map(to_float32, update)
        size = sum(x.size for x in jax.tree.leaves(update))
        max_norm = norm_before_rounding(noise.levels, size) / scale
        clipped, metrics = clip_update(update, max_norm)
        round_key, noise_key = jax.random.split(key)
        codes = round_to_norm(round_key, clipped, scale, noise.levels)
        noised = jax.tree.map(jnp.add, codes, draw(noise_key, codes, table))
        return Summary(noised, jnp.float32(1)), metrics

    def finish(key, state, total):
        del key
        mean = lambda x: decode(x, scale) / settings.cohort_size
        return jax.tree.map(mean, total.update), state, {CLIP_NORM: clip_norm}

    return Aggregator(
        summarize=summarize,
        finish=finish,
        role=LAST,
        min_clients=noise.num_shares(settings.cohort_size),
        max_clients=INT32_MAX // largest,
        compress=as_int32,
    )


def mechanism_of(
    settings: Privacy, sampling: Sampling, num_clients: int, num_sampled: int
) -> Mechanism:
    """Mechanism to account for, in a population of N clients.

    Args:
      num_sampled: clients that a round samples, with the stragglers that are dropped.
    """
    cohort_size = settings.noise_cohort_size or settings.cohort_size
    if 0 < settings.population < num_clients:
        raise ValueError(
            f"privacy.population must be at least the {num_clients} clients there are, "
            f"got {settings.population}. Remove it, or give the number that they stand "
            "for."
        )
    num_clients = settings.population or num_clients
    if cohort_size > num_clients:
        raise ValueError(
            f"privacy.noise_cohort_size must be at most the {num_clients} clients, got "
            f"{cohort_size}. Set privacy.population to the number of clients that "
            "these stand for."
        )
    scale = cohort_size / settings.cohort_size
    return Mechanism(
        num_clients=num_clients,
        cohort_size=cohort_size,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        sampling=sampling._replace(capacity=int(sampling.capacity * scale)),
        is_local=settings.is_local,
        strategy=settings.strategy,
        num_sampled=round(num_sampled * scale),
        clip_levels=settings.skellam.levels if settings.skellam else 0,
    )


def accountant_of(
    algorithm: Algorithm,
    sampling: Sampling,
    num_clients: int,
    num_sampled: int,
    past: Ledger = (),
) -> Accountant | None:
    """Accountant of the algorithm's privacy; None without.

    Args:
      num_sampled: as of `mechanism_of`.
      past: of the rounds that were trained before.
    """
    if (settings := algorithm.privacy) is None:
        return None
    mechanism = mechanism_of(settings, sampling, num_clients, num_sampled)
    return build_accountant(mechanism, settings.epsilon, past)


def check_prepare(algorithm: Algorithm) -> None:
    """Raise ValueError for a private algorithm that may prepare of clients' examples.

    A trace would not find examples that `prepare` has of a closure: it is declared.
    """
    is_covered = algorithm.prepare is None or algorithm.prepare_is_local
    if algorithm.privacy and not is_covered:
        raise ValueError(
            "privacy must cover everything that clients send, got what the server "
            f"prepares of the clients' examples in {algorithm}, which bypasses the "
            "mechanism. Choose an algorithm without `prepare`; or, if each client can "
            "compute its part itself, of its own and public examples, replace "
            "prepare_is_local by True."
        )


def check_covered(algorithm: Algorithm, output: ClientOutput) -> None:
    """Check that clients send nothing that the mechanism does not cover.

    Args:
      output: of one client, arrays or shapes.

    Raises:
      ValueError: naming what bypasses the mechanism.
    """
    if algorithm.privacy is None:
        return
    check_prepare(algorithm)
    for description, tree in {
        "numbers that each client uploads for itself": output.per_client,
        "sums beside the update, such as running statistics of one client": output.sums,
    }.items():
        if jax.tree.leaves(tree):
            raise ValueError(
                "privacy must cover everything that clients send, got "
                f"{description} of {algorithm}, which bypass the mechanism. Choose an "
                "algorithm that only sends its update."
            )
