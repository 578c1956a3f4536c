"""Start from the weights of a checkpoint (`model.weights`): imported ones, or those of another run, whatever it was."""

import os

import torch

from parallel import checkpoint_files as files
from parallel import checkpoint_io as io
from parallel.checkpoint_agree import of_first_rank, verify
from parallel.checkpoint_io import MASTER, Piece, Pieces


def load(path: str, chunks: list[torch.nn.Module]) -> None:
    """Read the weights of this rank's chunks, which are not wrapped for data parallelism yet, in their own format.

    Every rank must call it. Raises BadCheckpoint on all ranks alike.
    """
    found = of_first_rank(lambda: files.at(path, "model.weights"))
    verify(found, files.read_about(found))
    with torch.no_grad():
        io.load(found, pieces(chunks))


def pieces(chunks: list[torch.nn.Module]) -> dict[str, Pieces]:
    """The chunks' parameters as boxes of the whole model's tensors, by the names they have in a checkpoint."""
    found: dict[str, Pieces] = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            flat = parameter.detach().view(-1)
            for place in parameter.places:
                entry = found.setdefault(f"{MASTER}/{place.key}", Pieces(place.global_shape, []))
                shape = (*(1,) * place.prepended, *place.shape)
                entry.pieces.append(Piece(place.offset, flat[place.start : place.end].view(shape), place.writes))
    return found


def notes(cfg) -> dict[str, str]:
    """Where a run's first weights are from, for the block before its first step."""
    if cfg.model.weights is None:
        return {}
    found = files.at(cfg.model.weights, "model.weights")
    step = files.read_about(found)["step"]
    return {"weights": f"{f'after step {step:,}' if step else 'imported'}, of {os.path.relpath(found)}"}
