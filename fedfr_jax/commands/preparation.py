"""What `fedfr prepare` does with a config's data set."""

import json
import pathlib
from collections.abc import Mapping

import ml_collections

from fedfr_jax.build import sections
from fedfr_jax.data import partition as partitions
from fedfr_jax.data.sources import inspect, pack, verify
from fedfr_jax.data.sources.files import open_files
from fedfr_jax.deploy.detector import write_landmarks, yunet
from fedfr_jax.runs.sinks import write_summary
from fedfr_jax.tasks.data import open_data, split
from fedfr_jax.tasks.reid import report as reid
from fedfr_jax.tasks.reid.data import split_of
from fedfr_jax.text import printable
from fedfr_jax.types import Source


def prepare(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    *,
    folder: str | None = None,
    check: bool = False,
    detector: str | None = None,
    landmarks: str | None = None,
) -> dict:
    """Open, inspect and split the config's data; print and (with a workdir) save it.

    Args:
      folder: where to pack the images first, None for nowhere.
      check: compare the checksums of the packed set: `folder`, or the config's data.
      detector: file of a face detector, which writes the csv `landmarks` first.
    """
    settings = sections(config)
    data = settings["data"]
    if detector or landmarks:
        data = with_landmarks(data, detector, landmarks)
    if folder:
        pack(open_data(data), folder, say=print)
        data = {"name": "packed", "path": folder}
    if check:
        if data.get("name") != "packed":
            raise ValueError("--verify must be given --pack or packed data, got none.")
        print(f"{verify(data['path'])} files of {data['path']} are as written")
    source = open_data(data)
    facts, text = described(settings["partition"], source)
    found = inspect(source)
    print(json.dumps(found, indent=1))
    print(printable(text, keep="\n"))
    if workdir:
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
        write_summary(
            pathlib.Path(workdir) / "data.json", {"data": found, "partition": facts}
        )
    return found


def with_landmarks(data: Mapping, detector: str | None, path: str | None) -> dict:
    """The settings of config.data whose faces are aligned by what a detector finds.

    Writes the csv `path`, and prints what was found.
    """
    if not detector or not path:
        raise ValueError(
            "--detector and --landmarks must be given together, got only one: the "
            "file of a detector, and the csv that it is to write."
        )
    if data.get("name") != "folder" or "path" not in data:
        raise ValueError(
            "--landmarks must go with config.data.name=folder, whose faces it aligns, "
            f"got {data.get('name')!r}."
        )
    detect = yunet(detector)
    files = open_files(data["path"], under=data.get("under", ""))
    print(write_landmarks(files, detect, path))
    return {"align": True, **data, "landmarks": path}


def described(settings: Mapping, source: Source) -> tuple[dict, str]:
    """What config.partition makes of a source: facts, and the same in words."""
    if source.roles is not None:
        facts = reid.report(split_of(settings, source), source)
        return facts, reid.format_report(facts)
    parts = split(settings, source)
    if isinstance(parts, partitions.ClientSplit):
        facts = partitions.class_report(parts, source.labels, source.names)
        return facts, partitions.format_class_report(facts)
    facts = partitions.report(parts)
    return facts, partitions.format_report(facts)
