#!/usr/bin/env bash
# A training script on all nodes of a Slurm job, started by torchrun:
#
#   sbatch examples/slurm.sh examples/ddp_digits.py
#   RANKS=8 RESTARTS=3 sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh examples/elastic.py /shared/run
#
# RANKS: of a node [1]. RESTARTS: how often all ranks are started again when one dies [0]; for scripts that go on from
# a checkpoint. Encrypted, by init_process_group("zmq")? Every node needs its pair of keys first: docs/security.md.
#SBATCH --job-name=commlib
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch [options of Slurm] $0 SCRIPT.py [its arguments]" >&2
    exit 2
fi
if [[ -z ${SLURM_JOB_NODELIST:-} ]]; then
    echo "$0: no SLURM_JOB_NODELIST: submit it by sbatch, or run it inside of salloc" >&2
    exit 2
fi

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # not through head, which may end before scontrol has said all
first=${hosts%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node meet at different ones
ranks=${RANKS:-1}
cpus=${SLURM_CPUS_PER_TASK:-1}
threads=$((cpus / ranks))

export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a store of its own for each attempt: see examples/elastic.py

# srun does not take over --cpus-per-task from sbatch.
exec srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --cpus-per-task "$cpus" --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" "$@"
