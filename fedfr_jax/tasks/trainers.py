"""Trainers of a config's methods, for every task.

A method is federated, by any algorithm and perhaps with leaves that stay with clients,
or central: one network on the training images of all clients together, as their bound.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax.central.settings import Training, check_patterns, check_training
from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.algorithms.personal import (
    batch_norms,
    check_batch_stats,
    top_blocks,
    with_batch_stats,
    with_personal_layers,
)
from fedfr_jax.federated.algorithms.phases import head_first
from fedfr_jax.federated.algorithms.submodels import (
    with_products,
    with_ranks,
    with_widths,
)
from fedfr_jax.federated.attacks import with_attack
from fedfr_jax.federated.local import (
    by_block,
    layer_wise,
    round_decay,
    step_decay,
    trainable,
)
from fedfr_jax.federated.privacy import calibrate_noise
from fedfr_jax.federated.privacy.mechanism import (
    accountant_of,
    check_privacy,
    mechanism_of,
    private,
)
from fedfr_jax.federated.settings import Federation
from fedfr_jax.federated.systems.failures import num_trained
from fedfr_jax.models.adapters import (
    adapt,
    adapted_variables,
    deployed_variables,
    with_calls,
)
from fedfr_jax.models.frozen import moving_variables, set_frozen, with_frozen
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import build_batching
from fedfr_jax.tasks.experiment import Opened, Trainer
from fedfr_jax.tasks.methods import (
    CORRELATED,
    Leaves,
    Method,
    PrivacyConfig,
)
from fedfr_jax.trees import matching
from fedfr_jax.types import (
    Algorithm,
    CentralTrainer,
    FeatureStorage,
    FederatedTrainer,
    LocalTraining,
    Model,
    PyTree,
    is_image,
)

# Optimizers of optax's that move every number by its own gradients, whatever its leaf.
ELEMENTWISE = (
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "lion", "nadam", "nadamw", "radam", "rmsprop", "yogi"),
)


class Facts(NamedTuple):
    """What only the data and the network decide of methods."""

    model: Model  # over the variables that an algorithm trains
    apply: Callable  # (variables that a client deploys, images) -> output, compiled
    initial: Callable[[], PyTree]  # variables that every method starts from, drawn anew
    shapes: PyTree  # of them
    federation: Federation
    num_clients: int
    seed: int  # draws attackers
    offers: Mapping[str, Any]  # values for algorithms that ask, by names of NEEDS
    prefix: str = ""  # where the network's params lie, such as "backbone/"
    kept: str = ""  # pattern of leaves that stay with clients whatever a method says
    draw: Callable | None = None  # key -> variables; None is the model's own
    draw_kept: Callable | None = None  # key -> those that are `kept`
    start: Callable | None = None  # (variables of the stage before) -> variables


def network_facts(
    opened: Opened,
    model: Model,
    offers: Mapping[str, Any],
    apply: Callable | None = None,
) -> Facts:
    """Facts of a task whose model is initialized from the config's seed.

    Args:
      offers: further offers of the task, by names of NEEDS.
      apply: (variables, images) -> what is evaluated; None: the output.
    """
    config, num_clients = opened.config, opened.population.num_clients

    key = jax.random.key(config.seed)
    common = {"num_clients": num_clients, "model": model}
    common |= {"server_classifier": True, "equal_features": True}
    if model.apply_with_features:
        common["features"] = True
    return Facts(
        model=model,
        apply=jax.jit(apply or model.output),
        initial=lambda: model.init(key),
        shapes=jax.eval_shape(model.init, key),
        federation=config.federation,
        num_clients=num_clients,
        seed=config.seed,
        offers={**common, **offers},
    )


def plain_method(
    method: Method | Training, facts: Facts, opened: Opened, where: str
) -> Trainer:
    """Build the trainer of a method; a central one has no data set yet.

    Args:
      where: the method is, such as "config.methods.fedavg".
    """
    if isinstance(method, Method):
        return build_federated(method, facts, where)
    return build_central(method, facts, opened, where)


def build_federated(
    method: Method,
    facts: Facts,
    where: str,
    around: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
) -> FederatedTrainer:
    """Build the trainer of a federated method.

    Args:
      around: is applied to the algorithm before what is personal.

    Raises:
      ValueError: for what does not fit the network or the clients, such as a pattern
        that matches no leaf.
    """
    with naming(where):
        if facts.model.frozen is None:
            facts = cut_facts(method, facts)
        algorithm = build_algorithm(method, facts, around)
    whole = functools.partial(deployed_variables, facts.model)
    is_cut = facts.model.frozen is not None
    global_model = lambda server: whole(algorithm.global_model(server))
    num_sampled = facts.federation.cohort_size or facts.num_clients
    sampling = facts.federation.sampling
    return FederatedTrainer(
        algorithm=algorithm,
        init_variables=facts.start or (lambda variables: facts.initial()),
        apply=facts.apply,
        global_model=global_model if algorithm.has_global_model else None,
        apply_global=facts.apply,
        frozen_model=facts.model if is_cut else None,
        features=FeatureStorage(method.features, method.features_gib),
        local_epochs=method.local_epochs,
        accountant=accountant_of(algorithm, sampling, facts.num_clients, num_sampled),
        count_flops=facts.model.count_flops,
        model_config=facts.model.config,
    )


def build_central(
    training: Training, facts: Facts, opened: Opened, where: str
) -> CentralTrainer:
    """Build a central trainer, without its data set."""
    num_rows = int(opened.population.offsets[-1])
    check_training(training, where, num_rows, opened.mesh)
    with naming(where):
        training, model, begin = adapted_training(training, facts.model, facts.seed)
    params_of = lambda: jax.eval_shape(begin, facts.shapes)["params"]
    check_patterns(training, where, params_of, opened.mesh)
    with naming(where):
        loss = training.loss(model)
        is_images = is_image(facts.model.input_shape)
        batching = build_batching(training, is_images=is_images)
    return CentralTrainer(
        settings=training,
        dataset=None,
        first_row=0,
        num_rows=num_rows,
        batching=batching,
        loss=loss,
        # A copy: what central training starts from is used up.
        init=lambda key: jax.tree.map(jnp.copy, begin(facts.initial())),
        global_model=functools.partial(deployed_variables, model),
        apply_global=with_adapter_calls(facts.apply, model),
        count_flops=model.count_flops,
        model_config=model.config,
    )


def adapted_training(
    training: Training, model: Model, seed: int, prefix: str = ""
) -> tuple[Training, Model, Callable[[PyTree], PyTree]]:
    """A central training with its adapter: the others' steps are masked.

    Args:
      seed, prefix: as of `cut_network`.

    Returns:
      (training, model, begin), `begin` adds the adapter's leaves to variables.
    """
    if (config := training.adapter) is None:
        return training, model, lambda variables: variables
    if config.ranks is not None or config.average != "factors":
        raise ValueError(
            "adapter.ranks must be None and adapter.average factors in central "
            f"training, got {config.ranks} and {config.average!r}."
        )
    adapted, frozen = adapt(model, config.adapter, config.head, prefix)
    if training.frozen:
        frozen = f"{frozen}|{training.frozen}"
    key = jax.random.fold_in(jax.random.key(seed), 1)
    begin = lambda variables: adapted_variables(adapted, variables, key)
    return training._replace(frozen=frozen), adapted, begin


def with_adapter_calls(apply: Callable, model: Model) -> Callable:
    """A compiled function of a network, which computes with the adapter of `model`."""
    if model.adapter is None:
        return apply
    compiled: Any = apply  # which would not see the adapter's calls
    return jax.jit(with_calls(model.adapter.call)(compiled.__wrapped__))


def build_algorithm(method: Method, facts: Facts, around: Callable) -> Algorithm:
    """Build the algorithm of a method, with all that the method puts around it."""
    # FedNova's momentum is that of its clients.
    offers = {**facts.offers, "momentum": method.momentum}
    make, loss_of = method.algorithm.build(method.loss, offers)
    local = build_local(method, loss_of(facts.model), facts.shapes["params"])
    algorithm = with_leaves(method, lambda x: around(make(x)), local, facts)
    algorithm = with_personal_layers(
        algorithm, facts.kept, init_per_client=facts.draw_kept
    )
    if method.privacy is not None:
        algorithm = with_privacy(algorithm, method.privacy, facts)
    if method.attack is not None:
        attack, share, seed = method.attack
        seed = facts.seed if seed is None else seed
        clients = {"num_clients": facts.num_clients, "seed": seed}
        algorithm = with_attack(algorithm, attack, share=share, **clients)
    if method.on_bad_update is not None:
        algorithm = method.on_bad_update(algorithm, method.on_bad_update.name)
    # A pattern must match: found before any compile.
    jax.eval_shape(algorithm.init, facts.shapes)
    return algorithm


def build_local(method: Method, loss: Callable, params: PyTree = None) -> LocalTraining:
    """Build the `LocalTraining` of a method, for parameters of these shapes."""
    part, clip_norm = method.optimizer, method.clip_norm
    if part.name == "sgd":
        make = part(momentum=method.momentum, weight_decay=method.weight_decay)
    else:
        make = lambda rate: part.factory(rate, **part.settings)
        make = make if part.name in ELEMENTWISE else by_block(make)
    if method.learning_rate_multipliers:
        make = layer_wise(make, method.learning_rate_multipliers)

    def clipped(rate):
        return optax.chain(optax.clip_by_global_norm(clip_norm), make(rate))

    rate = step_decay(method.learning_rate, every=method.decay_epochs)
    falls = {"rounds": method.decay_rounds, "factor": method.decay_factor}
    optimizer = clipped if clip_norm else make
    if params is not None:  # raises for a pattern that matches no leaf
        jax.eval_shape(lambda x: optimizer(0.1).init(x), params)
    return LocalTraining(loss, optimizer, round_decay(rate, **falls))


def with_leaves(
    method: Method, make: Callable, local: LocalTraining, facts: Facts
) -> Algorithm:
    """Build `make(local)` with a method's personal leaves, statistics, aggregation."""
    personal = select_leaves(facts.model, method.personal, facts.prefix)
    if facts.model.frozen is not None and isinstance(personal, str) and personal:
        if not any(jax.tree.leaves(matching(personal, min_leaves=0)(facts.shapes))):
            raise ValueError(
                "personal must match leaves that are not frozen, got "
                f"{method.personal!r}. Change it, `frozen` or `adapter`."
            )
    train: LocalTraining | Callable = local
    if method.personal_epochs:
        head = "|".join(f"(?:{part})" for part in (personal, facts.kept) if part)
        if not head:
            raise ValueError(
                "personal_epochs needs personal leaves. Set e.g. personal={'blocks': "
                "1}."
            )
        params = facts.shapes["params"]
        jax.eval_shape(lambda params: trainable(head, params)[0], params)
        train = head_first(local, head=head, epochs=method.personal_epochs)
    algorithm = with_parts(make(train), method, facts.model)
    algorithm = with_batch_stats(algorithm, method.batch_stats)
    if method.batch_stats != "average":
        check_batch_stats(facts.shapes)  # some of which may be personal
    algorithm = with_aggregation(algorithm, *method.aggregation)
    draw = (facts.draw or facts.model.init) if method.init_per_client else None
    return with_personal_layers(algorithm, personal, init_per_client=draw)


def with_parts(algorithm: Algorithm, method: Method, model: Model) -> Algorithm:
    """Give clients parts of the network or of its adapter, as a method says."""
    if method.widths is not None:
        return with_widths(algorithm, model, method.widths)
    if method.adapter is None:
        return algorithm
    if method.adapter.ranks is not None:
        return with_ranks(algorithm, method.adapter.ranks)
    products = method.adapter.average == "products"
    return with_products(algorithm) if products else algorithm


def cut_facts(method: Method, facts: Facts) -> Facts:
    """Facts of the network with a method's adapter and without its frozen leaves."""
    model, begin = cut_network(method, facts.model, facts.seed)
    if model is facts.model:
        return facts
    start = facts.start or (lambda variables: facts.initial())
    of_network = lambda x: model if x is facts.model else x
    return facts._replace(
        model=model,
        apply=with_adapter_calls(facts.apply, model),
        start=lambda variables: begin(start(variables)),
        shapes=jax.eval_shape(model.init, jax.random.key(0)),
        offers={name: of_network(x) for name, x in facts.offers.items()},
    )


def cut_network(
    method: Method, model: Model, seed: int, prefix: str = ""
) -> tuple[Model, Callable[[PyTree], PyTree]]:
    """A network with a method's adapter and without its frozen leaves.

    Args:
      seed: draws the adapter.
      prefix: where the network's params lie below params, such as "backbone/".

    Returns:
      (model, begin): `begin` sets the frozen leaves, of all variables of the network,
      and returns the others; it does nothing where none is frozen.
    """
    frozen = select_blocks(model, method.frozen, prefix)
    if method.adapter is not None:
        model, base = adapt(model, method.adapter.adapter, method.adapter.head, prefix)
        frozen = f"{base}|{frozen}" if frozen else base
    if not frozen:
        return model, lambda variables: variables
    cut, key = with_frozen(model, frozen), jax.random.fold_in(jax.random.key(seed), 1)

    def begin(variables):
        if cut.adapter:
            variables = adapted_variables(cut, variables, key)
        set_frozen(cut, variables)
        return moving_variables(cut, variables)

    return cut, begin


def select_leaves(
    model: Model, selection: str | Leaves | None, at: str = ""
) -> str | Callable:
    """Select leaves: those of `select_blocks`, or all of every batch norm (FedBN)."""
    if not isinstance(selection, Leaves) or selection.batch_norms is None:
        return select_blocks(model, selection, at)
    return batch_norms_at(at) if selection.batch_norms else ""


def select_blocks(model: Model, selection: str | Leaves | None, at: str = "") -> str:
    """Select leaves by a regular expression over paths, or by blocks.

    The top K blocks (FedPer; 1 is the head), or all but those (LG-FedAvg).

    Args:
      at: where the network's params lie below params, such as "backbone/".

    Raises:
      ValueError: for more blocks than the model has.
    """
    if not selection or isinstance(selection, str):
        return selection or ""
    number = selection.all_but_blocks
    if number is None:
        return top_blocks(model.blocks, selection.blocks or 0, prefix=at)
    top = top_blocks(model.blocks, number, prefix=at)
    if not 0 < number < len(model.blocks):
        raise ValueError(
            f"all_but_blocks must be in [1, {len(model.blocks) - 1}], got {number}."
        )
    return f"^(?=params/{at}|batch_stats/)(?!{top.removeprefix('^')})"


def batch_norms_at(at: str) -> Callable:
    """`batch_norms` of a model whose params are `at` a path below params."""
    name = at.removesuffix("/")
    if not name:
        return batch_norms

    def select(variables: PyTree) -> PyTree:
        params = variables["params"]
        selected = batch_norms({**variables, "params": params[name]})
        others = jax.tree.map(lambda _: False, params)
        return {**selected, "params": {**others, name: selected["params"]}}

    return select


def with_privacy(
    algorithm: Algorithm, config: PrivacyConfig, facts: Facts
) -> Algorithm:
    """Make an algorithm private, with noise calibrated to epsilon if it is set."""
    federation, num_clients = facts.federation, facts.num_clients
    num_sampled = federation.cohort_size or num_clients
    cohort_size = num_trained(federation.straggling, num_sampled)
    noise, rounds = config.noise, federation.rounds
    if noise is not None:
        noise = noise(rounds=rounds) if noise.name in CORRELATED else noise()
    is_calibrated = "noise_multiplier" not in config.mechanism.settings
    given = {"noise_multiplier": 0.0} if is_calibrated else {}
    privacy = config.mechanism(cohort_size=cohort_size, noise=noise, **given)
    with naming(config.mechanism.where):
        check_privacy(privacy)
        if is_calibrated:
            mechanism = mechanism_of(
                privacy, federation.sampling, num_clients, num_sampled
            )
            needed = calibrate_noise(mechanism, epsilon=privacy.epsilon, rounds=rounds)
            privacy = privacy._replace(noise_multiplier=needed)
        return private(algorithm, privacy)


def max_epochs(method: Method, federation: Federation) -> int:
    """Most epochs of a client in a round."""
    epochs = federation.local_epochs
    if method.local_epochs is not None:
        epochs = method.local_epochs
    return int(np.max(epochs)) + method.personal_epochs
