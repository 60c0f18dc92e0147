"""The command that looks at a config's data set, finds faces in it, packs it."""

import json
import pathlib
from collections.abc import Mapping

from ml_collections import ConfigDict

from fedfr_jax.config.build import sections
from fedfr_jax.data import partition as partitions
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.inspection import inspect
from fedfr_jax.data.sources.packed import pack as pack_images
from fedfr_jax.data.sources.packed import verify
from fedfr_jax.deploy.detector import write_landmarks, yunet
from fedfr_jax.files import write_text
from fedfr_jax.parts import parse as parse_part
from fedfr_jax.runs.sinks import summary_text
from fedfr_jax.tasks.data import PartitionReader, SourceReader, open_data, split
from fedfr_jax.tasks.reid import data as reid
from fedfr_jax.tasks.reid.data import build_split
from fedfr_jax.text import printable
from fedfr_jax.types import Source


def prepare(
    config: ConfigDict,
    *,
    workdir: str | None,
    pack: str | None = None,
    checksums: bool = False,
    detector: str | None = None,
    landmarks: str | None = None,
) -> None:
    """Inspect a config's data set: contents, unreadable images, the partition.

    --pack decodes the images once into a folder; config.data = {"name": "packed",
    "path": FOLDER} reads them from there. FOLDER must be new or empty.
    --checksums reads the folder (or the config's packed data) again and compares
    checksums.

    --detector and --landmarks find the faces of raw photographs:
    --landmarks=FACES.csv is written, and training aligns faces by it with
    --config.data.landmarks=FACES.csv --config.data.align=True. Images without a face,
    or with several, are counted and named.

    Args:
      pack: FOLDER folder for the decoded images
      checksums: compare the checksums of the packed data set
      detector: ONNX file of OpenCV's YuNet, which finds faces
      landmarks: CSV file of landmarks to write
    """
    settings = sections(config)
    data = settings["data"]
    if detector or landmarks:
        data = with_landmarks(data, detector, landmarks)
    if pack:
        pack_images(open_source(data), pack, say=print)
        data = {"name": "packed", "path": pack}
    if checksums:
        if data.get("name") != "packed":
            raise ValueError(
                "--checksums needs a packed data set: add --pack=FOLDER or set "
                "config.data.name=packed."
            )
        print(f"{verify(data['path'])} files of {data['path']} are as written")
    source = open_source(data)
    partition, text = describe_source(settings["partition"], source)
    contents = inspect(source)
    print(json.dumps(contents, indent=1))
    print(printable(text, keep="\n"))
    if workdir:
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
        report = {"data": contents, "partition": partition}
        write_text(pathlib.Path(workdir) / "data.json", summary_text(report))


def with_landmarks(data: Mapping, detector: str | None, path: str | None) -> dict:
    """Settings of config.data with alignment by a detector's landmarks.

    Writes them to the csv `path`, and prints a summary.
    """
    if not detector or not path:
        raise ValueError(
            "--detector and --landmarks must be set together, got one: the "
            "file of a detector, and the csv to write."
        )
    if data.get("name") != "folder" or "path" not in data:
        raise ValueError(
            "--landmarks needs config.data.name='folder', whose faces it aligns, got "
            f"{data.get('name')!r}."
        )
    detect = yunet(detector)
    files = open_files(data["path"], under=data.get("subfolder", ""))
    print(write_landmarks(files, detect, path))
    return {"align": True, **data, "landmarks": path}


def open_source(settings: Mapping) -> Source:
    """Open the source of config.data."""
    return open_data(parse_part(SourceReader(), settings, "config.data"))


def describe_source(settings: Mapping, source: Source) -> tuple[dict, str]:
    """Describe the split of a source by config.partition: (numbers, text)."""
    where = "config.partition"
    if source.roles is not None:
        config = parse_part(reid.PartitionConfig, settings, where)
        report = reid.report(build_split(config, source), source)
        return report, reid.format_report(report)
    reader = PartitionReader(partitions.PARTITIONS, "by_identity")
    parts = split(parse_part(reader, settings, where), source)
    if isinstance(parts, partitions.ClientPartition):
        report = partitions.class_report(parts, source.names)
        return report, partitions.format_class_report(report)
    report = partitions.report(parts)
    return report, partitions.format_report(report)
