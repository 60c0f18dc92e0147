"""TensorFlow Federated: weighted FedAvg of tff.learning on its local runtime, Keras."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
import tensorflow_federated as tff
import workloads


def network(work) -> tf.keras.Model:
    """The classifier; Keras starts dense and convolution kernels Glorot uniform."""
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.InputLayer(work.input_shape)])
    if work.model == "cnn":
        for width in (32, 64):
            model.add(layers.Conv2D(width, 3, activation="relu"))
        model.add(layers.MaxPool2D(2))
    model.add(layers.Flatten())
    model.add(layers.Dense(128 if work.model == "cnn" else 64, activation="relu"))
    model.add(layers.Dense(work.num_classes))
    return model


def main():
    args = workloads.arguments(__doc__)
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    work, data = workloads.inputs(args)

    def examples(client):
        rows = (data.images[client], data.labels[client])
        rows = tf.data.Dataset.from_tensor_slices(rows)
        return rows.repeat(work.epochs).batch(work.batch_size)

    spec = examples(0).element_spec

    def model_fn():
        return tff.learning.models.from_keras_model(
            network(work),
            input_spec=spec,
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    sgd = tff.learning.optimizers.build_sgdm
    process = tff.learning.algorithms.build_weighted_fed_avg(
        model_fn, client_optimizer_fn=sgd(work.rate), server_optimizer_fn=sgd(1.0)
    )
    state, clock = process.initialize(), workloads.Clock()
    for round in range(1 + args.rounds):
        ids = workloads.cohort(work, round)
        with clock:
            state = process.next(state, [examples(i) for i in ids]).state
    model = network(work)
    process.get_model_weights(state).assign_weights_to(model)
    guess = model.predict(data.test_images, verbose=0).argmax(1)
    version = tff.__version__
    workloads.report(version, clock, accuracy=(guess == data.test_labels).mean())


if __name__ == "__main__":
    main()
