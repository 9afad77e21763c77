#!/bin/bash
# SLURM without Ray: each task of an array trains one part of a study, then one job joins the parts and writes the records.
#
#     parts=$(sbatch --parsable examples/cluster/slurm_parts.sh)
#     sbatch --dependency=afterok:$parts --array=1-1 --export=ALL,MERGE=1 examples/cluster/slurm_parts.sh
#
# A task that was killed is submitted again (sbatch --array=3 …): it goes on from its last saved epoch.
#SBATCH --job-name=selfless
#SBATCH --array=1-8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=4
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@60
#SBATCH --output=selfless-%A-%a.log
set -euo pipefail

STUDY=${STUDY:-all}        # an experiment of `selfless reproduce --list`
SEEDS=${SEEDS:-5}
OUT=${OUT:-$PWD/study}     # a folder that all machines see
PARTS=${PARTS:-8}          # the size of --array

if [[ -n "${MERGE:-}" ]]; then
    selfless results merge "$OUT"/part-* --out "$OUT/all"
    exec selfless reproduce "$STUDY" --seeds "$SEEDS" --out "$OUT/all"
fi
exec selfless reproduce "$STUDY" --seeds "$SEEDS" --part "$SLURM_ARRAY_TASK_ID/$PARTS" --out "$OUT/part-$SLURM_ARRAY_TASK_ID"
