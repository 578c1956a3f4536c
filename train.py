"""Train one point, or every point of a sweep: python train.py [-m] [group=option ...] [key=value ...]."""

import sys

from parallel.compose import command_line


def start(run_dir, frozen) -> int:
    """Start the ranks of one point and wait for them; the exit code."""
    from parallel.launch import run

    run(run_dir, frozen)
    return 0


if __name__ == "__main__":
    sys.exit(command_line(start, sys.argv[1:]))
