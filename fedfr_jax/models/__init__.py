"""Networks from images to embeddings: name -> factory(image_shape, ...) -> Model."""

from fedfr_jax.models.cnn import cnn, mlp
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.sphereface import sphereface

MODELS = {"sphereface": sphereface, "iresnet": iresnet, "cnn": cnn, "mlp": mlp}
