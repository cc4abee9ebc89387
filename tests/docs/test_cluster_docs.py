"""The examples of docs/many-gpus.md say what JAX expects."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def objects():
    found = yaml.safe_load_all((DOCS / "clusters" / "jobset.yaml").read_text())
    return {part["kind"]: part for part in found}


def test_the_page_refers_to_files_that_exist():
    links = re.findall(r"\]\((clusters/[^)]+)\)", (DOCS / "many-gpus.md").read_text())
    assert {"clusters/slurm.sh", "clusters/jobset.yaml"} <= set(links)
    assert all((DOCS / link).exists() for link in links)


def test_the_slurm_script_is_bash_and_starts_a_task_per_gpu():
    path = DOCS / "clusters" / "slurm.sh"
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    command = re.search(r"^srun .*train\.py --config", text.replace("\\\n", ""), re.MULTILINE)
    assert "--kill-on-bad-exit=0" in command[0]
    assert "--cpus-per-task" in command[0]
    assert "--open-mode" in text  # a job that comes back does not erase its log
    config = re.search(r"CONFIG:-([^}]+)}", text)
    assert (DOCS.parent / config[1]).exists()


def test_the_jobset_counts_hosts_as_jax_reads_them(objects):
    jobset = objects["JobSet"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    (workers,) = jobset["spec"]["replicatedJobs"]
    assert workers["replicas"] == 1
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed"  # JOB_COMPLETION_INDEX is JAX's process
    assert job["parallelism"] == job["completions"]  # JAX takes parallelism for processes
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["ports"] == [{"containerPort": 55527}]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_jobset_s_role_permits_the_queries_of_jax(objects):
    account = objects["ServiceAccount"]["metadata"]["name"]
    pod = objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account
    assert objects["RoleBinding"]["subjects"][0]["name"] == account
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    allowed = {
        (kind, verb)
        for rule in objects["Role"]["rules"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("pods", "list"), ("jobs", "get")} <= allowed


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (0, False), (1, False)])
def test_the_slurm_script_requeues_a_stopped_run(tmp_path, status, requeued):
    for name, body in (
        ("srun", f"exit {status}"),
        ("scontrol", f'echo "$@" > {tmp_path}/scontrol_arguments'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(["bash", DOCS / "clusters" / "slurm.sh"], env=slurm, check=False)
    assert done.returncode == status
    arguments = tmp_path / "scontrol_arguments"
    assert (arguments.read_text() if arguments.exists() else "") == (
        "requeue 7\n" if requeued else ""
    )
