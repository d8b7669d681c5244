"""`python -m dadplug tune`: measure which constants kernels and served models are fastest with on this machine."""

from __future__ import annotations

import argparse
import os

from .serve import shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a checkpoint, a state dict or another file that `serve` takes (default: the layers of MNISTNet)",
    )
    parser.add_argument("--builder", metavar="FILE.py:NAME", help="class or function that returns the model")
    parser.add_argument("--input-shape", type=shape, metavar="N,N", help="shape of one input of the model, for serving")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step (default: %(default)d)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit, about (default: %(default)g)")
    parser.add_argument(
        "--threads", type=_count, help="threads, as training or serving will have (default: as torch starts with)"
    )


def _count(text: str) -> int:
    """Return the number of threads that a command line names."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Tune, and print what was tried and won."""
    if arguments.threads:  # before torch is loaded
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    from ..tuning import tune
    from .arguments import plain_errors

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with plain_errors(ValueError):
        result = tune(
            arguments.model,
            arguments.seconds,
            builder=arguments.builder,
            input_shape=arguments.input_shape,
            rows=arguments.batch_size,
        )
    print(result.table())
    return 0
