"""Installed, editable or started from the repository's root, dadplug is one package, and cheap to import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PARTS = [
    "adapm",
    "callbacks",
    "tools.cli",
    "tools.comparison",
    "data",
    "examples.zoo",
    "exchange",
    "hooks",
    "hub",
    "lowrank",
    "step.methods",
    "step.model_sync",
    "models",
    "step.planning",
    "step.reducer",
    "runners",
    "step.units",
]
WHERE = f"""
import importlib, pathlib, dadplug
parts = [importlib.import_module("dadplug." + part) for part in {PARTS}]
print(*(pathlib.Path(part.__file__).resolve() for part in [dadplug, *parts]), sep="\\n")
dadplug.GradientReduction, dadplug.hooks.LayerCapture, dadplug.lowrank.compress
"""


def python(code: str, cwd: Path, *paths: Path) -> str:
    """Run code with these folders in the path; torch and numba are imported already."""
    path = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    (program,) = support.run_programs([["-c", code]], env=path, folder=cwd, bare=True)
    assert program.status == 0, program.errors
    return program.output


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A copy of the repository, built as a wheel and installed into a folder."""
    source = tmp_path_factory.mktemp("source") / "dadplug-copy"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "logs", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    target = tmp_path_factory.mktemp("installed")
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    program = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=200)
    if program.returncode and "setuptools" in program.stderr:
        pytest.skip(f"no wheel can be built here: {program.stderr.strip().splitlines()[-1]}")
    assert program.returncode == 0, program.stderr
    return target


def test_an_installed_copy_is_whole(installed, tmp_path):
    places = [Path(line) for line in python(WHERE, tmp_path, installed).split()]
    assert all(place.is_relative_to(installed / "dadplug") for place in places)
    assert (installed / "dadplug" / "py.typed").exists()
    assert not any((installed / stray).exists() for stray in ("hooks", "runners", "callbacks", "tests", "examples"))


def test_started_from_the_root_the_checkout_counts_as_a_whole(installed):
    places = [Path(line) for line in python(WHERE, ROOT, installed).split()]
    assert all(place.is_relative_to(ROOT) for place in places)


def test_a_checkout_works_without_installation(tmp_path):
    places = [Path(line) for line in python(WHERE, tmp_path, ROOT).split()]
    assert all(place.is_relative_to(ROOT) for place in places)


def test_importing_dadplug_is_cheap(tmp_path):
    loaded = "print(*sorted(m.split('.')[0] for m in sys.modules))"
    code = f"import sys, dadplug, dadplug.errors; {loaded}; dadplug.GradientReduction, dadplug.lowrank.sparse; {loaded}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    program = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert program.returncode == 0, program.stderr
    first, second = (set(line.split()) for line in program.stdout.splitlines())
    assert not first & {"torch", "numpy", "numba", "catalyst", "accelerate", "lightning", "nnunetv2", "sklearn"}
    assert not second & {"numba", "catalyst", "accelerate", "lightning", "nnunetv2", "sklearn"}
    assert "torch" in second


ASK = """
for name in {names}:
    try:
        part, kind = name.split(".")
        getattr(getattr(dadplug, part), kind)()
    except ImportError as error:
        print(error)
"""


def test_a_trainer_that_is_missing_is_told_with_its_extra(tmp_path):
    (tmp_path / "catalyst.py").write_text("raise ModuleNotFoundError(\"No module named 'catalyst'\", name='catalyst')")
    names = ["runners.DistributedRunner", "callbacks.BatchTimerCallback"]
    messages = python(f"import dadplug{ASK.format(names=names)}", tmp_path, tmp_path, ROOT).splitlines()
    for name, message in zip(names, messages, strict=True):
        needs = "needs Catalyst, which is not installed: pip install 'dadplug[catalyst]'"
        assert f"{name.split('.')[1]} {needs}" in message


def test_lightning_that_is_missing_is_told_with_its_extra(tmp_path):
    names = ["runners.DADStrategy", "callbacks.TrafficMonitor"]
    hidden = 'import sys\nsys.modules["lightning"] = sys.modules["pytorch_lightning"] = None\nimport dadplug'
    messages = python(hidden + ASK.format(names=names), tmp_path, ROOT).splitlines()
    for name, message in zip(names, messages, strict=True):
        needs = "needs Lightning, which is not installed: pip install 'dadplug[lightning]'"
        assert f"{name.split('.')[1]} {needs}" in message


def test_nnunet_that_is_missing_is_told_with_its_extra(tmp_path):
    hidden = 'import sys\nsys.modules["nnunetv2"] = None\nimport dadplug'
    (message,) = python(hidden + ASK.format(names=["nnunet.nnUNetTrainerDadplug"]), tmp_path, ROOT).splitlines()
    assert message.startswith("dadplug.nnunet needs nnU-Net")
    assert message.endswith('install dadplug with the extra "nnunet"')


EXTRAS = ("cryptography", "prometheus_client", "tomli", "opacus", "litserve", "onnxruntime", "accelerate", "sklearn")
BARE = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS})  # as if they were not installed
import torch, dadplug
for name in dadplug.__all__:
    if not name.endswith(("Runner", "serve")):
        getattr(dadplug, name)
dadplug.connect(int(sys.argv[1]), 2, sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = dadplug.DistributedDataParallel(model, mode="rankdad")
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
print(model.reduction.first_difference())
try:
    dadplug.connect(kit="kits/a")
except ImportError as error:
    print(error)
"""


def test_the_core_trains_without_any_extra(tmp_path):
    address = f"tcp://127.0.0.1:{support.free_port()}"
    programs = [["-c", BARE, str(rank), address] for rank in range(2)]
    for program in support.run_programs(programs, env={"PYTHONPATH": str(ROOT)}, folder=tmp_path, bare=True):
        assert program.status == 0, program.errors
        first, second = program.output.splitlines()
        assert first == "None"
        assert second == "kits need the package cryptography, which is not installed: pip install 'dadplug[hub]'"


def test_an_installed_copy_offers_its_callbacks_to_lightning(installed):
    (points,) = installed.glob("dadplug*.dist-info/entry_points.txt")
    text = points.read_text()
    assert "[pytorch_lightning.callbacks_factory]\ndadplug = dadplug.callbacks.pytorch_lightning:factory" in text
    assert "[lightning.pytorch.callbacks_factory]\ndadplug = dadplug.callbacks.lightning:factory" in text


def test_unknown_names_are_attribute_errors():
    import dadplug

    with pytest.raises(AttributeError, match="module 'dadplug' has no attribute 'nothing'"):
        dadplug.nothing
    assert {"GradientReduction", "hooks", "lowrank"} <= set(dir(dadplug))
