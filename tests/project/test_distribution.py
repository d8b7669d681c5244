"""What a wheel and an sdist hold, and how a version is written."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys, setuptools.build_meta as b; folder = sys.argv[1]; b.build_sdist(folder); b.build_wheel(folder)"


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """Folder of an sdist and a wheel, built from a copy of the repository."""
    source, target = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "logs", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    done = subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_a_wheel_holds_every_module_and_nothing_else(packages):
    (wheel,) = packages.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT)) for path in (ROOT / "dadplug").rglob("*.py*") if path.suffix in (".py", ".pyi")
    }
    for folder in ("hooks", "runners", "callbacks", "examples/zoo"):
        expected |= {f"dadplug/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    pages = {"dadplug/py.typed", "dadplug/runners/serving/status.html"}
    assert names == expected | pages


def test_an_sdist_holds_what_make_needs(packages):
    (sdist,) = packages.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    missing = set(listed.stdout.splitlines()) - names
    assert {name for name in missing if (ROOT / name).exists()} == set()


@pytest.fixture
def release(tmp_path):
    """The program of releases, on copies of the files that it changes."""
    for name in ("dadplug/__init__.py", "CHANGELOG.md", "CITATION.cff", ".ci/release.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("release", tmp_path / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_writes_its_version_everywhere(release):
    with pytest.raises(SystemExit, match=r"not of version 9\.8\.7: __init__\.py, CHANGELOG\.md, CITATION\.cff"):
        release.check("9.8.7")
    release.prepare("9.8.7", "2030-01-02")
    release.check("9.8.7")
    headings = re.findall(r"^## .*$", release.CHANGELOG.read_text(), re.M)
    assert headings[:2] == ["## [Unreleased]", "## [9.8.7] - 2030-01-02"]
    assert "date-released: 2030-01-02" in release.CITATION.read_text()
