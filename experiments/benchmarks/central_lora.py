"""LoRA in one place: the images of vit_lora in the batches of its clients, one network.

What a round of the cohort is compared with: as many steps on as many images. The
fastest of three forms: batches on one device, whose products take all cores, in one
loop or each called by itself; or cut over a device for each core, in one loop, as
programs with collectives that are called one after the other may wait for each other
on CPU devices for ever.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ours
import workloads
from jax.sharding import NamedSharding, PartitionSpec

from fedfr_jax.distributed import use_every_core


def epoch(work, model, is_loop):
    """(frozen, variables, batches [S, B, ...]) -> variables after S steps."""
    loss_of = optax.softmax_cross_entropy_with_integer_labels

    def step(frozen, variables, batch):
        def loss(params):
            images, labels = batch
            logits, _ = model.apply({**variables, "params": params}, images, True)
            return loss_of(logits, labels).mean()

        with model.frozen.bound(frozen):
            grads = jax.grad(loss)(variables["params"])
        move = lambda x, grad: x - work.rate * grad
        return {**variables, "params": jax.tree.map(move, variables["params"], grads)}

    @jax.jit
    def in_loop(frozen, variables, batches):
        turn = lambda variables, batch: (step(frozen, variables, batch), ())
        return jax.lax.scan(turn, variables, batches)[0]

    compiled = jax.jit(step)

    def one_by_one(frozen, variables, batches):
        for batch in batches:
            variables = compiled(frozen, variables, batch)
        return variables

    return in_loop if is_loop else one_by_one


def forms(work, data, model, variables):
    """{name: function of variables that trains them on all images once}."""
    shape = work.steps, work.batch_size
    images = data.images.reshape(*shape, *work.input_shape)
    batches = images, data.labels.reshape(shape)

    def form(devices, is_loop):
        mesh = jax.make_mesh((devices,), ("batch",), devices=jax.devices()[:devices])
        whole, cut = (NamedSharding(mesh, PartitionSpec(*x)) for x in ((), ("batch",)))
        of_loop = NamedSharding(mesh, PartitionSpec(None, "batch"))
        frozen = jax.device_put(model.frozen.value, whole)
        of_steps = [*zip(*batches, strict=True)]
        placed = jax.device_put(*((batches, of_loop) if is_loop else (of_steps, cut)))
        run = epoch(work, model, is_loop)
        return lambda variables: run(frozen, jax.device_put(variables, whole), placed)

    return {
        "1 devices, one loop": form(1, is_loop=True),
        "1 devices, step by step": form(1, is_loop=False),
        f"{jax.device_count()} devices, one loop": form(jax.device_count(), True),
    }


def main():
    args = workloads.arguments(__doc__)
    use_every_core()
    work, data = workloads.inputs(args)
    model, start = ours.adapted(work)
    runs = forms(work, data, model, start)
    clocks = {name: workloads.Clock() for name in runs}
    states = dict.fromkeys(runs, start)
    for _ in range(1 + args.rounds):
        for name, run in runs.items():
            with clocks[name]:
                states[name] = jax.block_until_ready(run(states[name]))
    best = min(runs, key=lambda name: min(clocks[name].wall[1:]))
    print({name: clock.wall[1:] for name, clock in clocks.items()})
    logits = model.output(states[best], jnp.asarray(data.test_images))
    accuracy = (np.asarray(logits.argmax(1)) == data.test_labels).mean()
    workloads.report(f"jax {jax.__version__}, {best}", clocks[best], accuracy=accuracy)


if __name__ == "__main__":
    main()
