"""Makes W&B say of a run what result.json says, after its ranks have ended: for whoever started them.

A rank that was killed cannot close its W&B run, and one that was stopped because another rank failed does not know why.
The run's file on this machine is completed with status, cause and a failed end. Of an online run it is then sent, which
also brings the last steps: W&B sends every 15 seconds and stops when its run is killed.
"""

import json
import subprocess
import sys
from pathlib import Path

from tracking import wandb_file
from tracking.result import Summary, load, write
from tracking.wandb_run import FILE, alert, in_summary

SEND_TIMEOUT_S = 30


def close(run_dir: str | Path) -> str | None:
    """Closes the W&B run of a run folder as its result.json says. A sentence when that could not be done, else None.

    Nothing is done where there is no W&B run, or where it was closed with this status and cause.
    """
    run_dir = Path(run_dir)
    try:
        about, outcome = load(run_dir, FILE), load(run_dir)
        if not about or _agree(about, outcome):
            return None
        file = run_dir / about["file"]
        wandb_file.write(file, _closed(wandb_file.read(file), about["display_name"], outcome))
        write(run_dir, FILE, **about | {"status": outcome["status"], "cause": outcome["cause"]})
    except (OSError, ValueError, ImportError) as error:
        return f"W&B is not told how the run ended: {error}"
    return _send(file.parent) if about["mode"] == "online" else None


def _agree(about: dict, outcome: dict) -> bool:
    """The cause in result.json may be longer: it names rank and log."""
    return about["status"] == outcome["status"] and (about["cause"] or "") in (outcome["cause"] or "")


def _closed(records: list[bytes], name: str, outcome: dict) -> list[bytes]:
    """The records of a run that ended as `outcome` says, whatever end they had."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import AlertRecord, Record, RunExitRecord, SummaryItem, SummaryRecord

    try:
        kept = [Record.FromString(record) for record in records]
    except DecodeError as error:
        raise wandb_file.Unreadable(f"its file holds records that this W&B does not know: {error}") from error
    kept = [record for record in kept if record.WhichOneof("record_type") not in ("alert", "exit")]  # said anew
    known = in_summary({field: outcome.get(field) for field in ("status", "cause", *Summary().fields())})
    update = [SummaryItem(key=key, value_json=json.dumps(value)) for key, value in known.items()]
    end = [Record(summary=SummaryRecord(update=update))]
    if outcome["status"] != "interrupted":
        end.append(Record(alert=AlertRecord(**alert(name, outcome["status"], outcome["cause"]))))
    end.append(Record(exit=RunExitRecord(exit_code=1)))
    for number, record in enumerate(end, start=kept[-1].num + 1 if kept else 1):
        record.num = number
    return [record.SerializeToString() for record in kept + end]


def _send(folder: Path) -> str | None:
    words = ["sync", "--include-online", "--include-synced", str(folder.resolve())]
    command = [sys.executable, "-P", "-m", "wandb", *words]
    try:
        # It keeps its own log in the folder it is called in.
        done = subprocess.run(command, cwd=folder.parent.parent, capture_output=True, timeout=SEND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        return f"W&B's server does not hear how the run ended; later this tells it: wandb {' '.join(words)}"
    return None
