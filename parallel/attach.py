"""Join ranks that exist already: started by torchrun, or as the tasks of one SLURM step.

Rank 0 alone composes, checks and freezes; the others learn from it, through the store they share, where the run folder
is, or that nothing runs. So there is one run folder for all ranks, whatever their clocks say.
"""

import math
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from parallel import environment, failure, frozen, heartbeat, rank_process, slurm

ANSWER_S = 300.0  # ranks of a large job start minutes apart
SHARED_S = 60.0  # until a file written on one node is seen on another
REFUSED = 2
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_store = None  # rank 0 may serve it, so it lives until torch.distributed has its own connection to the same server


def attached() -> bool:
    """Whether this process is one rank of a job that someone else started.

    SLURM_NTASKS says nothing: it is set in every batch script and allocation. A step without MASTER_ADDR is taken for
    an interactive shell.
    """
    if all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return True
    return all(os.environ.get(name) for name in ("SLURM_STEP_ID", "MASTER_ADDR", *_SLURM.values()))


def attach(argv: list[str]) -> Path:
    """Settle with the other ranks what is run; the run folder, with the layout's environment set in this process.

    Call it inside `rank_process.run`, before anything else imports torch. Afterwards the variables that
    torch.distributed reads are set and ranks above 0 write to their log alone. Raises SystemExit when nothing runs:
    rank 0 has said why, the others say nothing.
    """
    _adopt_slurm()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _connect(rank)
    if rank == 0:
        run_dir = None
        try:
            run_dir = _decide(argv, world_size)
        finally:
            _tell(run_dir, world_size)
    else:
        answer = _store.get("run_dir").decode()
        _store.set(f"heard/{rank}", "")
        run_dir = Path(answer) if answer else None
    if run_dir is None:
        sys.exit(REFUSED)
    _set_up(run_dir, rank, world_size)
    return run_dir


def complete(run_dir: Path, error: BaseException) -> None:
    """Write result.json for a run that ends with `error` in rank 0 before anybody keeps its metrics."""
    from parallel.explain import explain
    from tracking import result
    from tracking.tracker import outcome_of

    if os.environ["RANK"] == "0" and not result.load(run_dir):
        status, cause = outcome_of(error)
        result.complete(run_dir, status, cause, explain(status, cause or "", frozen.load(run_dir).cfg, run_dir))


def _adopt_slurm() -> None:
    """Give a SLURM task the names that torch.distributed reads."""
    if os.environ.get("RANK"):
        return
    for name, source in _SLURM.items():
        os.environ[name] = os.environ[source]
    if local := slurm.local_world_size():
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
    if not os.environ.get("MASTER_PORT"):
        # The same in all tasks without asking, and another one in a step that runs at the same time.
        step = int(os.environ.get("SLURM_JOB_ID", "0")) * 101 + int(os.environ["SLURM_STEP_ID"])
        os.environ["MASTER_PORT"] = str(20000 + step % 10000)


def _connect(rank: int) -> None:
    global _store
    from torch.distributed import DistError, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=ANSWER_S)))
    except (DistError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '(MASTER_PORT is not set)')}"
        sys.exit(f"rank {rank} on {socket.gethostname()} cannot meet the others at {where}: {error}")
    # torchrun keeps its store when it starts the ranks again; an answer of the first try must not count for the second.
    _store = PrefixStore(f"attach/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _decide(argv: list[str], world_size: int) -> Path | None:
    """Compose, check and freeze; the run folder, or None after saying why nothing runs."""
    from parallel import compose, rules
    from tracking import result

    try:
        if any(word in ("-m", "--multirun") for word in argv):
            raise compose.Refused(
                ["a sweep starts its own ranks: use `python train.py -m ...` without torchrun or srun."]
            )
        cfg, choices, overrides, run_dir = compose.compose(argv)
        resolved = compose.check(cfg, world_size)
        for note in rules.notes(resolved, rules.visible_gpus()):
            print(f"note: {note}")
        run_dir = run_dir.absolute()
        compose.freeze(resolved, run_dir, choices, overrides)
        result.clear(run_dir, history=resolved.checkpoint.resume != "auto")
        for old in (run_dir / "ranks").glob("rank*.error.json"):
            old.unlink()
        return run_dir
    except compose.Refused as refusal:
        compose.tell(refusal.sentences)
    except OSError as error:
        compose.tell([f"the run folder cannot be made: {error}; choose another with hydra.run.dir=PATH."])
    return None


def _tell(run_dir: Path | None, world_size: int) -> None:
    _store.set("run_dir", str(run_dir or ""))
    if run_dir is None and world_size > 1:
        # The store may end with this process: first let everybody hear that they are to end as well.
        _store.wait([f"heard/{rank}" for rank in range(1, world_size)], timedelta(seconds=ANSWER_S))


def _set_up(run_dir: Path, rank: int, world_size: int) -> None:
    import torch

    point = frozen.load(_on_this_node(run_dir, rank))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]  # torchrun's own default, whatever the machine has
    wanted = environment.rank_environment(point.cfg, world_size, local)
    complete = environment.apply(wanted, dict(os.environ))
    for name in set(os.environ) - set(complete):
        del os.environ[name]
    os.environ.update(complete)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch read the variable when it was imported
    if rank > 0:
        rank_process.log_to_file(run_dir, rank)
    rank_process.record_in(run_dir / "ranks" / f"rank{rank}.error.json")
    limit = point.cfg.train.timeout_s
    until = time.monotonic() + limit if limit else math.inf
    if limit:
        rank_process.stop_after(limit)
    if rank == 0:
        watch = heartbeat.watch_in_background(run_dir, world_size, local < world_size)
        rank_process.ask_elsewhere(lambda: _why_stopped(run_dir, limit, until, watch))


def _why_stopped(run_dir: Path, limit: float | None, until: float, watch: heartbeat.Watch) -> tuple[str, str] | None:
    """Status and cause of a run that no launcher of ours completes: time that is up, or another rank's error."""
    if time.monotonic() >= until:
        return "timeout", f"not finished after train.timeout_s={limit:g}; {watch.positions()}"
    errors = {int(path.name[4:].split(".")[0]): path for path in (run_dir / "ranks").glob("rank*.error.json")}
    ended = [failure.Ended(rank, 1, path.stat().st_mtime) for rank, path in errors.items()]
    found = failure.first_cause(ended, run_dir / "ranks", None, watch.positions()) if ended else None
    return (found.status, found.line) if found else None


def _on_this_node(run_dir: Path, rank: int) -> Path:
    until = time.monotonic() + SHARED_S
    while not (run_dir / frozen.FILE).exists():
        if time.monotonic() > until:
            sys.exit(
                f"rank {rank} on {socket.gethostname()} cannot see {run_dir}: choose a folder that all nodes share "
                "with hydra.run.dir=PATH."
            )
        time.sleep(0.5)
    return run_dir
