import gc
import os
import sys
from pathlib import Path

import forkserver
import pytest
import support
import torch
from crashes import pytest_sessionfinish, pytest_testnodedown  # noqa: F401 (hooks)
from hypothesis import settings

for _name in ("https_proxy", "HTTPS_PROXY"):  # sites of tests would go through the proxy of this machine
    os.environ.pop(_name, None)
os.environ["DADPLUG_TUNING"] = "0"  # the constants of this machine are not those of others

settings.register_profile("dadplug", deadline=None)  # a busy machine may suspend an example
settings.load_profile("dadplug")

torch.set_num_threads(1)  # as the sites have; threads that wait for each other are what a busy machine lacks
gc.set_threshold(10_000, 20, 50)  # by default, a tenth of the time goes into looking for garbage

# Files of long tests start first, so that in the end no process waits for another that has just begun one.
LONG = (
    "test_loops.py",
    "test_notebooks.py",
    "test_elastic.py",
    "test_docs.py",
    "test_zoo.py",
    "test_lossy_state.py",
    "test_trainer_loops.py",
    "test_examples.py",
    "test_lightning.py",
    "test_adapm.py",
    "test_hogwild_starts.py",
    "test_reduction.py",
    "test_server.py",
    "test_lost_sites.py",
    "test_models_of_others.py",
    "test_architecture.py",
    "test_merge_memory.py",
    "test_local_sgd.py",
    "test_hierarchy.py",
    "test_parameter_server.py",
    "test_lightning_programs.py",
    "test_sealing.py",
    "test_returning.py",
    "test_link.py",
    "test_tunnel.py",
    "test_hogwild.py",
    "test_failures.py",
    "test_elastic_trainers.py",
    "test_noise.py",
    "test_hogwild_trainers.py",
    "test_edad.py",
    "test_restarts.py",
    "test_distributed_runner.py",
    "test_parameter_server_trainers.py",
    "test_owner.py",
    "test_adapm_bindings.py",
    "test_paths.py",
    "test_site_processes.py",
    "test_experiment.py",
    "test_compare.py",
    "test_kits_in_use.py",
    "test_adapm_trainers.py",
    "test_packaging.py",
    "test_adapm_shards.py",
    "test_goodput.py",
    "test_jit.py",
)


# Tests that `make test-all` adds to `make test`: further cases of what others test, each longer than most.
EXTENSIVE = frozenset(Path(__file__).with_name("extensive.txt").read_text().splitlines())


def starts_others(config):
    """Whether this process has others run the tests."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config):
    if "not extensive" in config.getoption("markexpr", ""):  # the same examples in each run; all tests try others
        settings.register_profile("same", settings.get_profile("dadplug"), derandomize=True, database=None)
        settings.load_profile("same")
    if starts_others(config):
        interpreter = forkserver.share()
        config.option.tx = [f"popen//python={interpreter}"] * len(config.option.tx)
    elif workerinput := getattr(config, "workerinput", None):
        sys.executable = workerinput["executable"]  # for tests that start real interpreters


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["executable"] = sys.executable


def pytest_unconfigure(config):
    if starts_others(config):
        forkserver.stop()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config, items):
    functions = {item.nodeid.partition("[")[0] for item in items}
    files = {name.partition("::")[0] for name in functions}
    gone = [name for name in EXTENSIVE if name.partition("::")[0] in files and name.partition("[")[0] not in functions]
    if gone and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/extensive.txt lists tests that do not exist: {', '.join(sorted(gone))}")
    for item in items:
        if {item.nodeid, item.nodeid.partition("[")[0]} & EXTENSIVE:
            item.add_marker("extensive")
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # thousands of tests and the libraries' modules stay


@pytest.fixture(scope="session", autouse=True)
def _end_sites():
    yield
    support.close_all()


@pytest.fixture(scope="module", autouse=True)
def _pause_sites():
    yield
    support.pause_all()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group():
    """End the process group that tests of a file have left: those of other files would take this process for a site."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    support.forget_accelerators()


@pytest.fixture(autouse=True)
def _same_environment():
    """Take back what a test has left in the environment: a launcher's variables change how later programs start."""
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture
def sites():
    """Groups of processes by size: `sites(2).run(function, *args)`."""
    return support.sites


@pytest.fixture(autouse=True)
def _one_package_of_lightning():
    yield
    assert "lightning.pytorch" not in sys.modules, "this test imports lightning: start a program, and use support.need"


@pytest.fixture(autouse=True)
def _seeded():
    torch.default_generator.manual_seed(0)  # that of all devices takes milliseconds
