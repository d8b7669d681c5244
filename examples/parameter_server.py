"""One model, trained twice by a parameter server on this machine: by 1 worker with 4 epochs, and by 4 with 1.

    python examples/parameter_server.py                       the digits of scikit-learn
    python examples/parameter_server.py --data-dir mnist      MNIST's files in a folder

Both see the same number of samples. Elapsed times and test accuracies are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.utils.data import DataLoader, Subset

from dadplug.data import load_dataset
from dadplug.parameter_server import launch_ps_and_workers

CONFIGURATIONS = ((1, 4), (4, 1))  # workers, epochs of each


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's files; without it scikit-learn's digits")
    parser.add_argument("--samples", type=int, default=8000, help="number of training samples at most")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--num-gpus", type=int, default=0, help="GPUs that the workers use; 0 for the CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    data = load_dataset("mnist" if options.data_dir else "digits", options.data_dir)
    train = Subset(data.train, range(min(options.samples, len(data.train))))
    outcomes = []
    for workers, epochs in CONFIGURATIONS:
        loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
        test = DataLoader(data.test, batch_size=256)
        outcomes.append(launch_ps_and_workers(workers + 1, epochs, options.num_gpus, loader, test, lr=options.lr))
    for number, ((workers, epochs), outcome) in enumerate(zip(CONFIGURATIONS, outcomes, strict=True), 1):
        setting = f"{workers} worker{'s' * (workers > 1)} x {epochs} epoch{'s' * (epochs > 1)}"
        print(f"Elapsed time model {number} ({setting}): {outcome.seconds:.2f} s, accuracy {outcome.accuracy:.2%}")


if __name__ == "__main__":
    main()
