"""Train one point, or every point of a sweep: python train.py [-m] [group=option ...] [key=value ...].

The process a person starts composes, checks and freezes the configuration, without importing torch, and starts this
file once for each rank. `rank` below is what each of them does, from top to bottom.
"""

import math
import os
import sys
import time
from functools import partial
from pathlib import Path

from parallel import parity_rank, rank_process
from parallel.attach import attach, attached, complete
from parallel.compose import command_line, tell
from parallel.frozen import load


def start(run_dir: Path, frozen) -> int:
    """Start the ranks of one point and wait for them; the exit code."""
    from data.batches import BadData
    from data.batches import load as load_corpus
    from parallel import launch
    from tracking import result

    try:
        # Read here too, so that an unusable text costs a sentence and not the start of all ranks.
        load_corpus(frozen.cfg)
        launch.run(run_dir, frozen)
    except BadData as problem:
        result.complete(run_dir, "failed", str(problem))
        return tell([str(problem)])
    except launch.JobFailed as failure:
        print(f"\n{failure.status}: {failure}", file=sys.stderr)
        if failure.known:
            print(f"why: {failure.known.sentence}", file=sys.stderr)
        if failure.known and failure.known.advice:
            print(f"try: {failure.known.advice}", file=sys.stderr)
        return 1
    return 0


def rank(run_dir: Path) -> None:
    """Train as one rank of the run in `run_dir`, which holds the frozen configuration."""
    from parallel.heartbeat import Heartbeat

    frozen = load(run_dir)
    cfg, number = frozen.cfg, int(os.environ["RANK"])
    heartbeat = Heartbeat(run_dir, number)
    heartbeat.beat("import")
    from parallel import quiet

    quiet.libraries()
    from data.batches import Batches, HeldOut
    from data.batches import load as load_corpus
    from models import attention, expected, flops, loss
    from models.sample import first_words, sample
    from optim import build, clip
    from parallel import checkpoint_weights, facts, groups, wrap
    from parallel.checkpoint import Checkpoints
    from precision import peak, probes, setup
    from precision.nonfinite import Doctor
    from tracking.growth import Growth
    from tracking.metrics import Meter, validation

    # Device and process groups, model, data parallelism, optimizer, data.
    heartbeat.beat("process groups")
    device = groups.start(cfg)
    setup.apply(cfg)
    attention_note = attention.install(cfg.model.attention, cfg.precision.compute)
    heartbeat.beat("model")
    chunks = wrap.model_chunks(cfg, device)
    optimizer = build.optimizer(cfg, chunks)
    schedule = build.schedule(cfg, optimizer)
    clipper = clip.Clipper(cfg, chunks, optimizer)
    probe = probes.Probe(cfg, chunks, optimizer)
    wrap.connect(chunks, optimizer, cfg)
    corpus = load_corpus(cfg)
    dp_rank, dp_size = facts.data_rank()
    batches = Batches(corpus.train, cfg.train, dp_rank, dp_size, cfg.train.seed)
    held_out = HeldOut(corpus.val, cfg.train, dp_rank, dp_size, cfg.train.eval_sequences)

    # What is known before the first step. The measured peak draws random numbers, so the state is restored after it.
    best = peak.dense_peak(cfg)
    heartbeat.beat("resume")
    checkpoints = Checkpoints(cfg, run_dir, chunks, optimizer, schedule, clipper, corpus.facts["fingerprint"])
    done = checkpoints.resume()
    tokens_per_step = cfg.train.global_batch * cfg.train.seq_len
    flops_per_token = flops.per_token(cfg.model, cfg.train.seq_len, cfg.train.flop_rule)
    meter = Meter(cfg, frozen.world_size, flops_per_token, best and best["tflops"])
    known = {
        "parameters": flops.parameters(cfg.model),
        "device": f"{frozen.world_size} × {peak.device_name()}",
        "peak": best,
        "rank_map": facts.rank_map(cfg),
        "run_command": facts.command(frozen.overrides),
        "data": corpus.facts,
        "resumed": checkpoints.resumed,
        "notes": {
            "memory": facts.memory_note(cfg, chunks),
            "time": facts.time_note(cfg, flops_per_token, best),
            "attention": attention_note,
            "validation": facts.validation_note(held_out),
            "clipping": clip.note(cfg),
            **setup.notes(cfg),
            **probes.note(cfg, probe),
            **checkpoint_weights.notes(cfg),
            **checkpoints.notes,
        },
    }
    heartbeat.beat("check")
    check = None if done else expected.check(cfg, chunks, dp_rank, dp_size)
    doctor = Doctor(cfg, run_dir, chunks, optimizer, checkpoints)
    growth = Growth(run_dir, number, facts.room_bytes)

    def evaluating(batch: int) -> None:
        heartbeat.beat(f"evaluation, batch {batch}")
        tracker.evaluating(batch, held_out.steps)

    with facts.tracker(frozen, run_dir, known, done) as tracker, checkpoints:
        rank_process.last_words(tracker.last_words)
        if check:
            tracker.verdict(check)
        if not done:
            tracker.log(0, validation(loss.evaluate(chunks, held_out, cfg.train, evaluating)))

        step = done
        while step < cfg.train.steps:
            step += 1
            heartbeat.beat(f"step {step}")
            began = time.perf_counter()
            micro_batches = batches.step(step - 1)
            waited = time.perf_counter() - began
            doctor.take(step, micro_batches)
            heartbeat.beat(f"step {step}, computing")

            schedule.step(1)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            scale = optimizer.get_loss_scale().item()
            lr, train_loss, update = optimizer.param_groups[0]["lr"], math.nan, clip.LEFT_OUT
            probed, histograms = {}, {}
            if step not in doctor.left_out:
                probe.begin(step)
                train_loss = loss.run(chunks, micro_batches, cfg.train, backward=True)
                if math.isfinite(train_loss):
                    update = clipper.step(partial(probe.gradients, scale))
                probed, histograms = probe.end(updated=math.isfinite(update.grad_norm) and not update.spike)
                if seen := doctor.finds(train_loss, update, lr, scale):
                    heartbeat.beat(f"step {step}, looking for the first bad tensor")
                    if cfg.train.on_nan == "stop":
                        last = {"train/loss": train_loss, "grad/norm": update.grad_norm}
                        tracker.log(step, {"tokens": step * tokens_per_step} | last)
                    tracker.not_finite(step, seen)
                    done = doctor.treat(seen)  # or the run ends here
                    if done < step:
                        tracker.rolled_back(done)
                        step = done
                        continue

            raw = dict(
                step=step,
                tokens=step * tokens_per_step,
                loss=train_loss,
                lr=lr,
                grad_norm=update.grad_norm,
                clip_coef=update.clip_coef,
                clipped=update.clip_coef < 1.0,
                loss_scale=scale,
                clip_threshold=update.threshold,
                skipped=update.skipped,
                spike=update.spike,
                left_out=doctor.left_out,
                rollbacks=doctor.rollbacks,
                step_s=time.perf_counter() - began,
                data_wait_s=waited,
                peak_gib=facts.peak_gib(),
            )
            tracker.log(step, meter.step(raw) | probed, histograms)
            if grows := growth.add(step, facts.held_bytes(), cfg.train.steps):
                tracker.warn(grows)
            if step % cfg.train.eval_every == 0 or step == cfg.train.steps:
                tracker.log(step, validation(loss.evaluate(chunks, held_out, cfg.train, evaluating)))
            heartbeat.beat(f"checkpoint after step {step}")
            checkpoints.after(step)

        if cfg.train.sample_length:
            heartbeat.beat("sample")
            prompt = cfg.data.sample_prompt or first_words(corpus)
            text = sample(chunks, corpus.tokenizer, prompt, cfg.train.sample_length, cfg.train.seq_len, cfg.train.seed)
            tracker.sample(prompt, text)
    batches.close()
    held_out.close()
    groups.stop()


def frozen_point(run_dir: Path) -> int:
    """Start the ranks of a point that was frozen before, in a SLURM job of its own; the exit code."""
    try:
        return start(run_dir, load(run_dir))
    except KeyboardInterrupt:
        return 130


def launched_rank(run_dir: Path) -> None:
    """Train as one of the ranks that `parallel.launch` started."""
    from tracking import result

    rank_process.ask_elsewhere(lambda: result.why_stopped(run_dir))
    rank(run_dir)


def attached_rank(argv: list[str]) -> None:
    """Train as one of the ranks that torchrun or SLURM started."""
    run_dir = attach(argv)
    try:
        rank(run_dir)
    except BaseException as error:
        complete(run_dir, error)  # there is no launcher of ours that would
        raise


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_process.run(launched_rank, Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--point"]:
        sys.exit(frozen_point(Path(sys.argv[2])))
    elif sys.argv[1:2] == ["--parity"]:
        rank_process.run(parity_rank.run, rank, Path(sys.argv[2]))
    elif attached():
        rank_process.run(attached_rank, sys.argv[1:])
    else:
        sys.exit(command_line(start, sys.argv[1:]))
