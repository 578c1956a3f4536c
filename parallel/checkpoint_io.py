"""Write and read the tensors of a checkpoint with torch.distributed.checkpoint (DCP), its metadata as JSON.

DCP decides who writes which of several copies, and reads whatever part of a tensor each rank needs from whoever wrote
it. Its own metadata file is a pickle, whose loading can execute what is in it, so an index in JSON takes its place. The
tensors themselves are read by torch.load with weights_only, which builds tensors and nothing else.
"""

import hashlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.checkpoint_files import BadCheckpoint, write_synced

INDEX = "index.json"
MASTER = "weights"  # in front of a weight's own name; its moments have theirs
_WORTH_A_THREAD = 1 << 18


@dataclass
class Piece:
    """A box of a global tensor and the memory on this rank that holds it."""

    offset: tuple[int, ...]
    data: torch.Tensor
    writes: bool


@dataclass
class Pieces:
    """All that this rank has of one global tensor."""

    shape: tuple[int, ...]
    pieces: list[Piece]


class Sharded(torch.Tensor):
    """What DCP asks a tensor of which this rank has some boxes: which they are, and the memory of each."""

    @staticmethod
    def __new__(cls, parts: Pieces):
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(parts.shape))

    def __init__(self, parts: Pieces):
        self._parts = parts

    def __create_write_items__(self, fqn: str, _) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties.create_from_tensor(piece.data),
                    size=torch.Size(self._parts.shape),
                ),
            )
            for piece in self._parts.pieces
            if piece.writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self._parts.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._by_offset[tuple(index.offset)]

    @property
    def _by_offset(self) -> dict[tuple[int, ...], torch.Tensor]:
        if not hasattr(self, "_lookup"):
            self._lookup = {piece.offset: piece.data for piece in self._parts.pieces}
        return self._lookup

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{cls.__name__} describes a tensor to DCP and cannot be computed with ({function}).")


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=piece.data.size())


class HashedFile(io.BufferedWriter):
    """A new file whose SHA-256 is computed while it is written, and which is on its way to the disk meanwhile.

    Both are done in other threads, as far as blocks are large.
    """

    def __init__(self, path: Path, threads: ThreadPoolExecutor):
        super().__init__(io.FileIO(path, "x"))
        self.digest, self.size, self._threads = hashlib.sha256(), 0, threads
        self.problem: OSError | None = None
        self._synced: Future | None = None

    def write(self, block) -> int:
        """Writes and hashes a block, all of it."""
        self.size += len(block)
        if len(block) < _WORTH_A_THREAD:
            self.digest.update(block)
            return self._put(block)
        hashed = self._threads.submit(self.digest.update, block)
        try:
            written = self._put(block)
        finally:
            hashed.result()  # the block is the caller's again
        if self._synced is None or self._synced.done():
            self._wait()
            # The system would begin to write only when told to, or when gigabytes wait.
            self._synced = self._threads.submit(os.fdatasync, self.fileno())
        return written

    def _put(self, block) -> int:
        try:
            return super().write(block)
        except OSError as error:
            self.problem = error
            raise

    def close(self) -> None:
        """Closes the file. Raises OSError when something of it did not reach the disk, which is told only once."""
        try:
            self._wait()
        finally:
            super().close()

    def _wait(self) -> None:
        synced, self._synced = self._synced, None
        if synced:
            synced.result()


class HashedFiles(dcp.filesystem.FileSystem):
    """DCP's files. `known` has size and SHA-256 of each that was written, by name."""

    def __init__(self):
        self.known: dict[str, dict] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str):
        """As DCP wants it; it writes and syncs one file after the other."""
        with ThreadPoolExecutor(2) as threads, HashedFile(path, threads) as file:
            try:
                yield file
            except RuntimeError as error:  # torch's writer stumbles over what the disk has said
                raise file.problem or error from error
        self.known[path.name] = {"bytes": file.size, "sha256": file.digest.hexdigest()}


class Writer(dcp.FileSystemWriter):
    """DCP's writer, synced file by file, with the index in JSON."""

    def __init__(self, folder: Path):
        # Copying ahead is DCP's way to overlap with a GPU, in a stream that would be one of the wrong GPU in a thread.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = HashedFiles()

    def finish(self, metadata: Metadata, results) -> None:
        """Writes the index; called on one rank when all have written."""
        at = {write.index: write.storage_data for results_of_rank in results for write in results_of_rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            boxes = []
            for chunk in tensor.chunks:
                place = at[MetadataIndex(name, chunk.offsets)]
                boxes.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(tensor.size), "dtype": dtype, "boxes": boxes}
        write_synced(Path(self.path) / INDEX, json.dumps(tensors).encode())


class Reader(dcp.FileSystemReader):
    """DCP's reader, from the index in JSON."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """The index as DCP wants it."""
        tensors, at = {}, {}
        for name, tensor in read_index(Path(self.path)).items():
            chunks = []
            for offset, sizes, file, start, length in tensor["boxes"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
                at[MetadataIndex(name, offset)] = _StorageInfo(file, start, length)
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return Metadata(tensors, storage_data=at, storage_meta=StorageMeta())


class Stream:
    """Writes a checkpoint's tensors box by box, without a process group and without holding any: the same files.

    A file of DCP is one box after the other, each as torch.save writes it. Within `file` boxes go to one file.
    """

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]):
        torch.serialization.set_crc32_options(False)  # SHA-256 says more
        self.folder, self._files, self._file = folder, 0, None
        self._tensors = {name: {"shape": list(shape), "dtype": None, "boxes": []} for name, shape in shapes.items()}

    @contextmanager
    def file(self):
        """The next file; on the disk when this is left."""
        path = self.folder / f"__0_{self._files}.distcp"
        self._files += 1
        with path.open("wb") as self._file:
            yield
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, name: str, offset: tuple[int, ...], data: torch.Tensor) -> None:
        """Write one box of a tensor. Raises ValueError when the tensor's other boxes are in another format."""
        tensor, dtype = self._tensors[name], str(data.dtype).removeprefix("torch.")
        if tensor["dtype"] not in (None, dtype):
            raise ValueError(f"{name} is {tensor['dtype']} and {dtype}")
        tensor["dtype"] = dtype
        start = self._file.tell()
        torch.save(data.clone(), self._file)  # a view would be saved with all it is a view of
        place = [Path(self._file.name).name, start, self._file.tell() - start]
        tensor["boxes"].append([list(offset), list(data.shape), *place])

    def finish(self) -> None:
        """Write the index."""
        write_synced(self.folder / INDEX, json.dumps(self._tensors).encode())


def read_index(checkpoint: Path) -> dict:
    """Shape, format and boxes of each tensor; raises BadCheckpoint when a box points outside the checkpoint."""
    index = json.loads((checkpoint / INDEX).read_bytes())
    for tensor in index.values():
        for *_, file, _, _ in tensor["boxes"]:
            if Path(file).name != file:
                raise BadCheckpoint(f"{checkpoint / INDEX} names {file!r}, which is not a file of the checkpoint.")
    return index


def save(folder: Path, tensors: dict[str, Pieces], group=None) -> dict[str, dict]:
    """Write tensors into a folder; size and SHA-256 of each file of this rank, by name. Every rank must call it.

    Its collectives run in `group`. Of equal boxes on several ranks one is written.
    """
    state = {name: Sharded(parts) for name, parts in tensors.items()}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = Writer(folder)
    torch.serialization.set_crc32_options(False)  # SHA-256 says more
    dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    return writer.fs.known


def load(checkpoint: Path, tensors: dict[str, Pieces], alone: bool = False) -> None:
    """Read into the memory of `tensors`. Every rank must call it, unless it is `alone`.

    Raises BadCheckpoint when the checkpoint lacks a tensor or has it in another shape.
    """
    index = read_index(checkpoint)
    for name, parts in tensors.items():
        if name not in index:
            raise BadCheckpoint(f"{checkpoint} has no {name}: it is of another model, optimizer or number of ranks.")
        if tuple(index[name]["shape"]) != tuple(parts.shape):
            has, wants = index[name]["shape"], list(parts.shape)
            raise BadCheckpoint(f"{checkpoint} has {name} in the shape {has}, this model in {wants}.")
    state = {name: Sharded(parts) for name, parts in tensors.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.load(state, storage_reader=Reader(checkpoint), planner=planner, no_dist=alone)
    except (pickle.UnpicklingError, dcp.api.CheckpointException) as error:
        raise BadCheckpoint(f"{checkpoint} cannot be read: {str(error).strip().splitlines()[-1]}") from error


def read(checkpoint: Path, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, all by default, whole and in this process's memory; no process group is needed."""
    whole = {
        name: torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for name, tensor in read_index(checkpoint).items()
        if names is None or name in names
    }
    pieces = {n: Pieces(tuple(t.shape), [Piece((0,) * t.dim(), t, False)]) for n, t in whole.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant
        load(checkpoint, pieces, alone=True)
    return whole
