"""This engine on the same work: the product's own simulation, nothing special-cased.

All devices, one lane: measured fastest for every workload here. The first round
compiles. --torch trains the module of PyTorch's peers by `ff.from_torch`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import phases
import workloads
from flax import linen as nn

from fedfr_jax.convolutions import use_forms
from fedfr_jax.data.augment import horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.distributed import use_every_core
from fedfr_jax.federated import simulation
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.privacy.mechanism import Privacy, private
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.settings import Federation, Settings
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS, adapters
from fedfr_jax.models.linen import from_linen, xavier_uniform
from fedfr_jax.models.torch_module import from_torch
from fedfr_jax.parts import parse
from fedfr_jax.tasks.faces.methods import METHODS, Counts, face_method
from fedfr_jax.types import Cohort, Dataset, LocalTraining

GLOROT = xavier_uniform()  # as the peers start


class LeNet(nn.Module):
    """BlazeFL's or PFLlib's CNN without its last layer, as one writes it in flax."""

    widths: tuple = (6, 16)
    hidden: tuple = (120, 84)

    @nn.compact
    def __call__(self, x, train=False):
        for width in self.widths:
            x = nn.Conv(width, (5, 5), padding="VALID", kernel_init=GLOROT)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, kernel_init=GLOROT)(x))
        return x


def network(work, **settings):
    """The workload's model."""
    if work.model == "lenet":
        return from_linen(LeNet(), work.input_shape, 84)
    if work.model == "wide_lenet":
        return from_linen(LeNet((32, 64), (512,)), work.input_shape, 512)
    if work.model == "resnet18":
        settings |= {"num_classes": work.num_classes, "stem": "imagenet"}
        return MODELS["resnet"](work.input_shape, **settings)
    if work.model == "cnn":
        settings |= {"dropout": work.dropout}
    if work.model == "sphereface":
        settings |= {"blocks": workloads.BLOCKS, "widths": workloads.WIDTHS}
        settings |= {"embedding_dim": workloads.DIM}
    if work.model == "vit":
        settings |= {**workloads.VIT, "num_classes": work.num_classes}
        return MODELS["vision_transformer"](work.input_shape, **settings)
    return MODELS[work.model](work.input_shape, **settings)


def counted(work):
    """The workload's algorithm in the form whose operations can be counted."""
    is_stacked = work.model in ("sphereface", "vit")
    settings = {"scan_blocks": False} if is_stacked else {}
    model = network(work, **settings)
    return maker(work)(work, model)[0]


def digest_of(variables) -> str:
    """Of all leaves of a network, see `workloads.digest`."""
    return workloads.digest(map(np.asarray, jax.tree.leaves(variables)))


def maker(work):
    """`faces`, `fine_tuning` or `classifier`."""
    return MAKERS.get(work.model, classifier)


def classification(work, model=None):
    """(loss of `LocalTraining`, variables, logits) of a backbone with a linear head."""
    model = model or network(work)
    backbone = model.init(jax.random.key(0))
    shape = (model.embedding_dim, work.num_classes)
    kernel = xavier_uniform()(jax.random.key(1), shape)
    head = {"kernel": kernel, "bias": jnp.zeros(work.num_classes)}
    params = {"backbone": backbone["params"], "head": head}

    def logits(variables, images, train, key=None):
        params, stats = variables["params"], variables["batch_stats"]
        backbone = {"params": params["backbone"], "batch_stats": stats}
        features, stats = model.apply(backbone, images, train, key=key)
        head = params["head"]
        return features @ head["kernel"] + head["bias"][None], stats

    variables = {"params": params, "batch_stats": backbone["batch_stats"]}
    return cross_entropy(logits), variables, logits


def cross_entropy(logits):
    """Loss of `LocalTraining` of (variables, images, train, key) -> (logits, stats)."""

    def loss(variables, batch, key):
        values, stats = logits(variables, batch.images, True, key=key)
        logs = jax.nn.log_softmax(values)
        losses = -jnp.take_along_axis(logs, batch.labels[:, None], 1)[:, 0]
        return masked_mean(losses, batch.is_valid), (stats, {})

    return loss


def classifier(work, model=None):
    """(algorithm, variables, logits, Feed) of FedAvg on images with a linear head."""
    _, variables, logits = classification(work, model)
    return of_logits(work, logits, variables)


def of_logits(work, logits, variables):
    """`classifier` of (variables, images, train, key) -> (logits, statistics)."""
    local = LocalTraining(cross_entropy(logits), sgd(), work.rate)
    algorithm = fedavg(local, weighting="uniform")
    if work.private:
        clip, noise, noise_cohort = work.private
        settings = Privacy(clip, noise, work.cohort, delta=1e-6)
        settings = settings._replace(noise_cohort_size=noise_cohort, population=10**6)
        algorithm = private(algorithm, settings)
    feed = Batching(work.batch_size, shuffle=work.epochs > 1)  # as BlazeFL, each epoch
    return algorithm, variables, logits, feed


def whole(work, model=None):
    """`classifier` of a network that has the linear head itself."""
    model = model or network(work)
    return of_logits(work, model.apply, model.init(jax.random.key(0)))


def classifier_of_torch(work):
    """`classifier` of the module that PyTorch's peers train, unchanged."""
    import torch_models

    model = from_torch(torch_models.network(work), work.input_shape)
    return whole(work, model)


def adapted(work, model=None):
    """(a frozen network with LoRA and a new last layer, its variables that move)."""
    model = model or network(work)
    targets = "|".join(workloads.TARGETS)
    lora = adapters.lora(rank=workloads.RANK, alpha=workloads.ALPHA, targets=targets)
    base = model.init(jax.random.key(0))
    model = adapters.with_adapter(model, lora, variables=base)
    return model, model.init(jax.random.key(1))


def fine_tuning(work, model=None):
    """`classifier` of a network of which LoRA and the last layer move."""
    model, variables = adapted(work, model)
    return of_logits(work, model.apply, variables)


def faces(work, model=None):
    """The same of FedFR: all three terms, public classes, no hard negatives."""
    model = model or network(work)
    algorithm = {"name": "fedfr", "hard_negative_threshold": None}
    options = {"algorithm": algorithm, "learning_rate": work.rate, "decay_epochs": 0}
    counts = Counts(work.num_classes, parse(Federation, {}))
    where = "config.methods.fedfr"
    trainer = face_method(parse(METHODS, options, where), model, counts, where)
    shape = (workloads.NUM_PUBLIC, workloads.DIM)
    phi = 0.01 * jax.random.normal(jax.random.key(1), shape)
    drawn = model.init(jax.random.key(0))
    params = {"backbone": drawn["params"], "phi": phi}
    start = trainer.init_variables({**drawn, "params": params})
    feed = Batching(work.batch_size, horizontal_flip(), drop_last=True)
    return trainer.algorithm, start, None, feed


MAKERS = {"sphereface": faces, "vit": fine_tuning, "resnet18": whole}


def build(work, data, made=None, sizes=None, mesh=None, **options):
    """(simulation, server, logits or None).

    Args:
      sizes: [N] images of each client; None for the workload's own number.
      made: what `classifier` or `faces` gives; None for the workload's own.
      options: of `Settings`, such as clients_per_device.
    """
    settings = {"cohort_size": work.cohort, "local_epochs": work.epochs, **options}
    settings = Settings(**settings)
    algorithm, variables, logits, feed = made or maker(work)(work)
    if data.images.dtype == np.uint8:  # made floats in a step, as by `fedfr train`
        feed = feed._replace(augment=normalize(mean=127.5, std=127.5))
    num_rows = work.population * work.examples
    if sizes is None:
        sizes = np.full(work.population, work.examples)
    sim = simulation.build_simulation(
        algorithm,
        feed,
        Dataset.from_arrays(
            data.images.reshape(num_rows, *work.input_shape), data.labels.reshape(-1)
        ),
        Population(
            np.concatenate([[0], np.cumsum(sizes)]),
            np.full(work.population, work.num_classes, np.int32),
        ),
        settings,
        mesh=mesh or make_mesh(),
    )
    return sim, simulation.start_simulation(sim, variables), logits


def main():
    args = workloads.arguments(__doc__, torch={"action": "store_true"})
    use_every_core()  # before JAX first asks for devices
    work, data = workloads.inputs(args, as_pixels=True)
    made = classifier_of_torch(work) if args.torch else None
    sim, server, logits = build(work, data, made)
    store, clock, test = simulation.open_store(sim, server), workloads.Clock(), None
    if logits:
        # Alone on a device, and outside of loops, where XLA's convolution is fastest.
        apply = jax.jit(lambda v, x: logits(v, x, False)[0].argmax(1))
        images = np.array_split(data.test_images, -(-len(data.test_images) // 250))
        if data.images.dtype == np.uint8:
            images = [workloads.to_unit(part) for part in images]
        model = lambda: sim.algorithm.global_model(server)
        on_one = lambda tree: jax.device_put(tree, jax.devices()[0])
        test = lambda: [apply(on_one(model()), part) for part in images]
        evaluated = lambda: (np.concatenate(test()) == data.test_labels).mean()
    for round in range(1 + args.rounds):
        cohort = Cohort(workloads.cohort(work, round), round)
        with clock:
            server, outcome = run_cohort(sim, server, store, cohort)
            jax.block_until_ready(server)
        clock.evaluate(work, lambda: evaluated())
    facts = {"loss": outcome.metrics["loss"].mean()}
    if logits:
        facts = {"accuracy": evaluated(), "digest": digest_of(model())}
    if not args.data:
        facts |= compute(work, sim, server, clock, outcome.schedule, test)
    workloads.report(f"jax {jax.__version__}", clock, **facts)


def compute(work, sim, server, clock, plan, test) -> dict:
    """Where a round's time goes, and how near the arithmetic of the machine it is."""
    with use_forms("xla"):  # whose operations are those of the network
        rate = work.steps * phases.step_flops(sim, server, counted(work))
    rate /= min(clock.wall[1:])
    parts = phases.seconds(sim, server, work, test)
    return {
        "fraction_of_matmul_rate": rate / phases.matmul_rate(),
        "executed_over_useful": plan.executed_steps / plan.useful_steps,
        "phases": [[name, value] for name, value in parts.items()],
    }


if __name__ == "__main__":
    main()
