"""Members of a zip archive, by the names they would be unpacked to."""

import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import NamedTuple

from fedfr_jax.data.sources.decoding import MAX_IMAGE_BYTES
from fedfr_jax.data.sources.npz import DAMAGED
from fedfr_jax.files import check_bytes


class ZipFiles(NamedTuple):
    """Members of an archive, and functions to read them."""

    names: list[str]  # as an unpacked archive would have them; of folders with a "/"
    read: Callable[[str], bytes]
    confirm: Callable[[str], None]  # that a member has its name in its own header too
    size: Callable[[str], int]  # bytes of a member, unpacked


def open_zip(path: pathlib.Path) -> ZipFiles:
    """Open a .zip and list its files."""
    try:
        archive = zipfile.ZipFile(path)
        count = _end_count(path)
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be a whole zip archive, got {error}: copy it again."
        ) from error

    listed = archive.infolist()
    if count not in (len(listed) % 2**16, 2**16 - 1):  # the latter where it is longer
        raise ValueError(
            f"{path} must list {count} files (its end record), got {len(listed)}. The "
            "archive is damaged: copy it again."
        )
    members = _by_name(path, listed)

    def confirm(name):  # by its own header
        try:
            archive.open(members[name]).close()
        except DAMAGED as error:
            raise ValueError(
                f"{path} must be a whole zip archive, got {error}: copy it again."
            ) from error

    def read(name):
        member = members[name]
        check_bytes(member.file_size, f"{name} in {path}", MAX_IMAGE_BYTES)
        try:
            return archive.read(member)
        except DAMAGED as error:
            raise ValueError(
                f"{name} in {path} must be readable, got {error}. "
                "Copy or make the archive again."
            ) from error

    size = lambda name: members[name].file_size
    return ZipFiles(list(members), read, confirm, size)


def _by_name(path, listed: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Members by the names of an unpacked archive, {name: member}."""
    members = {}
    for member in listed:
        name = _extracted_name(path, _with_slashes(member))
        if name in members:
            raise ValueError(
                f"{path} must have each file once, got {members[name].filename} and "
                f"{member.filename}."
            )
        members[name] = member
    return members


def _with_slashes(member: zipfile.ZipInfo) -> str:
    """Member's name with forward slashes; some archives of Windows have backslashes."""
    is_of_windows = member.create_system == 0
    return member.filename.replace("\\", "/") if is_of_windows else member.filename


def _extracted_name(path, name: str) -> str:
    """Normalize a member's name: `a//b` and `./a/b` become `a/b`."""
    *folders, last = name.split("/")
    if name.startswith("/") or ".." in (*folders, last):
        raise ValueError(
            f"{path} must have relative paths without .., got {name}. Make the archive "
            "again."
        )
    return "/".join([*(part for part in folders if part not in ("", ".")), last])


def _end_count(path):
    """Number of files by the record at the archive's end, which zipfile ignores."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 2**16 - 22, 0))  # the record has a comment
        end = file.read()
    offset = end.rindex(b"PK\5\6")
    return int.from_bytes(end[offset + 10 : offset + 12], "little")
