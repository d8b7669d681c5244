"""Accuracy, bytes and loss curves of the small ViT on photos of dogs and cats, by dsgd and rankdad, over seeds.

    python benchmarks/vit_accuracy.py --data-dir DIR/train.zip                      both sites on this machine

The same steps and batches for each method. Prints a line a run, and a summary: best epoch, mean over seeds. The curves
of the first seed go into a picture.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from command import connect_site

from dadplug.data import load_dataset
from dadplug.support.processes import launch_sites

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import two_site_vit
import two_sites
from runs import picture


def run_site(own: argparse.Namespace, rest: list[str]) -> None:
    connect_site()
    rank = int(os.environ["RANK"])
    best, spent, first = defaultdict(list), {}, []
    for seed in range(own.seeds):
        arguments = two_sites.parse(two_site_vit.TASK, [*rest, "--seed", str(seed)], "")
        data = load_dataset(arguments.dataset, arguments.data_dir)
        for mode in own.modes.split(","):
            mode, _, settings = mode.partition(":")
            for setting in filter(None, settings.split("+")):
                name, value = setting.split("=")
                setattr(arguments, f"option_{name}", int(value) if value.isdigit() else value)
            record = two_sites.train(two_site_vit.TASK, arguments, data, rank, 2, mode)
            best[mode].append(max(record.accuracies))
            spent[mode] = record.bytes_sent[-1]
            if seed == 0:
                first.append(record)
            if rank == 0:
                same = "replicas equal" if record.replicas_equal else "REPLICAS DIFFER"
                print(f"seed {seed} {mode:8} best {max(record.accuracies):.4f}  {same}", flush=True)
    if rank == 0:
        print(f"\nbest epoch, mean of {own.seeds} seeds")
        for mode, values in best.items():
            fewer = max(spent.values()) / spent[mode]
            print(f"{mode:8} {statistics.fmean(values):.4f}   {fewer:6.1f} times fewer bytes than the most")
        Path(own.picture).parent.mkdir(parents=True, exist_ok=True)
        picture(first, own.picture, "small ViT on photos of dogs and cats, 2 sites")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", default="dsgd,rankdad:rank=12+wire=bf16")
    parser.add_argument("--picture", default="logs/vit_accuracy.png")
    own, rest = parser.parse_known_args()
    if "RANK" not in os.environ:
        return launch_sites([__file__, *sys.argv[1:]], 2)
    run_site(own, ["--dataset", "dogsvscats", "--trainer", "plain", *rest])
    return 0


if __name__ == "__main__":
    sys.exit(main())
