"""Makes W&B say of a run what result.json says, when W&B itself could not: for whoever started the ranks.

A rank that was killed cannot close its W&B run, one that was stopped because another rank failed does not know why, and
one whose W&B process died has nothing to close it with.
The run's file on this machine is completed with the last steps, status, cause and a failed end. Of an online run it is
then sent: W&B sends every 15 seconds and stops when its run is killed.
"""

import json
import subprocess
import sys
from pathlib import Path

from tracking import history, wandb_file
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
        wandb_file.write(file, _closed(run_dir, wandb_file.read(file), about["display_name"], outcome))
        write(run_dir, FILE, **about | {"status": outcome["status"], "cause": outcome["cause"]})
    except (OSError, ValueError, ImportError) as error:
        return f"W&B is not told how the run ended: {error}"
    return _send(file.parent) if about["mode"] == "online" else None


def _agree(about: dict, outcome: dict) -> bool:
    """The cause in result.json may be longer: it names rank and log."""
    return about["status"] == outcome["status"] and (about["cause"] or "") in (outcome["cause"] or "")


def _closed(run_dir: Path, records: list[bytes], name: str, outcome: dict) -> list[bytes]:
    """The records of a run that ended as `outcome` says, whatever end they had."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2 as pb

    try:
        kept = [pb.Record.FromString(record) for record in records]
    except DecodeError as error:
        raise wandb_file.Unreadable(f"its file holds records that this W&B does not know: {error}") from error
    kept = [record for record in kept if record.WhichOneof("record_type") not in ("alert", "exit")]  # said anew
    # Both have a row for every step and evaluation, in the same order; W&B's may lack the last second.
    recorded = sum(record.WhichOneof("record_type") == "history" for record in kept)
    if not any(record.WhichOneof("record_type") == "run" for record in kept):
        raise wandb_file.Unreadable("the run ended before W&B had written its name and configuration.")
    more, known = [], {}
    for number, line in enumerate(list(history.read(run_dir))[recorded:], start=recorded):
        row = {key: value for key, value in line.items() if key != "step"} | {"_step": number}
        known |= row
        items = [pb.HistoryItem(nested_key=[key], value_json=json.dumps(value)) for key, value in row.items()]
        more.append(pb.Record(history=pb.HistoryRecord(item=items, step=pb.HistoryStep(num=number))))
    known |= in_summary({field: outcome.get(field) for field in ("status", "cause", *Summary().fields())})
    update = [pb.SummaryItem(key=key, value_json=json.dumps(value)) for key, value in known.items()]
    more.append(pb.Record(summary=pb.SummaryRecord(update=update)))
    if outcome["status"] not in ("ok", "interrupted"):
        more.append(pb.Record(alert=pb.AlertRecord(**alert(name, outcome["status"], outcome["cause"]))))
    more.append(pb.Record(exit=pb.RunExitRecord(exit_code=0 if outcome["status"] == "ok" else 1)))
    for number, record in enumerate(more, start=kept[-1].num + 1 if kept else 1):
        record.num = number
    return [record.SerializeToString() for record in kept + more]


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
