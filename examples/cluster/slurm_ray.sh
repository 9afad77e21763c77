#!/bin/bash
# Ray on SLURM: the first machine of the job is the head, the others join it, and one command trains the study on all of them.
#
#     sbatch --nodes=8 examples/cluster/slurm_ray.sh
#
# A job that ran out of time is submitted again: recorded runs are not trained again, stopped ones go on.
#SBATCH --job-name=selfless-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --signal=B:INT@120
#SBATCH --output=selfless-ray-%j.log
set -euo pipefail

STUDY=${STUDY:-all}
SEEDS=${SEEDS:-5}
OUT=${OUT:-$PWD/study}     # a folder that all machines see
PORT=${PORT:-6379}

# Only processes that know this token may talk to the cluster.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
common=(--num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)

srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" ray start --head --node-ip-address="$address" --port="$PORT" "${common[@]}" &
until ray health-check --address "$address:$PORT" 2> /dev/null; do sleep 2; done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" ray start --address "$address:$PORT" "${common[@]}" &
done

# This script runs on the first machine. SLURM sends it SIGINT two minutes before the end; the study then stops and saves.
selfless reproduce "$STUDY" --seeds "$SEEDS" --out "$OUT" --engine ray --address "$address:$PORT" &
study=$!
trap 'kill -INT "$study"' INT
status=0
wait "$study" || status=$?
if kill -0 "$study" 2> /dev/null; then wait "$study" || status=$?; fi
exit "$status"
