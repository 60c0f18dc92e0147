"""Recipes for clusters are what the tools that read them take, and start `fedfr`."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import jsonschema
import kubernetes_validate
import pytest
import yaml

from fedfr_jax.cli.launch import coordinator_address
from fedfr_jax.cli.main import main
from fedfr_jax.config.files import shipped

ROOT = pathlib.Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FILES = sorted(path.name for path in DEPLOY.iterdir() if path.suffix != ".md")
KUBERNETES = "1.31"


def tool(name):
    """A program that is installed beside the Python of the tests."""
    return pathlib.Path(sys.executable).with_name(name)


def check_shell(path):
    """shellcheck; the flags of Slurm are comments to it."""
    if path.suffix == ".sh":
        assert os.access(path, os.X_OK), f"{path} must be executable"
    subprocess.run([tool("shellcheck"), path], check=True)


def check_kubernetes(path):
    """Every object strictly; of a JobSet (its CRD) each job as the Job it becomes."""
    for found in yaml.safe_load_all(path.read_text()):
        if found["kind"] != "JobSet":
            kubernetes_validate.validate(found, KUBERNETES, strict=True)
            continue
        assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert {*found["spec"]} <= {"failurePolicy", "replicatedJobs"}
        for job in found["spec"]["replicatedJobs"]:
            head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
            job = {**head, "spec": job["template"]["spec"]}
            kubernetes_validate.validate(job, KUBERNETES, strict=True)


def check_skypilot(path):
    """The schemas that `sky` itself checks a task by, and its script."""
    schemas = json.loads((ROOT / "tests" / "sky_schema.json").read_text())
    task = yaml.safe_load(path.read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    words = [tool("shellcheck"), "--shell=bash", "-"]
    subprocess.run(words, input=task["run"], text=True, check=True)


def check_python(path):
    """It parses; where Ray is installed, its names are there."""
    tree = ast.parse(path.read_text())
    ray = pytest.importorskip("ray.train.v2.jax", reason="Ray is not installed")
    (names,) = (x for x in tree.body if getattr(x, "module", "") == "ray.train.v2.jax")
    assert all(hasattr(ray, alias.name) for alias in names.names)


CHECKS = {
    ".sh": check_shell,
    ".sbatch": check_shell,
    ".py": check_python,
    "-jobset.yaml": check_kubernetes,
    "skypilot.yaml": check_skypilot,
}


@pytest.mark.parametrize("name", FILES)
def test_the_tool_of_a_recipe_takes_it(name):
    (check,) = (check for end, check in CHECKS.items() if name.endswith(end))
    check(DEPLOY / name)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_starts_a_config_and_flags_that_there_are(name, monkeypatch):
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    assert "smoke" in shipped() and "smoke" in text
    assert f"deploy/{name}" in text  # how it is started
    assert f"({name})" in (DEPLOY / "README.md").read_text()
    from fedfr_jax.cli import flags, launch, train

    found = re.findall(r"--(?:distributed|grace_seconds=\d+)", text)
    parser = flags.build_parser("fedfr train", train.train)
    values = flags.parse(parser, ["--config=smoke", "--workdir=gs://a/b", *{*found}])
    assert values.grace_seconds in (30, 90)
    if "fedfr launch" in text:
        given = re.search(r"fedfr launch (.*?) train", text, re.DOTALL)[1].split()
        seen = []
        monkeypatch.setattr(launch, "start", lambda *_, **more: seen.append(more))
        words = [re.sub(r'"\$.*"', "1" if "num" in x else "0", x) for x in given]
        assert main(["launch", *words, "train"]) == 0
        assert seen[-1]["coordinator"] == coordinator_address("0")


def test_the_image_is_built_from_the_lock_and_runs_as_a_user():
    path = ROOT / "Dockerfile"
    rules = ["--failure-threshold=warning", str(path)]
    subprocess.run([tool("hadolint"), *rules], check=True)
    text = path.read_text()
    assert "--constraint /lock/requirements.txt" in text
    assert text.index("USER 1000") < text.index("ENTRYPOINT")
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert not [pin for pin in pins if "[" in pin and pin[0] != "#"]  # pip takes none
    kept = (ROOT / ".dockerignore").read_text().split("\n!")
    assert {"fedfr_jax", "configs", "setup.py", "requirements.txt"} <= {*kept}


def test_a_jobset_counts_no_preemption_and_ends_after_a_mistake():
    """The rules, as the controllers of Job and JobSet read them."""
    for name in ("gke-gpu-jobset.yaml", "gke-tpu-jobset.yaml"):
        *_, jobset = yaml.safe_load_all((DEPLOY / name).read_text())
        (job,) = jobset["spec"]["replicatedJobs"]
        of_job = job["template"]["spec"]["podFailurePolicy"]["rules"]
        of_set = jobset["spec"]["failurePolicy"]["rules"]

        def action(code, condition=None, of_job=of_job, of_set=of_set):
            reason, message = "BackoffLimitExceeded", "Job has reached the limit"
            for i, rule in enumerate(of_job):
                types = [x["type"] for x in rule.get("onPodConditions", ())]
                what = f"has condition {condition}" if condition in types else None
                if code in rule.get("onExitCodes", {}).get("values", ()):
                    what = f"failed with exit code {code}"
                if what:
                    message = f"Pod a/b-0 {what} matching FailJob rule at index {i}"
                    reason = "PodFailurePolicy"
                    break
            for rule in of_set:
                patterns = rule.get("onJobFailureMessagePatterns", [""])
                found = any(re.search(x, message) for x in patterns)
                if reason in rule["onJobFailureReasons"] and found:
                    return rule["action"]
            return "RestartJobSet"  # counted

        uncounted = "RestartJobSetAndIgnoreMaxRestarts"
        assert action(143) == action(137, "DisruptionTarget") == uncounted
        assert action(2, "DisruptionTarget") == uncounted  # it lost its disk, say
        assert action(1) == action(2) == "FailJobSet"
        assert action(75) == action(134) == action(137) == "RestartJobSet"


@pytest.mark.parametrize(
    "code, restarts, is_requeued, ends",
    [(0, 0, False, 0), (2, 0, False, 2), (75, 9, True, 75), (75, 10, False, 75)]
    + [(137, 0, True, 137), (143, 10, True, 143), (1, 0, False, 2)],
)
def test_slurm_starts_again_what_a_restart_may_cure(
    code, restarts, is_requeued, ends, tmp_path
):
    """The script as Slurm runs it, with stand-ins for srun, scontrol and fedfr."""
    # srun ends with the greatest code: of the other task, which is killed.
    srun = 'while [[ $1 == --* ]]; do shift; done; "$@"; a=$?; exit $((a ? CODE : 0))'
    tools = {
        "srun": srun.replace("CODE", "143" if code in (1, 2) else str(code)),
        "scontrol": 'echo "$@" > requeued',
        "fedfr": f'echo "$@" > words; exit {code}',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_RESTART_COUNT": str(restarts),
        "WORKDIR": "runs/a b",
    }
    done = subprocess.run(
        ["bash", DEPLOY / "slurm.sbatch"], cwd=tmp_path, env=environment
    )
    assert done.returncode == ends
    assert (tmp_path / "requeued").exists() == is_requeued
    words = "train --distributed --config=smoke --workdir=runs/a b --grace_seconds=90"
    assert (tmp_path / "words").read_text().strip() == words
