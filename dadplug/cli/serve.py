"""`python -m dadplug serve`: serve models over HTTP."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="[NAME=]PATH",
        help="a checkpoint, a state dict, a .pt2 or .onnx file, or a folder of shards; its name (default: the file's)",
    )
    parser.add_argument("--builder", metavar="FILE.py:NAME", help="class or function that returns the model")
    parser.add_argument("--slo", type=seconds, default=0.05, help="latency goal, such as 50ms or 0.05 (default: 50ms)")
    parser.add_argument(
        "--deadline", type=seconds, help="time limit of a request (default: 20 times the goal, at least 10s)"
    )
    parser.add_argument("--policy", default="fixed", help="fixed, exp3 or exp4 (default: %(default)s)")
    parser.add_argument("--context", metavar="FIELD", help="name of the field with a request's context, such as site")
    parser.add_argument("--task", default="classification", help="classification or regression (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="error with the largest loss, for regression")
    parser.add_argument("--input-shape", type=shape, metavar="N,N", help="shape of one input; ? for a size that varies")
    parser.add_argument("--dtype", help="dtype of the inputs")
    parser.add_argument("--cache-mb", type=float, default=64.0, help="size of the cache (default: %(default)g)")
    parser.add_argument("--state", type=Path, metavar="FILE", help="file that keeps the policy's weights")
    parser.add_argument("--threads", type=int, default=1, help="threads of each model (default: %(default)d)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: %(default)d)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    from ..serving import Model
    from .arguments import plain_errors

    # The servers are above this folder, which therefore loads them by name.
    serving = importlib.import_module("dadplug.runners.serving")
    with plain_errors(ValueError):
        models: dict[str, Any] = {}
        for given in arguments.models:
            name, path = named(given)
            if name in models:
                raise ValueError(f"two models have the name {name!r}")
            models[name] = Model(path, builder=arguments.builder)
            models[name].description()  # a wrong path is an error before anything has started
        server = serving.serve(
            models,
            slo=arguments.slo,
            deadline=arguments.deadline,
            policy=arguments.policy,
            context=arguments.context,
            task=arguments.task,
            scale=arguments.scale,
            input_shape=arguments.input_shape,
            dtype=arguments.dtype,
            cache_bytes=int(arguments.cache_mb * 2**20),
            state=arguments.state,
            threads=arguments.threads,
        )
        text = f"serving {', '.join(models)} on http://{arguments.host}:{arguments.port}/predict"
        server.run(port=arguments.port, host=arguments.host, ready=lambda: print(text, flush=True))
        for number in (signal.SIGTERM, signal.SIGINT):  # all has ended; a second signal need not interrupt the exit
            signal.signal(number, signal.SIG_IGN)
    return 0


def seconds(text: str) -> float:
    """Parse a duration: ``50ms``, ``0.05s`` or ``0.05``.

    Raises:
        ArgumentTypeError: if it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 50ms or 0.05")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def shape(text: str) -> tuple[int | None, ...]:
    """Parse a shape such as ``1,28,28`` or ``?,4``.

    Raises:
        ArgumentTypeError: if it is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part == "?" or part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 1,28,28")
    return tuple(None if part == "?" else int(part) for part in parts)


def named(text: str) -> tuple[str, str]:
    """Return the name and the path of a model that is given as NAME=PATH or PATH."""
    name, separator, path = text.partition("=")
    return (name, path) if separator and name and "/" not in name else (Path(text).stem, text)
