"""Low-rank compression against its peers: error relative to the optimum, and time, over shapes and ranks.

    python benchmarks/lowrank.py                    the table
    python benchmarks/lowrank.py --training         errors on factors of MNISTNet and a small ViT in training

Peers: the published deflation iteration in torch (3 iterations a vector), torch.svd_lowrank(niter=2) of the formed
gradient, exact SVD of it, and the product that forms it, which autograd computes and dadplug spares. Times are medians
of calls that take turns, on one thread. Factors are random with decaying spectra; --training takes real ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from command import parser_of
from dadplug.hooks import LayerCapture
from torch import Tensor, nn

from dadplug.data import load_dataset
from dadplug.lowrank import Carry, compress
from dadplug.models import build_model

# Name, rows N, out, in.
SHAPES = [
    ("MNISTNet first", 16, 2048, 784),
    ("MNISTNet second", 16, 1024, 2048),
    ("MNISTNet second", 32, 1024, 2048),
    ("MNISTNet third", 128, 512, 1024),
    ("small ViT, attention", 2080, 128, 128),
    ("small ViT, feed-forward", 2080, 512, 128),
    ("ViT-Base, attention", 256, 768, 768),
    ("ViT-Base, feed-forward", 512, 3072, 768),
    ("BERT-base, attention", 1024, 768, 768),
    ("BERT-base, feed-forward", 4096, 768, 3072),
    ("LSTM 512, gates", 256, 2048, 1024),
]


def factors(rows: int, out: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw factors of a gradient with singular values that fall by half every ten."""
    generator = torch.Generator().manual_seed(seed)
    size = min(rows, out)
    mixed = torch.linalg.qr(torch.randn(rows, size, generator=generator)).Q
    spectrum = 0.5 ** (torch.arange(size) / 10)
    deltas = (mixed * spectrum) @ torch.randn(size, out, generator=generator) / size**0.5
    return deltas, torch.randn(rows, width, generator=generator)


def published(deltas: Tensor, activations: Tensor, rank: int, iterations: int = 3) -> tuple[Tensor, Tensor]:
    """The iteration with deflation of rank-dAD (section 4): what was found is subtracted from the next's products."""
    out, width = deltas.shape[1], activations.shape[1]
    left, right = deltas.new_zeros(out, rank), deltas.new_zeros(width, rank)
    for column in range(rank):
        vector = torch.randn(width)
        for _ in range(iterations):
            other = deltas.T @ (activations @ vector) - left @ (right.T @ vector)
            other = other / other.norm()
            vector = activations.T @ (deltas @ other) - right @ (left.T @ other)
            scale = vector.norm()
            vector = vector / scale
        left[:, column], right[:, column] = other, vector * scale
    return left, right


def error(deltas: Tensor, activations: Tensor, left: Tensor, right: Tensor) -> float:
    gradient = deltas.double().T @ activations.double()
    return float((gradient - left.double() @ right.double().T).norm() / gradient.norm())


def optimum(deltas: Tensor, activations: Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(deltas.double().T @ activations.double())
    return float(values[rank:].norm() / values.norm())


def seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time calls that take turns; return the median of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def table(ranks: list[int], rounds: int) -> None:
    print(
        f"{'layer':24} {'N':>5} {'out x in':>12} {'rank':>4}  {'error/best':>10} {'warm':>6}  {'ms cold':>8} "
        f"{'ms warm':>8}  {'deflation':>9} {'lowrank':>8} {'svd':>8} {'GEMM':>6}   times longer than warm"
    )
    for name, rows, out, width in SHAPES:
        deltas, activations = factors(rows, out, width, 0)
        svd = seconds({"svd": lambda: torch.linalg.svd(deltas.T @ activations, full_matrices=False)}, 1)["svd"]  # noqa: B023
        for rank in ranks:
            best = optimum(deltas, activations, rank)
            cold = compress(deltas, activations, rank)
            carry = cold.carry
            warm = compress(deltas, activations, rank, iterations=1, warm_start=carry)
            took = seconds(
                {
                    "cold": lambda: compress(deltas, activations, rank),  # noqa: B023
                    "warm": lambda: compress(deltas, activations, rank, iterations=1, warm_start=carry),  # noqa: B023
                    "deflation": lambda: published(deltas, activations, rank),  # noqa: B023
                    "lowrank": lambda: torch.svd_lowrank(deltas.T @ activations, q=rank, niter=2),  # noqa: B023
                    "gemm": lambda: deltas.T @ activations,  # noqa: B023
                },
                rounds,
            )
            peers = "  ".join(
                f"{value / took['warm']:8.1f}" for value in (took["deflation"], took["lowrank"], svd, took["gemm"])
            )
            if best < 1e-5:  # the rank is as large as the gradient's
                ratios = f"{'exact':>10} {'exact':>6}"
            else:
                first, second = (error(deltas, activations, *found) / best for found in (cold, warm))
                ratios = f"{first:10.4f} {second:6.3f}"
            print(
                f"{name:24} {rows:5} {out:5} x {width:4} {rank:4}  {ratios}  "
                f"{1e3 * took['cold']:8.2f} {1e3 * took['warm']:8.2f}  {peers}",
                flush=True,
            )


def training(steps: int, rank: int) -> None:
    """Follows two models in training: cold and warm errors of every layer, relative to the best."""
    digits = load_dataset("digits")
    for name, model in (
        ("MNISTNet", build_model("MNISTNet")),
        ("small ViT", build_model("vit-small", image_size=28, patch_size=4, channels=1, classes=10, depth=2)),
    ):
        capture = LayerCapture(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        carried: dict[str, Carry] = {}
        worst = {"cold": 0.0, "warm": 0.0, "orthonormal": 0.0}
        mean: dict[str, list[float]] = {"cold": [], "warm": []}
        for step in range(steps):
            picked = torch.randint(len(digits.train), (16,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(digits.train.images[picked]), digits.train.labels[picked]).backward()
            for layer, factor in capture.factors.items():
                if min(factor.deltas.shape[1], factor.activations.shape[1], factor.rows) <= rank:
                    continue
                best = optimum(factor.deltas, factor.activations, rank)
                cold = compress(factor.deltas, factor.activations, rank)
                warm = compress(
                    factor.deltas, factor.activations, rank, iterations=1, warm_start=carried.get(layer, cold.carry)
                )
                carried[layer] = warm.carry
                kept = cold.left[:, : cold.effective_rank]
                off = float((kept.T @ kept - torch.eye(kept.shape[1])).abs().max())
                worst["orthonormal"] = max(worst["orthonormal"], off)
                for kind, found in (("cold", cold), ("warm", warm)):
                    ratio = error(factor.deltas, factor.activations, *found) / max(best, 1e-6)
                    worst[kind] = max(worst[kind], ratio)
                    mean[kind].append(ratio)
            optimizer.step()
            capture.clear()
        means = {kind: statistics.fmean(ratios) for kind, ratios in mean.items()}
        print(
            f"{name:10} rank {rank}, {steps} steps: error relative to the best, cold {means['cold']:.4f} (worst "
            f"{worst['cold']:.4f}), warm {means['warm']:.4f} (worst {worst['warm']:.4f}); left is orthonormal to "
            f"{worst['orthonormal']:.0e}",
            flush=True,
        )


def main() -> None:
    parser = parser_of(
        __doc__,
        training=False,
        ranks="1,4,8,32",
        rounds=10,
        steps=50,
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    if arguments.training:
        for rank in ranks:
            training(arguments.steps, rank)
    else:
        table(ranks, arguments.rounds)


if __name__ == "__main__":
    main()
