"""What all ranks have to agree on before they read a checkpoint: which one, and that it is whole."""

from pathlib import Path

import torch.distributed as dist

from parallel import checkpoint_files as files
from parallel.checkpoint_files import BadCheckpoint


def of_first_rank(ask):
    """What rank 0 finds on the disk, on every rank; they may see a shared disk differently for a moment."""
    held = [None, None]
    if dist.get_rank() == 0:
        try:
            held[0] = ask()
        except BadCheckpoint as problem:
            held[1] = str(problem)
    dist.broadcast_object_list(held)
    if held[1]:
        raise BadCheckpoint(held[1])
    return held[0]


def verify(found: Path, about: dict) -> None:
    """Check size and SHA-256 of every file, each on one rank; raises BadCheckpoint on all ranks alike."""
    wrong = [None] * dist.get_world_size()
    dist.all_gather_object(wrong, files.damage(found, about, dist.get_rank(), dist.get_world_size()))
    wrong = next((sentence for sentence in wrong if sentence), None)
    if wrong:
        better = of_first_rank(lambda: files.advice(found))
        raise BadCheckpoint(f"{wrong} Nothing was loaded; {better}.")
