"""The place of a process as SLURM announces it."""

from __future__ import annotations

import pytest

from dadplug.exchange import rendezvous


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-04,07],gpu3", "node01"),
        ("a,b", "a"),
        ("rack[2-3]-n[10,12]", "rack2-n10"),
        ("gpu[9].example.org", "gpu9.example.org"),
    ],
)
def test_the_first_node_of_a_step_of_slurm_hosts_the_rendezvous(nodes, first):
    step = {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"}
    found = rendezvous.launch_environment(step | {"SLURM_STEP_NODELIST": nodes})
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("4", "5", first)
    assert found["MASTER_PORT"] == "20696"
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "8998"}
    assert rendezvous.launch_environment(step | chosen).items() >= chosen.items()


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # a batch script without srun
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "RANK": "1"},  # torchrun in a step
        {},
    ],
)
def test_only_a_step_of_several_tasks_has_its_sites_from_slurm(environment):
    assert rendezvous.launch_environment(environment) == environment
