"""The wheel alone: installed by a new pip into a new environment, far from the repository, and used as the README says.

    python tests/distribution.py dist/dadplug-0.3.0-py3-none-any.whl

Installs the wheel with its extras hub, lightning and transformers, checks requirements (`pip check`), runs the
README's snippets at two sites, checks a user's script by mypy, and prints the wheel's size and the time of an import.
PIP_CONSTRAINT and PIP_EXTRA_INDEX_URL are pip's, for a build of torch without CUDA.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
EXTRAS = ("hub", "lightning", "transformers")

# What a reader's script has before the snippet begins.
PREPARED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(70, 1, 28, 28), torch.randint(0, 10, (70,)))
loader = DataLoader(data, batch_size=16)
"""
TYPED = """
import torch

import dadplug


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> int:
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=4)
    for batch in batches:
        model(batch).sum().backward()
        reduction.synchronize()
        optimizer.step()
    return reduction.traffic.total_bytes_sent


def wrap(model: torch.nn.Module) -> torch.nn.Module:
    return dadplug.DistributedDataParallel(model, mode="rankdad")


def local(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dadplug.LocalSGD:
    return dadplug.LocalSGD(model, optimizer, every=16)


def fails(error: dadplug.DadplugError) -> str:
    return str(error)
"""


def call(command: list[str], folder: Path) -> str:
    """Run a command in a folder without the repository in its path; exit with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def snippets(text: str) -> list[str]:
    """Return the Python blocks that need nothing but what is installed: those of Catalyst need an older pip."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    return [block for block in blocks if "DistributedRunner" not in block]


def check(wheel: Path, folder: Path) -> None:
    """Install the wheel and use it.

    Args:
        wheel: the wheel.
        folder: an empty folder.
    """
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "install", "--quiet", "--upgrade", "pip"], folder)
    call([*pip, "install", "--quiet", str(wheel)], folder)
    print(call([*pip, "--version"], folder).split(" from ")[0], "installed", wheel.name, flush=True)
    began = time.perf_counter()
    place = call([python, "-c", "import dadplug; print(dadplug.__file__)"], folder)
    print(
        f"{wheel.stat().st_size / 1e3:.0f} kB; a Python with `import dadplug` took {time.perf_counter() - began:.2f} s"
    )
    assert str(folder) in place, place
    for number, block in enumerate(block for block in snippets(README.read_text()) if "pytorch_lightning" not in block):
        (folder / f"snippet{number}.py").write_text(PREPARED + block)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        call([python, *launch, f"snippet{number}.py"], folder)
        print(f"snippet {number} of the README runs", flush=True)
    call([*pip, "check"], folder)
    for extra in EXTRAS:
        call([*pip, "install", "--quiet", f"{wheel}[{extra}]"], folder)
        call([*pip, "check"], folder)
        print(f"[{extra}] installs, and pip check is clean", flush=True)
    code = "from dadplug import DADStrategy; import dadplug.transformers, dadplug.hub.pki; DADStrategy(mode='rankdad')"
    call([python, "-c", code], folder)
    call([*pip, "install", "--quiet", "mypy"], folder)
    (folder / "typed.py").write_text(TYPED)
    call([python, "-m", "mypy", "--strict", "--follow-imports=silent", "typed.py"], folder)
    print("mypy --strict accepts a user's script", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        check(Path(sys.argv[1]).resolve(), Path(temporary).resolve())
