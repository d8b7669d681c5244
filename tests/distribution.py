"""The wheel alone: installed by a new pip into a new environment, far from the repository, and used as the README says.

    python tests/distribution.py dist/dadplug-0.3.0-py3-none-any.whl
    python tests/distribution.py dist/dadplug-0.3.0.tar.gz

Installs the wheel with its extras lightning, transformers and hub, checks requirements (`pip check`), runs the
README's snippets at two sites, checks a user's script by mypy, and prints the wheel's size and the time of an import.
Of an sdist it runs `make demo`, collects all tests and runs some of them, in the unpacked folder alone.
PIP_CONSTRAINT and PIP_EXTRA_INDEX_URL are pip's, for a build of torch without CUDA.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
EXTRAS = ("lightning", "transformers", "hub")  # the last one is not to hide what the others lack
SOME_TESTS = ("tests/lowrank/test_packing.py", "tests/methods/test_methods.py", "tests/project/test_packaging.py")

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
MODULE = """
import pytorch_lightning as pl
class Module(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return criterion(model(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(model.parameters())
module = Module()
module.net = model
"""
IMPORT = "import dadplug; print(f'{1e3 * (time.perf_counter() - began):.0f} ms')"
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


def snippets(text: str) -> dict[str, str]:
    """Return the Python blocks by the extra that they need; those of Catalyst are left out: they need an older pip."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    by_extra = {"lightning" if "pytorch_lightning" in block else "": block for block in blocks if "Runner" not in block}
    assert set(by_extra) == {"", "lightning"}, "the README has a snippet for a plain loop, and one for Lightning"
    return by_extra


def check_wheel(wheel: Path, folder: Path) -> None:
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
    call([*pip, "check"], folder)
    place = call([python, "-c", "import dadplug; print(dadplug.__file__)"], folder)
    assert str(folder) in place, place
    spent = call([python, "-c", f"import time; began = time.perf_counter(); {IMPORT}"], folder)
    print(f"{wheel.stat().st_size / 1e3:.0f} kB; import dadplug: {spent}", end="", flush=True)
    blocks = snippets(README.read_text())
    (folder / "plain.py").write_text(PREPARED + blocks[""])
    call([python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "plain.py"], folder)
    print("the README's first snippet runs, without an extra", flush=True)
    for extra in EXTRAS:
        call([*pip, "install", "--quiet", f"{wheel}[{extra}]"], folder)
        call([*pip, "check"], folder)
        print(f"[{extra}] installs, and pip check is clean", flush=True)
        if extra in blocks:
            (folder / f"{extra}.py").write_text(PREPARED + MODULE + blocks[extra])
            call([python, f"{extra}.py"], folder)
            print("its snippet runs", flush=True)
    call([python, "-c", "import dadplug.transformers, dadplug.hub.pki.kits"], folder)
    call([*pip, "install", "--quiet", "mypy"], folder)
    (folder / "typed.py").write_text(TYPED)
    call([python, "-m", "mypy", "--strict", "--follow-imports=silent", "typed.py"], folder)
    print("mypy --strict accepts a user's script", flush=True)


def check_sources(sdist: Path, folder: Path) -> None:
    """Unpack the sdist, and run the demo and tests from it.

    Args:
        sdist: the sdist.
        folder: an empty folder.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    print(call(["make", "demo", f"PYTHON={sys.executable}"], root)[-300:], flush=True)
    python = str(root / ".venv" / "bin" / "python")
    print(call([python, "-m", "pytest", "--collect-only", "-q"], root).splitlines()[-1], flush=True)
    print(call([python, "-m", "pytest", "-q", *SOME_TESTS], root).splitlines()[-1], flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(sys.argv[1]).resolve()
        (check_wheel if path.suffix == ".whl" else check_sources)(path, Path(temporary).resolve())
