"""Continuing a sweep: which folder `resume` means, and which command it was."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from parallel.refused import Refused
from tracking.result import STATUSES
from tracking.runs import SWEEP_FILE

# Of a command, what says how to go about the sweep and not which points it has.
OWN = ("resume", "retry", "optimized_metric", "sweep.skip_illegal", "launch.parallel_points", "hydra.sweep.dir")
RETRIED = (*(status for status in STATUSES if status != "ok"), "missing", "damaged")
_CONFIG = Path(__file__).resolve().parent.parent / "conf" / "config.yaml"


def key(word: str) -> str:
    """What a word of the command line sets."""
    return word.lstrip("+~").partition("=")[0]


def without_own(command: list[str]) -> list[str]:
    """The words that decide which points a sweep has."""
    return [word for word in command if key(word) not in OWN]


def statuses(retry: str | None) -> list[str]:
    """The statuses that `retry` names; raises Refused for one that no point can have."""
    names = [name.strip() for name in (retry or "").split(",") if name.strip()]
    unknown = [name for name in names if name not in RETRIED]
    if unknown:
        raise Refused([f"retry={retry}: {', '.join(unknown)} is no status; there are {', '.join(RETRIED)}."])
    return names


def about(folder: Path) -> dict:
    """What sweep.json says, empty where there is none; raises Refused when it is damaged."""
    try:
        found = json.loads((folder / SWEEP_FILE).read_bytes())
        if not (isinstance(found["command"], list) and isinstance(found["points"], list)):
            raise ValueError("it has no list of points")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused([f"{folder / SWEEP_FILE} is damaged, so the sweep cannot be continued: {error}"]) from None


def command(argv: list[str], multirun: bool) -> list[str]:
    """The command line, where it has `resume`, with the folder that is meant and, without -m, that sweep's own words.

    Raises Refused for a `resume` or `retry` that means nothing.
    """
    said = {key(word): word.partition("=")[2].strip("'\"") for word in argv}
    asked = said.get("resume", "false")
    if asked.lower() in ("false", "null"):
        if "retry" in said:
            raise Refused([f"retry={said['retry']} is about points of an earlier sweep: add resume=true."])
        return argv
    statuses(said.get("retry", "").strip("[]"))
    if asked.lower() != "true":
        folder = Path(asked)
        stored = about(folder)
        if not stored:
            raise Refused([f"resume={asked} is not the folder of a sweep: it has no {SWEEP_FILE}."])
        if not multirun:
            again = {key(word) for word in argv if "=" in word}
            argv = [word for word in stored["command"] if key(word) not in again] + argv
    else:
        if not multirun:
            raise Refused(["resume=true is for a sweep: add -m and the words of its command, or take resume=FOLDER."])
        folder = Path(said["hydra.sweep.dir"]) if "hydra.sweep.dir" in said else _newest(argv)
        if folder is None or not about(folder):
            print(f"note: no sweep of this command in {folder or _root()}: a new one starts.")
            return argv
    print(f"note: continuing {folder}")
    return [word for word in argv if key(word) != "hydra.sweep.dir"] + [f"hydra.sweep.dir='{folder}'"]


def _newest(argv: list[str]) -> Path | None:
    """The newest sweep of the same command, whatever the order of its words."""
    wanted, found = sorted(without_own(argv)), []
    for file in _root().glob(f"*/{SWEEP_FILE}"):
        try:
            stored = about(file.parent)
        except Refused:
            continue
        if sorted(without_own(stored["command"])) == wanted:
            found.append((str(stored.get("started")), file.parent))
    return max(found)[1] if found else None


def _root() -> Path:
    """Where sweeps are by default: the folder above the part of hydra.sweep.dir that changes with the time."""
    pattern = OmegaConf.to_container(OmegaConf.load(_CONFIG), resolve=False)["hydra"]["sweep"]["dir"]
    return Path(pattern.partition("/${")[0])
