"""Contracts between packages: models, data sources, algorithms, stages.

Shape letters, the same everywhere: N clients in the population, K clients in a
round's cohort, L lanes trained at once on a device, S local steps, B batch,
T examples in a data set, H W C image, D embedding, M classes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any
AnyArray = Any  # of NumPy or JAX, on the host or a device
# Of one input: (H, W, C) of an image, (D,) of a vector, or {name: shape} of several
# arrays, which a model gets as a dict.
InputShape = tuple[int, ...] | Mapping[str, tuple[int, ...]]
# Where features of frozen layers are kept; off: nowhere; auto: where they fit
FeaturePlace = Literal["auto", "off", "device", "host", "disk"]
CHUNK_BYTES = 2**25
IGNORE_INDEX = 255  # in a mask: no class; not trained on and not evaluated
TRAIN, QUERY, GALLERY = 0, 1, 2  # use of an image of a re-identification set


def is_image(shape: InputShape) -> TypeGuard[tuple[int, int, int]]:
    """Whether an input of this shape is an image, (H, W, C)."""
    return isinstance(shape, tuple) and len(shape) == 3


def input_structs(shape: InputShape, count: int = 1) -> PyTree:
    """ShapeDtypeStructs of a batch of `count` inputs of a model, all float32."""
    if isinstance(shape, Mapping):
        return {name: input_structs(x, count) for name, x in shape.items()}
    return jax.ShapeDtypeStruct((count, *shape), jnp.float32)


def model_inputs(inputs: PyTree) -> PyTree:
    """The model's input: inputs["image"], or all inputs if there is no image."""
    return inputs["image"] if "image" in inputs else inputs


class Model(NamedTuple):
    """A network from inputs to embeddings or logits, as functions.

    A network on vectors takes x [B, D], one on several arrays {name: [B, ...]}.

    `apply` takes (variables, x [B, H, W, C] in [-1, 1], train=False, key=None) and
    gives (output [B, D], batch_stats), of a segmenter the logits of every pixel
    [B, H, W, D]; `key` is for dropout in training.
    """

    init: Callable[[jax.Array], PyTree]  # key -> {"params": ..., "batch_stats": ...}
    apply: Callable[..., tuple[jax.Array, PyTree]]
    input_shape: InputShape
    embedding_dim: int  # D, the number of classes of a classifier or segmenter
    # Path prefixes below "params" in the order of the data: "stem", "stage1/block1".
    blocks: tuple[str, ...] = ()
    # () -> FLOPs of the forward pass of one image; None: counted in a trace of `apply`
    count_flops: Callable[[], int] | None = None
    # As `apply`, but -> (output, features [B, D] or [B, h, w, D], batch_stats), with
    # the encoder's output, which a classifier or a decoder takes.
    apply_with_features: Callable[..., tuple[jax.Array, jax.Array, PyTree]] | None = (
        None
    )
    # {"name": of MODELS, settings of its factory} that build it, if known
    config: Mapping[str, Any] | None = None
    frozen: Any = None  # `constants.Constant`: leaves that are none of its variables
    adapter: Any = None  # `models.adapters.Adapter`

    @property
    def features(self) -> Callable[..., tuple[jax.Array, jax.Array, PyTree]]:
        """`apply_with_features`, which must be there."""
        if self.apply_with_features is None:
            raise ValueError(
                "config.model.name must be a model with features, got one without."
            )
        return self.apply_with_features

    @property
    def output(self) -> Callable[[PyTree, Any], jax.Array]:
        """(variables, x) -> the output of `apply` in evaluation mode."""
        apply = self.apply
        return lambda variables, x: apply(variables, x, False)[0]

    def wrapped(self, wrap: Callable[[Callable], Callable]) -> "Model":
        """The model with `wrap` around its functions."""
        features = self.apply_with_features and wrap(self.apply_with_features)
        return self._replace(apply=wrap(self.apply), apply_with_features=features)

    @property
    def flops(self) -> int:
        """FLOPs of one image, twice the multiply-adds, if the network counts them."""
        assert self.count_flops
        return self.count_flops()


class Masks(NamedTuple):
    """Segmentation masks of a source's images, decoded on demand."""

    # [n] int -> uint8 [n, H, W], each in [0, M) or IGNORE_INDEX
    read: Callable[[np.ndarray], np.ndarray]
    class_names: tuple[str, ...]  # M names of the pixels' classes
    class_colors: tuple[tuple[int, int, int], ...] | None = None  # M, for images


class Preprocessing(NamedTuple):
    """Preprocessing of an image file for embedding and evaluation.

    It is stored with a network's weights. The defaults are for networks without a
    record: external weights, and data that are no image files.
    """

    # "stretch" to the network's (H, W), or "crop" the largest centered part of its
    # aspect ratio
    resize: Literal["stretch", "crop"] = "crop"
    kernel: Literal["bilinear", "bicubic"] = "bilinear"  # with antialiasing
    alignment: Literal["arcface"] | None = None  # by five landmarks to that template
    inverted: bool = False  # black becomes white
    # (pixel - mean) / std of pixels in [0, 255], one number or one for each channel
    mean: float | tuple[float, ...] = 127.5
    std: float | tuple[float, ...] = 127.5
    mirrored: bool = False  # the mirror image's embedding is added


class StoredImages(NamedTuple):
    """Names, sizes and checksums of a source's images, to detect changes."""

    names: Sequence[str]  # T, paths below the source's, or numbers of rows
    # [n] int -> [n] int64 bytes of each, and [n] uint32 checksums of their contents,
    # 0 where these are not computed
    facts: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    is_named: bool = True  # False where `names` are numbers of rows


class Source(NamedTuple):
    """A labeled set of images (or other inputs), decoded on demand.

    Vectors [D] are read as float32 [n, D]; their `input_shape` is (D,). Several arrays
    are read as {name: float32 [n, ...]}; their `input_shape` is {name: shape}.
    """

    read: Callable[[np.ndarray], PyTree]  # [n] int -> uint8 [n, H, W, C]
    labels: np.ndarray  # [T] int32 identity in [0, M)
    names: tuple[str, ...]  # M identity names
    input_shape: InputShape
    landmarks: np.ndarray | None = None  # [T, 5, 2] float32 x, y pixels of `read`
    cameras: np.ndarray | None = None  # [T] int32 camera (or drawer, or session)
    pairs: "Pairs | None" = None  # the set's verification protocol
    is_test: np.ndarray | None = None  # [T] bool, the set's test split
    client_ids: np.ndarray | None = None  # [T] int or str, client of each image
    masks: Masks | None = None  # for segmentation; `labels` are still of whole images
    # [T] uint8 TRAIN, QUERY or GALLERY, of a re-identification set; the identity named
    # "-1" is a distractor, see `data.sources.reid`
    roles: np.ndarray | None = None
    passed_over: str = ""  # files that are not read: number and first of each kind
    # From an image file to what `read` returns; None where there are no files
    preprocessing: Preprocessing | None = None
    stored: StoredImages | None = None  # None where images have no identity


class UsedRows(NamedTuple):
    """Images of a source with one use, such as training."""

    rows: np.ndarray  # [n] int, of the source
    client: np.ndarray | None = None  # [n] int client of each; None: all clients
    number: np.ndarray | None = None  # [n] int class (or camera) of each


class DataUsage(NamedTuple):
    """Images that an experiment uses, by use."""

    source: Source
    parts: Mapping[str, UsedRows]  # {use, such as "train": its images}, disjoint


class Dataset(NamedTuple):
    """T examples in host or device memory.

    Those of the clients come first, grouped by client, then the public ones.
    """

    inputs: PyTree  # of [T, ...]: {"image": uint8 [T, H, W, C]}
    # of [T, ...]: {"label": int32 [T], the client's class or the public class, perhaps
    # "mask": uint8 [T, H, W], see `Masks`}
    targets: PyTree

    @classmethod
    def from_arrays(cls, images, labels) -> "Dataset":
        """Build a data set from images [T, ...] or arrays by name, and labels [T]."""
        inputs = images if isinstance(images, Mapping) else {"image": images}
        return cls(inputs, {"label": labels})

    @property
    def num_examples(self) -> int:
        """Number of examples, T."""
        return jax.tree.leaves(self.inputs)[0].shape[0]

    @property
    def images(self):
        """inputs["image"], [T, H, W, C]."""
        return self.inputs["image"]

    @property
    def input_shape(self) -> InputShape:
        """Shape of one input."""
        return jax.tree.map(lambda x: x.shape[1:], model_inputs(self.inputs))

    @property
    def labels(self):
        """targets["label"], [T] int32."""
        return self.targets["label"]

    @property
    def example_bytes(self) -> int:
        """Size of one example on a device, in bytes."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in leaves)

    @property
    def memory(self) -> int:
        """Device memory in bytes for two chunks of examples, as of a `Stream`."""
        return CHUNK_BYTES

    def take(self, rows: np.ndarray) -> "Dataset":
        """Take the examples of `rows` [n] into host memory."""
        return jax.tree.map(lambda x: np.asarray(x[rows]), self)

    def chunks(
        self, rows_of: Callable[[int], jax.Array], count: int
    ) -> Iterator[tuple[jax.Array, "Dataset"]]:
        """Yield (rows, their examples) of each chunk, from the devices.

        Args:
          rows_of: i -> [n] rows of the i-th of `count` pieces, on the devices.
        """
        for i in range(count):
            rows = rows_of(i)
            yield rows, _gather_rows(self, rows)

    def with_labels(self, labels) -> "Dataset":
        """Replace the labels [T] of the examples."""
        return self._replace(targets={**self.targets, "label": labels})

    def __repr__(self) -> str:
        """Number of examples, with names and shapes of the arrays."""
        arrays = {**self.inputs, **self.targets}
        names = [f"{name} {x.shape[1:]} {x.dtype}" for name, x in arrays.items()]
        return f"Dataset({self.num_examples} examples: {', '.join(names)})"


@jax.jit
def _gather_rows(dataset, rows):
    return jax.tree.map(lambda x: x[rows], dataset)


class Augment(NamedTuple):
    """Augmentation of ONE example on the device; `Batching` maps it over a batch.

    inputs: {"image": [H, W, C], perhaps "landmarks": [P, 2] float32 x, y pixels};
    targets: {"label": [] int32, perhaps "mask": [H, W] int}.

    Where the outcomes ("views") can be counted and `sample_view` gives that of a batch,
    features of frozen networks are computed once per view and looked up.
    """

    # (key [], inputs, targets) -> (inputs, targets); key may be None for one view
    apply: Callable[[jax.Array | None, PyTree, PyTree], tuple[PyTree, PyTree]]
    num_views: int = 0  # number of outcomes (mirror: 2, none: 1); 0: not countable
    # (i [] int32, inputs) -> inputs, the i-th view; only where num_views > 0. View 0 is
    # without randomness, as in evaluation.
    apply_view: Callable[[jax.Array, PyTree], PyTree] | None = None
    # key -> [] int32, the view that `apply` gives with the same key; for num_views > 1
    sample_view: Callable[[jax.Array], jax.Array] | None = None
    # inputs -> inputs, the part without randomness, such as normalization; for
    # num_views = 0, where None leaves the example as it is stored
    deterministic: Callable[[PyTree], PyTree] | None = None

    def apply_deterministic(self, inputs: PyTree) -> PyTree:
        """Inputs of an example in the view without randomness."""
        if self.apply_view:
            return self.apply_view(jnp.int32(0), inputs)
        return self.deterministic(inputs) if self.deterministic else inputs


class Pairs(NamedTuple):
    """Verification pairs by example index."""

    indices: np.ndarray  # [P, 2] int32
    is_same: np.ndarray  # [P] bool


class Batch(NamedTuple):
    """Examples of one local step, gathered and augmented on the device."""

    inputs: PyTree  # of [B, ...]: {"image": [B, H, W, C], in [-1, 1] once normalized}
    targets: PyTree  # of [B, ...]: {"label": [B] int32}
    num_classes: jax.Array  # [] int32 number of the client's classes
    is_valid: jax.Array  # [B] bool, False for padding
    is_added: jax.Array  # [B] bool, True for examples added by the server
    row: jax.Array  # [B] int32 row of the data set
    position: jax.Array  # [B] int32 index in the client's list of examples
    view_index: jax.Array  # [B] int32 of the augment's views, 0 if they do not count

    @property
    def images(self) -> jax.Array:
        """inputs["image"], [B, H, W, C]."""
        return self.inputs["image"]

    @property
    def model_inputs(self) -> PyTree:
        """The model's input: the images, or all inputs {name: [B, ...]}."""
        return model_inputs(self.inputs)

    @property
    def labels(self) -> jax.Array:
        """targets["label"], [B] int32: the client's class, or the public class."""
        return self.targets["label"]


class Client(NamedTuple):
    """One client's data in one round, as the engine passes it to `client_update`."""

    id: jax.Array  # [] int32
    cohort_index: jax.Array  # [] int32 in the cohort
    is_random_client: jax.Array  # [] bool: of one client, sampled anew every round
    round: jax.Array  # [] int32
    num_examples: jax.Array  # [] int32 the client's examples
    num_added: jax.Array  # [] int32 examples added by the server
    num_classes: jax.Array  # [] int32 the client's classes
    num_steps: jax.Array  # [] int32 local steps S
    step_to_epoch: Callable[[jax.Array], jax.Array]  # step -> epoch, [] int32
    steps_per_epoch: jax.Array  # [] int32, at least 1
    # step [] int32 -> shuffled, augmented batch
    batch: Callable[[jax.Array], Batch]
    # (step [], positions [B] int32 in the client's list) -> their batch, augmented
    batch_at: Callable[[jax.Array, jax.Array], Batch]
    # (start [] int32, view [] int32) -> positions [start, start + B) in that view
    batch_from: Callable[..., Batch]
    max_positions: int  # static bound on the examples of any client, whole batches
    num_views: int  # static: of an example, 0 when they cannot be counted
    shared: PyTree  # result of `prepare` for this round
    # [] int32: rounds since `round`, in which it started; 0 except in asynchronous runs
    staleness: jax.Array | int = 0
    # static: steps of the counted loops, descending; (): one loop of unknown length
    steps_per_loop: tuple[int, ...] = ()


class Participation(NamedTuple):
    """Participation of a cohort's clients in a round, in host memory.

    The compiled program of the round does not depend on it.
    """

    # [K] bool: trains. A client that does not has weight 0, keeps its personal state,
    # and may have the id of any client.
    is_present: np.ndarray
    # [K] bool: trains, and its update arrives. A client that is present and not
    # received changes only its personal state.
    is_received: np.ndarray
    # [K] int: largest number of local steps; None: all of them
    max_steps: np.ndarray | None = None
    # [K] int: rounds since it started to train; None: it started in this one
    staleness: np.ndarray | None = None

    def take(self, index: np.ndarray) -> "Participation":
        """Participation of the clients at `index` [n] of the cohort."""
        return jax.tree.map(lambda x: x[index], self)


class Cohort(NamedTuple):
    """The clients of one round in host memory, before scheduling."""

    ids: np.ndarray  # [K] int64
    round: int
    participation: Participation | None = None  # None: all of them take part
    # State of the clients' systems at the round's end; None if they have none
    systems_state: PyTree = None


class RoundContext(NamedTuple):
    """Inputs of `Algorithm.prepare`."""

    dataset: Any  # a `Dataset` on every device of the mesh, or a `Stream`
    population: Any  # `federated.client.Population`: rows of each client
    cohort: Cohort
    batching: Any  # `data.batching.Batching`
    mesh: jax.sharding.Mesh


class Prepared(NamedTuple):
    """Results of `Algorithm.prepare`, on the server before the clients train."""

    shared: PyTree  # replicated, passed to every client
    added_rows: AnyArray  # [K, X] int32 rows added to each client, X may be 0
    num_added: AnyArray  # [K] int32 number of these without padding


class LocalTraining(NamedTuple):
    """Local training of a client, independent of the algorithm.

    `loss(variables, batch, key, **round_args)` gives a scalar, (scalar, metrics) or
    (scalar, (batch_stats, metrics)): metrics are {name: []}, batch_stats the running
    statistics after the step. `round_args` are values that an algorithm keeps fixed in
    a round.
    """

    loss: Callable
    # rate [] -> transformation, such as `optax.sgd`, called with the rate of each step;
    # or a transformation with its own rate (then `learning_rate` is None).
    optimizer: Callable | optax.GradientTransformation = optax.sgd
    # A number, or (round, epoch) -> [], which count from 0.
    learning_rate: Callable | float | None = None

    def __repr__(self) -> str:
        """Names of its functions."""
        shown = (f"{k}={_format(x)}" for k, x in self._asdict().items())
        return f"LocalTraining({', '.join(shown)})"


def _format(value) -> str:
    """Format a number as it is, a function by its name, anything else by its type."""
    if value is None or isinstance(value, int | float):
        return repr(value)
    try:
        return value.__name__
    except AttributeError:
        return type(value).__name__


class ClientOutput(NamedTuple):
    """Result of one client's round."""

    # The client's change of the shared variables, aggregated over the cohort; running
    # statistics are below a key "batch_stats". () if nothing is shared.
    update: PyTree
    weight: PyTree  # for `Algorithm.aggregator`: [] of a weighted mean
    personal: PyTree  # stays with the client
    metrics: PyTree  # {name: []}
    per_client: PyTree = ()  # kept per client, [K, ...] on the server
    personal_variables: PyTree = ()  # after training, those that stay with the client
    sums: PyTree = ()  # further numbers, summed over clients without weights


class LogScaled(NamedTuple):
    """A tree scaled by e^log, so that a summary can sum it without overflow.

    For weights such as e^margin. A ratio of two arrays of the tree, as in a softmax,
    does not depend on the log.
    """

    log: jax.Array  # []
    tree: PyTree


class PerClient(NamedTuple):
    """Arrays of a summary that are not summed but kept, [K, ...] in the total."""

    tree: PyTree


class Summary(NamedTuple):
    """A client's contribution to a round's sums; or the total over the cohort.

    A tree of arrays, of which some may be below a `LogScaled` or a `PerClient`.
    """

    update: PyTree  # as changed by the links so far
    weight: PyTree
    extra: PyTree = ()  # further sums of the link
    personal: PyTree = ()  # the link's state at this client, kept by it and not summed


class LinkState(NamedTuple):
    """State of a link in `summarize`: the server's, and the client's."""

    shared: PyTree  # of `Aggregator.init`
    personal: PyTree  # of `Aggregator.init_personal`


class ClientLinks(NamedTuple):
    """State of the aggregation's links in a client's personal state."""

    state: PyTree


class Message(NamedTuple):
    """Sizes and bits of the arrays of an update sent to the server."""

    sizes: tuple[int, ...]  # numbers that are sent, by leaf
    bits: tuple[int, ...]  # of each of a leaf's numbers
    extra_bits: int = 0  # of indices and scales
    is_sparse: bool = False  # numbers that are not sent are 0

    @property
    def num_bits(self) -> int:
        """Number of bits of the message."""
        pairs = zip(self.sizes, self.bits, strict=True)
        return sum(size * bits for size, bits in pairs) + self.extra_bits


# Link: changes updates or the aggregate. Mean: the weighted mean. Sum: changes weighted
# updates and their sum, so it comes after the mean. Last: replaces the mean, at the end
# of a chain.
LINK, MEAN, SUM, LAST = "link", "mean", "sum", "last"


def no_state(like: PyTree) -> PyTree:
    """Empty state, as `Aggregator.init` of a link without state."""
    del like
    return ()


def send_unchanged(key, state, update: PyTree, weight: PyTree) -> tuple[Summary, dict]:
    """Pass an update on as it is, as `Aggregator.summarize`."""
    del key, state
    return Summary(update, weight), {}


def return_unchanged(key, state, total: Summary) -> tuple[PyTree, PyTree, dict]:
    """Return the sum as it is, as `Aggregator.finish`."""
    del key
    return total.update, state, {}


def any_number(num_clients: int) -> float:
    """No bound, as `Aggregator.max_malicious`."""
    del num_clients
    return math.inf


def send_all(message: Message) -> Message:
    """The message as it is, as `Aggregator.compress`."""
    return message


class Aggregator(NamedTuple):
    """Aggregation of clients' updates: one link, or a chain of links.

    `summarize` is called for one client, inside its lane; `finish` once, with the sums
    over the cohort. In a chain an update goes through all links to the sums, and the
    aggregate comes back through them in the reverse order, see
    `federated.aggregation.contract`. State lies in the server's tree.
    """

    # Zeros like a client's update -> state
    init: Callable[[PyTree], PyTree] = no_state
    # (key, state, update, weight) -> (Summary, metrics {name: []}); the metric
    # "dropped" is 1 for a client whose numbers are left out
    summarize: Callable[..., tuple[Summary, PyTree]] = send_unchanged
    # (key, state, total Summary) -> (aggregate, state, metrics {name: []})
    finish: Callable[..., tuple[PyTree, PyTree, PyTree]] = return_unchanged
    role: str = LINK
    min_clients: int = 1  # of a cohort
    max_clients: float = math.inf
    # Zeros like an update -> the link's state at a client, kept with its personal
    # state; `summarize` then gets a `LinkState` and returns the new state as
    # `Summary.personal`. None: no such state.
    init_personal: Callable[[PyTree], PyTree] | None = None
    # (key, updates [K, ...], weights [K]) -> (updates [R, ...], weights [R]), instead
    # of the two functions above: all updates at once. Later links get R rows on the
    # server, R = ceil(K / clients_per_row); a row of weight 0 is left out.
    mix: Callable | None = None
    clients_per_row: int = 1
    # Clients of a cohort -> how many may be malicious
    max_malicious: Callable[[int], float] = any_number
    compress: Callable[[Message], Message] = send_all
    has_plain_mean: bool = False  # of a chain: links that change the sum may be added


class RoundResult(NamedTuple):
    """Result of a round, for the server's update."""

    aggregate: PyTree
    per_client: PyTree  # [K, ...] in the cohort's order
    metrics: PyTree  # {name: [K]} in the cohort's order
    weights: PyTree  # [K]
    round: jax.Array  # [] int32
    shared: PyTree = ()  # result of `prepare` for this round
    # Those of the client with `is_random_client`, for a server that trains the network:
    # it adds them as "local", and returns them there.
    personal_variables: PyTree = ()
    sums: PyTree = ()  # of `ClientOutput.sums`
    link_state: PyTree = ()  # of the aggregator, after the round
    # [K] bool: whether the update has arrived, else its numbers are 0; None: all have
    is_received: jax.Array | None = None

    @property
    def num_received(self) -> int | jax.Array:
        """Number of clients whose update was received."""
        if self.is_received is None:
            return jax.tree.leaves(self.weights)[0].shape[0]
        return self.is_received.sum()


class Algorithm(NamedTuple):
    """A federated algorithm as pure functions, written for one client."""

    init: Callable[[PyTree], PyTree]  # variables -> server
    init_personal: Callable[..., PyTree]  # (key, server) -> personal
    client_update: Callable[..., ClientOutput]  # (key, server, personal, client)
    aggregator: Aggregator | None  # None: clients send no update
    server_update: Callable[[PyTree, RoundResult], PyTree]  # -> server
    personalize: Callable[[PyTree, PyTree], PyTree]  # (server, personal) -> variables
    # server -> variables of the global model
    global_model: Callable[[PyTree], PyTree] = lambda server: server
    # Whether clients deploy the global model, without any personal parameters
    has_global_model: bool = True
    # Of NEEDS: what a task must offer besides the factory's arguments
    needs: tuple[str, ...] = ()
    # (server, context) -> `Prepared`; also traced for its shapes before the first round
    prepare: Callable[[PyTree, RoundContext], Prepared] | None = None
    # Whether each client can compute its part of `prepare` itself, of its own and of
    # public examples: it sends nothing for it
    prepare_is_local: bool = False
    # (server after the round, result) -> {name: [K]}, metrics of the cohort as a whole
    cohort_metrics: Callable[[PyTree, RoundResult], PyTree] | None = None
    # (epochs of the shortest round) raises ValueError when they are too few.
    check_epochs: Callable[[int], None] = lambda min_epochs: None
    # (clients of a round) raises ValueError when they are too few.
    check_cohort: Callable[[int], None] = lambda cohort_size: None
    # server -> a tree like a client's update; None: like the global model
    update_like: Callable[[PyTree], PyTree] | None = None
    # Share of a cohort that must send a valid update, else the run stops
    min_kept: float = 0.0
    # server -> the state of `aggregator`, see `federated.aggregation`
    link_state: Callable[[PyTree], PyTree] = lambda server: ()
    privacy: Any = None  # `federated.privacy.Privacy`; None: not private
    # (factory or wrapper, the `num_clients` that it was given) of each that takes one
    built_for: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        """Name of the factory that defines `client_update`."""
        function = self.client_update
        is_named = hasattr(function, "__qualname__")
        name = function.__qualname__ if is_named else type(function).__name__
        return f"Algorithm({name.partition('.')[0]})"


class FinalAdaptation(NamedTuple):
    """A final round in which all clients adapt their models, without aggregation."""

    algorithm: Algorithm
    epochs: int


class FeatureStorage(NamedTuple):
    """Where features of frozen layers are kept."""

    place: FeaturePlace = "off"
    gib: float | None = None  # auto: at most, in a place; None: a quarter of the free
    images: str = ""  # digest of what a stream reads, in a file's name


class FederatedTrainer(NamedTuple):
    """Trainer of a federated stage: algorithm, initial variables, its models."""

    algorithm: Algorithm
    # variables of the stage before, or None -> variables for `Algorithm.init`
    init_variables: Callable[[PyTree], PyTree]
    apply: Callable  # (variables of `personalize`, images [B, ...]) -> output [B, D]
    # server -> variables of the evaluated network; None if there is none
    global_model: Callable[[PyTree], PyTree] | None
    apply_global: Callable  # (variables of `global_model`, images) -> output [B, D]
    final_adaptation: FinalAdaptation | None = None
    # Of which `frozen` leaves are none of the algorithm's variables; None: of none
    frozen_model: Model | None = None
    features: FeatureStorage = FeatureStorage()
    # Passes over a client's examples, instead of the federation's
    local_epochs: int | tuple[int, ...] | None = None
    accountant: Any = None  # of a private method, from its first round
    # Of the evaluated network, as of a `Model`
    count_flops: Callable[[], int] | None = None
    model_config: Mapping[str, Any] | None = None


class ShardedClasses(NamedTuple):
    """A parameter with a row per class, sharded over all devices of the mesh."""

    path: str  # among "params"
    names: tuple[str, ...]  # of the classes, one each; further rows are padding


class CentralTrainer(NamedTuple):
    """Trainer of a central stage: one model, without clients."""

    settings: Any  # `central.settings.Training`
    dataset: Any  # as of a `Task`; rows first_row:first_row + num_rows are trained on
    first_row: int
    num_rows: int
    batching: Any  # how batches are made
    loss: Callable  # as of `LocalTraining`
    init: Callable[[jax.Array], PyTree]  # key -> variables
    global_model: Callable[[PyTree], PyTree]  # variables -> those of the evaluated one
    apply_global: Callable  # (variables of `global_model`, images) -> output [B, D]
    # (number of an epoch, its steps S) -> [S, B] int32 indices of rows, on the host;
    # None for a permutation of them
    batch_order: Callable[[int, int], np.ndarray] | None = None
    sharded_classes: ShardedClasses | None = None  # with class_parallel
    # Change of a step's whole batch before it is split over devices and micro-batches;
    # None: none
    annotate_batch: Callable[[Batch], Batch] | None = None
    # Of the evaluated network, as of a `Model`
    count_flops: Callable[[], int] | None = None
    model_config: Mapping[str, Any] | None = None


class Stage(NamedTuple):
    """A stage of an experiment, such as pretraining."""

    trainer: FederatedTrainer | CentralTrainer
    init_from_stage: str | None = None  # the stage whose variables it starts from


class TrainedModels(NamedTuple):
    """Models that a stage has trained, for evaluators."""

    variables: PyTree | None  # of the global model; None if there is none
    apply: Callable  # (variables, images [B, ...]) -> output [B, D]
    # client -> variables of its model; clients [A], of each device along `clients` one,
    # -> [A, ...] cut over these devices. None: all clients have the global model
    client_variables: Callable[..., PyTree] | None
    client_apply: Callable  # (`client_variables`, images) -> output [B, D]
    # number -> variables of a client that has never taken part; None as
    # `client_variables`
    new_client_variables: Callable[..., PyTree] | None = None


class ImageGrid(NamedTuple):
    """Images of n examples, one row each, with titles and a legend."""

    # Columns by their titles: uint8 [n, H, W, 3], then numbers [n, H, W], which are
    # drawn as colors.
    images: Mapping[str, np.ndarray]
    maps: Mapping[str, np.ndarray] = MappingProxyType({})
    legend: Mapping[str, tuple[int, int, int]] = MappingProxyType({})  # name: color
    captions: Mapping[str, Sequence[str]] = MappingProxyType({})  # [n] by column


class ScoredPairs(NamedTuple):
    """Pairs of images with a model's scores, for display."""

    images: np.ndarray  # uint8 [n, 2, H, W, 3]
    scores: np.ndarray  # [n]
    is_same: np.ndarray  # [n] bool: of one identity
    names: Sequence[tuple[str, str]]  # [n] of the two identities
    threshold: float  # a pair with a higher score is accepted


class EmbeddingMap(NamedTuple):
    """Embeddings of some identities in two dimensions."""

    points: np.ndarray  # [n, 2]
    labels: Sequence[str]  # [n] identities
    explained: float  # fraction of the variance in the plane, in [0, 1]


class Samples(NamedTuple):
    """Samples of an evaluation for display."""

    pairs: Mapping[str, ScoredPairs] = MappingProxyType({})
    maps: Mapping[str, EmbeddingMap] = MappingProxyType({})


class Evaluation(NamedTuple):
    """Result of an evaluator."""

    metrics: Mapping[str, float] = MappingProxyType({})
    per_client: Mapping[str, np.ndarray] = MappingProxyType({})  # {name: [N]}
    curves: Mapping[str, Any] = MappingProxyType({})  # {"roc": (far, tar, ...)}
    image_grids: Mapping[str, ImageGrid] = MappingProxyType({})
    samples: Callable[[], Samples] | None = None  # computed for a report


class Evaluator(NamedTuple):
    """Evaluation of a stage's models by a task."""

    evaluate: Callable[[TrainedModels], Evaluation]
    during_training: bool = True  # whether also between rounds
    # {metric: value}: the first round that reaches it is reported
    targets: Mapping[str, float] = MappingProxyType({})


class Task(NamedTuple):
    """A task: its data, and the evaluation of models."""

    dataset: Any  # clients' examples first, grouped; then public ones
    population: Any  # rows of each client
    evaluators: Mapping[str, Evaluator]
    data_report: Mapping[str, Any]  # of the partition, as JSON
    data_report_text: str  # the same as text
    # Of images before `evaluators` get them; None if unknown
    preprocessing: Preprocessing | None = None
    is_of_features: bool = False  # evaluators compare features, not outputs
    classes: Sequence[str] = ()  # of a classifier's or segmenter's output
    name: str = ""  # of config.task
    # Stored with every stage and compared on resume; None: not compared
    used: DataUsage | None = None


class Experiment(NamedTuple):
    """An experiment, built from a config."""

    task: Task
    stages: Mapping[str, Stage]
    mesh: Any
    batching: Any  # of the federated stages
    federation: Any  # `federated.settings.Federation`
    seed: int
    # (method, {key: number}) -> its trainer with these hyperparameters, which may be
    # traced, so that a sweep is one program; None: not supported by the task
    with_hyperparameters: (
        Callable[[str, Mapping[str, Any]], FederatedTrainer] | None
    ) = None
