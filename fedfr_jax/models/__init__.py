"""Networks on images: name -> factory(image_shape, ...) -> Model.

They end in an embedding (sphereface, iresnet, cnn, mlp) or in the logits of
`num_classes` classes (resnet, leaf_*, logistic; cnn and mlp when asked).
"""

from collections.abc import Callable

from fedfr_jax.models.cnn import cnn, mlp
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.leaf import leaf_celeba, leaf_femnist
from fedfr_jax.models.logistic import logistic
from fedfr_jax.models.resnet import resnet
from fedfr_jax.models.sphereface import sphereface
from fedfr_jax.schema import register
from fedfr_jax.types import Model

MODELS = {
    "sphereface": sphereface,
    "iresnet": iresnet,
    "resnet": resnet,
    "cnn": cnn,
    "mlp": mlp,
    "leaf_celeba": leaf_celeba,
    "leaf_femnist": leaf_femnist,
    "logistic": logistic,
}


def register_model(name: str, factory: Callable[..., Model]) -> None:
    """Make a factory (image_shape, *, ...) -> Model known to configs by its name.

    Raises:
      ValueError: when another factory has the name.
    """
    register(MODELS, "model", name, factory)
