"""The script for Slurm starts torchrun on every node, as torchrun understands it; Slurm's commands are stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
JOB = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[07-09]"}


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """An srun that prints what it should start, and an scontrol that knows more nodes than a pipe holds."""
    scripts = {
        "srun": 'printf "%s\\n" "$OMP_NUM_THREADS" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"',
        "scontrol": '[[ "$*" == "show hostnames node[07-09]" ]] && seq -f "node%07.0f" 7 20000',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(slurm: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in ("RANKS", "RESTARTS")}
    path = f"{slurm}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run([str(SCRIPT), *args], env={**own, "PATH": path, **env}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("env", "threads", "ranks", "restarts", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "16", "RANKS": "4", "RESTARTS": "2"}, "4", "4", 2, "16"),
        ({"RANKS": "4"}, "1", "4", 0, "1"),
        ({"SLURM_CPUS_PER_TASK": "8"}, "8", "1", 0, "8"),
    ],
)
def test_torchrun_is_started_on_all_nodes_and_meets_on_the_first(
    slurm: Path, env: dict[str, str], threads: str, ranks: str, restarts: int, cpus: str
) -> None:
    done = run(slurm, "train.py", "--name", "two words", **JOB, **env)
    assert done.returncode == 0, done.stderr
    omp, apart, *command = done.stdout.splitlines()
    assert (omp, apart) == (threads, "1")
    at = command.index("torchrun")
    assert command[:at] == ["--nodes", "3", "--ntasks-per-node", "1", "--cpus-per-task", cpus, "--kill-on-bad-exit=1"]
    args = parse_args(command[at + 1 :])
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("3", ranks, restarts)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "node0000007:24567", "1234567")
    assert (args.training_script, args.training_script_args) == ("train.py", ["--name", "two words"])


def test_what_is_missing_is_told(slurm: Path) -> None:
    for args, env, said in [((), JOB, "usage: sbatch"), (("train.py",), {}, "no SLURM_JOB_NODELIST")]:
        done = run(slurm, *args, **env)
        assert done.returncode == 2
        assert said in done.stderr
    done = run(slurm, "train.py", **{**JOB, "SLURM_JOB_NODELIST": "another"})  # of which scontrol knows nothing
    assert done.returncode == 1
    assert done.stdout == ""
