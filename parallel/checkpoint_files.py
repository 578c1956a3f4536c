"""Checkpoint folders on disk: complete or absent, verified before they are read, and none of their content executed.

    RUN_DIR/checkpoints/latest             name of the newest complete checkpoint
    RUN_DIR/checkpoints/step_00000100/     checkpoint.json  plain values, and size and SHA-256 of every other file
                                           index.json       which box of which tensor lies where in which file
                                           __R_0.distcp     tensors that rank R wrote (torch.distributed.checkpoint)
                                           resolved.yaml    the configuration of the run that wrote it

A folder is filled under another name, synced, and renamed. Nothing here imports torch.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

FOLDER = "checkpoints"
ABOUT = "checkpoint.json"
POINTER = "latest"
FORMAT = "tripod checkpoint 1"
UNFINISHED = ".writing_"
REPLACED = ".replaced_"
_NAME = re.compile(r"step_\d{8,}")
_BLOCK = 1 << 22


class BadCheckpoint(Exception):
    """A checkpoint that cannot be used; the sentence names the file and what is wrong with it."""

    is_sentence = True  # a traceback would add nothing


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps; names sort as steps do."""
    return f"step_{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: int(p.name[5:]))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a `checkpoints` folder, None when there is none.

    The pointer says which; a kill between renaming the folder and moving the pointer leaves it one checkpoint behind.
    """
    there = complete(folder)
    try:
        named = folder / (folder / POINTER).read_text().strip()
        return named if named in there else (there or [None])[-1]
    except (OSError, UnicodeDecodeError):
        return (there or [None])[-1]


def find(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: a checkpoint, a run's folder or its `checkpoints`, or `auto`.

    None for `auto` when the run's own folder holds none. Raises BadCheckpoint when there is no checkpoint at a path.
    """
    return latest(run_dir / FOLDER) if resume == "auto" else at(resume, "checkpoint.resume")


def at(path: str | Path, key: str) -> Path:
    """The checkpoint at a path: that itself, or the newest of a run or of its `checkpoints`.

    `key` is what the path was given as. Raises BadCheckpoint when there is none.
    """
    path = Path(path)
    if not path.exists():
        raise BadCheckpoint(f"{key}={path} does not exist.")
    found = path if (path / ABOUT).exists() else latest(path) or latest(path / FOLDER)
    if found is None:
        raise BadCheckpoint(f"{key}={path} is no checkpoint: {ABOUT} is missing, and it holds no others.")
    return found


def read_about(checkpoint: Path) -> dict:
    """The plain values of a checkpoint; raises BadCheckpoint when its `checkpoint.json` is missing or damaged."""
    path = checkpoint / ABOUT
    try:
        about = json.loads(path.read_bytes())
        told = about.pop("sha256")
        if about["format"] != FORMAT:
            raise BadCheckpoint(f"{path} is of the format {about['format']!r}, this version reads {FORMAT!r}.")
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing: {checkpoint} is no checkpoint of this project.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not what a checkpoint has there ({type(error).__name__}: {error}).") from None
    if told != _digest(about):
        raise BadCheckpoint(f"{path} is damaged: its content does not match the SHA-256 in it.")
    return about


def damage(checkpoint: Path, about: dict, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, in a sentence; of every `shares` files the `share`-th is read."""
    for number, (name, known) in enumerate(sorted(about["files"].items())):
        if number % shares != share:
            continue
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != known["bytes"]:
                return f"{path} has {size} bytes instead of {known['bytes']}: it was cut off or replaced."
            if fingerprint(path)["sha256"] != known["sha256"]:
                return f"{path} is damaged: its SHA-256 is not the one it was written with."
        except FileNotFoundError:
            return f"{path} is missing."
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}."
    return None


def advice(checkpoint: Path) -> str:
    """Which checkpoint to take instead of a damaged one: the newest older one beside it that looks whole."""
    for other in reversed([p for p in complete(checkpoint.parent) if p.name < checkpoint.name]):
        try:
            if damage(other, read_about(other)) is None:
                return f"the one before it is whole: checkpoint.resume={other}"
        except BadCheckpoint:
            continue
    return "there is no older one beside it"


def fingerprint(path: Path) -> dict:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def begin(folder: Path, step: int) -> Path:
    """An empty folder to fill with the checkpoint of `step`, after clearing away what a kill left of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REPLACED}*")]:
        if left.is_dir():
            shutil.rmtree(left)
        else:  # a pointer that was written and not yet renamed
            left.unlink()
    unfinished = folder / f"{UNFINISHED}{name_of(step)}"
    unfinished.mkdir()
    return unfinished


def commit(unfinished: Path, about: dict, keep: int) -> Path:
    """Make a filled folder a checkpoint, point to it, and remove all but the newest `keep`."""
    folder, final = unfinished.parent, unfinished.parent / unfinished.name.removeprefix(UNFINISHED)
    describe(unfinished, about)
    if final.exists():  # an earlier try of this run got as far
        os.rename(final, folder / f"{REPLACED}{final.name}")
    publish(unfinished, final)
    pointer = folder / f"{UNFINISHED}{POINTER}.txt"
    write_synced(pointer, f"{final.name}\n".encode())
    os.replace(pointer, folder / POINTER)
    sync(folder)
    older = [other for other in complete(folder) if other.name < final.name]
    for old in [*folder.glob(f"{REPLACED}*"), *older[: 1 - keep or None]]:
        # Not a checkpoint any more before its first file goes.
        gone = folder / f"{REPLACED}{old.name.removeprefix(REPLACED)}"
        os.rename(old, gone)
        shutil.rmtree(gone)
    return final


def describe(unfinished: Path, about: dict) -> None:
    """Write `checkpoint.json`, which makes a folder a checkpoint."""
    about = {"format": FORMAT} | about
    write_synced(unfinished / ABOUT, json.dumps(about | {"sha256": _digest(about)}, indent=1).encode())


def publish(unfinished: Path, final: Path) -> None:
    """Give a filled folder its name, which must be free: complete on the disk, or not there."""
    sync(unfinished)
    os.rename(unfinished, final)
    sync(final.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on the disk, not only in memory, when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have what a file holds, or the names in a folder, on the disk, not only in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(about: dict) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
