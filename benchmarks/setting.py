"""What benchmarks share: being the only rank of a run in this process, and leaving figures with what made them."""

import json
import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ONLY_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def only_rank() -> None:
    """Set what torch.distributed reads, for one rank that meets nobody."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= dict(zip(ONLY_RANK, ("0", "0", "1", "127.0.0.1", port), strict=True))


def keep(name: str, versions: dict | None = None, **figures) -> None:
    """Write figures, with versions and commit, to benchmarks/results/NAME.json and say so."""
    from tracking import result

    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    made_by = {"versions": result.versions() | (versions or {}), "git_commit": result.git_commit()}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(figures | made_by, indent=2) + "\n")
    print(f"written to {file.relative_to(ROOT)}")
