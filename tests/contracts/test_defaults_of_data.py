"""What sources and partitions do where a config does not say it, by value.

Numbers are those of the papers that their files name, or of the released code; the
others are what the configs rely on. Those of ms1m stand with FedFR's.
"""

from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.sources import SOURCES
from tests.contracts.test_defaults_by_value import differences

ANY_SIZE, ANY_COUNT, FACES = (
    {"image_size": None},
    {"min_images": 1},
    {"image_size": 112},
)
PEOPLE = {"image_size": (256, 128)}  # height and width
OPENED = {  # sources; `image_masks` and those without a default are left out
    "arrays": {
        "images": "images",
        "labels": "labels",
        "cameras": None,
        "is_test": None,
        "invert": False,
        "channels": None,
        **ANY_SIZE,
        **ANY_COUNT,
    },
    "bin_pairs": {"channels": 3, **FACES},
    "fake_data": {
        "images_per_identity": 10,
        "channels": 3,
        "num_cameras": 0,
        "test_identities": 1,
        "num_pixel_classes": 0,
        **FACES,
    },
    "camvid": {
        "train": ("train",),
        "test": ("test",),
        "labels": "largest",
        "background": (),
        **ANY_SIZE,
    },
    "cifar10": ANY_SIZE,
    "cifar100": ANY_SIZE,
    "cuhk03_np": {"boxes": "detected", **PEOPLE},
    "synthetic_faces": {"image_size": 32, "seed": 0, "difficulty": 1.0},
    "fashion_mnist": ANY_SIZE,
    "fei": {"image_size": 28, "channels": 3, **ANY_COUNT},
    "femnist10": {
        "images_per_class": 4000,
        "data_dir": None,
        **ANY_SIZE,
    },
    "flickr_aes": {  # the raters of Flower's FedPer
        "image_folder": "40K",
        "ratings": "FLICKR-AES_image_labeled_by_each_worker.csv",
        "image_size": 224,
        "min_ratings": 60,
        "max_ratings": 290,
        "min_per_score": 4,
    },
    "folder": {
        "channels": 3,
        "filename_pattern": "directory",
        "subfolder": "",
        "landmarks": None,
        "align": False,
        **ANY_COUNT,
    },
    "image_classes": {
        "channels": 3,
        "train": "train",
        "test": "test",
        **ANY_SIZE,
        **ANY_COUNT,
    },
    "lfw": {
        "channels": 3,
        "align": True,
        "pairs": "pairsDevTrain.txt",
        **FACES,
        **ANY_COUNT,
    },
    "listed_pairs": {"channels": 3, **FACES},
    "market1501": {
        "subfolder": "",
        "test_identities": None,
        "seed": None,
        "distractor_identity": "0000",
        **PEOPLE,
    },
    "mnist": {"is_test": "official_test", **ANY_SIZE},
    "msmt17": {"folders": ("train", "test"), **PEOPLE},
    "omniglot": {"image_size": 28, "channels": 1},
    "orl": {"image_size": (112, 92), "channels": 1, **ANY_COUNT},
    "packed": ANY_COUNT,
    "recordio": {"channels": 3, **ANY_SIZE, **ANY_COUNT},
    "reid_csv": {"images": None, **PEOPLE},
    "synthetic": {"alpha": 1.0, "beta": 1.0, "num_clients": 30, "seed": 0},
    "table": {"client": None, "ignore": ()},
    "tfds": {
        "split": "train",
        "test_split": None,
        "data_dir": None,
        "channels": None,
        "align": False,
        "attribute": None,
        **ANY_SIZE,
        **ANY_COUNT,
    },
}
FIFTH, TENTH = (
    {"is_test": None, "test_fraction": fraction, "seed": 0} for fraction in (0.2, 0.1)
)
SPLIT = {
    "by_class": FIFTH,
    "by_identity": {
        "num_unseen_ids": 0,
        "num_trained_public_ids": 0,
        "min_images": 4,
        "public_min_images": 0,
        "max_images": 0,
        "train_fraction": 0.6,
        "client_ids_from": None,
        "public_ids_from": None,
        "unseen_ids_from": None,
        "use_validation_split": False,
        "names": None,
        "seed": 0,
    },
    "natural": {"num_clients": None, **FIFTH},
    "dirichlet": {"min_examples": 1, "max_examples": None, **FIFTH},
    "iid": FIFTH,
    "lognormal_sizes": {  # FedProx's FEMNIST, as the next but one is its MNIST
        "num_clients": 200,
        "classes_per_client": 3,
        "mean": 4.0,
        "sigma": 1.0,
        **TENTH,
    },
    "power_law": {
        "num_clients": 1000,
        "classes_per_client": 2,
        "min_examples": 5,
        "sigma": 2.0,
        **TENTH,
    },
    "quantity_skew": {"distribution": "power", "skew": 1.0, "min_examples": 1, **FIFTH},
    "shards": {"shards_per_client": 2, **FIFTH},
}


def test_every_default_of_data_is_that_of_its_paper_or_what_configs_rely_on():
    wrong = differences(SOURCES, OPENED) + differences(PARTITIONS, SPLIT)
    assert not wrong, "\n".join(wrong)
