"""The files for SLURM and Kubernetes, run on loopback with the variables that these set."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import forkserver
import pytest
import support

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]

# As srun starts the tasks of a step, on this machine.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost "$@" &
  pids="$pids $!"
done
for pid in $pids; do wait $pid || exit 1; done
"""


@pytest.fixture
def commands(tmp_path) -> Path:
    """A folder with the commands that the files call: this interpreter, and a stand-in for srun."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/bash\nexec "{forkserver.interpreter()}" "$@"\n')
    (tmp_path / "srun").write_text(SRUN)
    for file in (interpreter, tmp_path / "srun"):
        file.chmod(0o755)
    return tmp_path


def environment(commands: Path, **variables: str) -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    return left | support.ONE_THREAD | {"PATH": f"{commands}:{os.environ['PATH']}"} | variables


def accuracies(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"accuracy (0\.\d+)", output)]


def test_the_batch_script_trains_one_model_by_all_tasks(commands):
    script = ROOT / "examples" / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert re.findall(r"^#SBATCH --(nodes|ntasks-per-node)=(\d)", script.read_text(), re.M) == [
        ("nodes", "2"),
        ("ntasks-per-node", "1"),
    ]
    variables = environment(commands, SLURM_JOB_ID=str(os.getpid()), SLURM_CPUS_PER_TASK="1")
    found = subprocess.run(["bash", str(script)], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    (accuracy,) = accuracies(found.stdout)  # the first site prints it; sites that train alone would print two
    assert accuracy > 0.9


def test_the_manifest_trains_one_model_by_all_pods(commands):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "examples" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    containers = [replicas[kind]["template"]["spec"]["containers"] for kind in ("Master", "Worker")]
    assert containers[0] == containers[1]
    (container,) = containers[0]
    assert container["name"] == "pytorch"  # the only one that the operator gives its variables and port to
    assert container["ports"][0]["name"] == "pytorchjob-port"
    assert container["workingDir"] == "/dadplug"
    pods = sum(each["replicas"] for each in replicas.values())
    own = {each["name"]: "1" for each in container["env"]}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(support.free_port()), "WORLD_SIZE": str(pods)} | own
    programs = [
        subprocess.Popen(
            container["command"],
            cwd=ROOT,
            env=environment(commands, RANK=str(rank), **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(pods)
    ]
    found = [program.communicate(timeout=240) for program in programs]
    assert [program.returncode for program in programs] == [0] * pods, found
    (accuracy,) = accuracies("".join(output for output, _ in found))
    assert accuracy > 0.9
