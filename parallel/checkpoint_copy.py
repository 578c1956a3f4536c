"""A copy of what a rank writes, in host memory, from which it is written while training changes the original."""

import mmap

import torch

from parallel.checkpoint_io import Piece, Pieces
from parallel.checkpoint_state import aligned


class HostCopy:
    """Memory for about `size` bytes, made once and used for every checkpoint."""

    def __init__(self, size: int):
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._make(size)

    def _make(self, size: int) -> None:
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(area, dtype=torch.uint8)

    def prepare(self) -> None:
        """Have the system give the memory, which it does when it is first written; lock it for copies from a GPU.

        Takes up to a second a gigabyte, and so a thread. Memory that cannot be locked is copied to more slowly.
        """
        self._memory.zero_()
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread has the first GPU
            refused = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 1))
            if refused:
                print(
                    f"checkpoints: memory for their copy cannot be locked (CUDA error {refused}), so copies take longer"
                )

    def take(self, tensors: dict[str, Pieces]) -> dict[str, Pieces]:
        """Copy the pieces that this rank writes; they stay valid until the next time."""
        need = sum(aligned(p.data) for parts in tensors.values() for p in parts.pieces if p.writes)
        if need > self._memory.numel():
            self._make(need)
        copied, start = {}, 0
        for name, parts in tensors.items():
            pieces = []
            for piece in parts.pieces:
                if piece.writes:
                    pieces.append(Piece(piece.offset, self._place(start, piece.data), True))
                    start += aligned(piece.data)
            copied[name] = Pieces(parts.shape, pieces)
        if self._device is not None:
            torch.cuda.current_stream().synchronize()
        return copied

    def _place(self, start: int, data: torch.Tensor) -> torch.Tensor:
        # A storage of its own, because torch.save writes the whole storage of a tensor.
        flat = torch.frombuffer(self._memory.numpy(), dtype=data.dtype, count=data.numel(), offset=start)
        return flat.view(data.shape).copy_(data, non_blocking=True)
