"""A rank of the parity protocol that makes a mistake under some layouts, of the kinds that they are known for.

python tests/broken_rank.py FOLDER
"""

import contextlib
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from parallel.frozen import load

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


@contextlib.contextmanager
def gradients_scaled(cfg):
    """Every gradient is one percent too long."""
    from parallel import wrap

    connect = wrap.connect

    def broken(chunks, optimizer, cfg):
        connect(chunks, optimizer, cfg)
        chunks[0].config.grad_scale_func = lambda loss: optimizer.scale_loss(loss) * 1.01

    with patch.object(wrap, "connect", broken):
        yield


@contextlib.contextmanager
def other_initial_weights(cfg):
    """Weights begin a thousandth larger."""
    from models import init

    fill = init.fill_

    def broken(data, *args):
        fill(data, *args)
        data.detach().mul_(1.001)

    with patch.object(init, "fill_", broken):
        yield


@contextlib.contextmanager
def last_update_lost(cfg):
    """The last update of the run does not reach one matrix; neither losses nor gradients of any step tell of it."""
    from optim.clip import Clipper

    step, calls = Clipper.step, []

    def broken(self, *args):
        calls.append(None)
        weights = max(self.optimizer.get_parameters(), key=lambda parameter: parameter.numel())
        before = weights.detach().clone()
        update = step(self, *args)
        if len(calls) == cfg.train.steps:
            weights.data.copy_(before)
        return update

    with patch.object(Clipper, "step", broken):
        yield


@contextlib.contextmanager
def dies(cfg):
    """The layout does not work at all."""
    raise ValueError("no such gradient")
    yield


MISTAKES = {"tp2": gradients_scaled, "dp2": other_initial_weights, "pp2": last_update_lost, "zero1": dies}


def main() -> None:
    """Serve the protocol as train.py does."""
    train = runpy.run_path(str(TRAIN), run_name="train")

    def rank(folder: Path) -> None:
        cfg = load(folder).cfg
        with MISTAKES.get(cfg.parallel.name, contextlib.nullcontext)(cfg):
            train["rank"](folder)

    train["rank_process"].run(train["parity_rank"].run, rank, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
