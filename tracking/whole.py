"""Files that are there whole or not at all, whatever ends the process or fills the disk."""

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Replaces a file by one with this content; at every moment one of the two is there. Raises OSError."""
    unfinished = path.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
