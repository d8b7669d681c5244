"""`dadplug.ray` where Ray is not installed; tests/trainers/test_ray.py tests it with Ray."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import dadplug.ray


def test_without_ray_the_error_names_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'dadplug\[ray,lightning\]'"):
        from dadplug.ray import RayDADStrategy  # noqa: F401
    assert not hasattr(dadplug.ray, "RayDDPStrategy")


RAY = """
class DDPStrategy: __module__ = "lightning.pytorch.strategies.ddp"
class RayDDPStrategy(DDPStrategy): pass
"""


def test_a_program_with_another_package_of_lightning_is_refused_each_time(monkeypatch, tmp_path):
    """Ray has imported its own package after the first attempt."""
    (tmp_path / "lightning.py").write_text(RAY)
    for name in ("ray", "ray.train", "ray.train.lightning"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules["ray.train.lightning"]
    sys.modules["ray.train"].__path__ = [str(tmp_path)]
    in_use = ["pytorch_lightning"]
    monkeypatch.setattr(dadplug.ray, "packages_in_use", lambda: [*in_use])
    dadplug.ray._packages_before.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="this program has imported pytorch_lightning"):
                from dadplug.ray import RayDADStrategy  # noqa: F401
            in_use.append("lightning")
    finally:
        dadplug.ray._packages_before.cache_clear()
