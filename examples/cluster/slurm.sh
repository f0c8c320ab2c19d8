#!/bin/bash
# Run a command on a Ray cluster in a Slurm allocation:
#   sbatch --nodes 4 --gpus-per-node 8 examples/cluster/slurm.sh digenrl fit --config mine.yaml --trainer.num_nodes 4
# Submit it from the folder that the command is to run in; its environment must be active there.
#SBATCH --job-name=digenrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=digenrl-%j.log
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch [OPTIONS] $0 COMMAND [ARGUMENT...]" >&2
    exit 2
fi

port=${RAY_PORT:-6379}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # the host that runs this script
export RAY_ADDRESS="$first:$port"
# A token of this job, without which newer versions of Ray let nobody in; srun hands it to the hosts.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# Apart from other jobs' clusters; short, since Ray puts sockets there.
temp_dir="/tmp/ray-$SLURM_JOB_ID"
gpus=(${SLURM_GPUS_ON_NODE:+--num-gpus "$SLURM_GPUS_ON_NODE"})

srun --nodes 1 --ntasks 1 --nodelist "$first" --overlap \
    ray start --head --block --disable-usage-stats --port "$port" --temp-dir "$temp_dir" "${gpus[@]}" &
head=$!

end() {
    kill $(jobs -p) 2>/dev/null || true
    wait
    srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks "$SLURM_JOB_NUM_NODES" --overlap rm -rf "$temp_dir"
}
trap end EXIT

for _ in $(seq 60); do
    ray status >/dev/null 2>&1 && break
    kill -0 "$head" 2>/dev/null || { echo "the Ray head on $first has ended" >&2; exit 1; }
    sleep 2
done

others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --nodes "$others" --ntasks "$others" --exclude "$first" --overlap \
        ray start --address "$RAY_ADDRESS" --block --disable-usage-stats "${gpus[@]}" &
fi
# A run does not wait for hosts that are late: it says how many there are, and ends.
for _ in $(seq 60); do
    joined=$(ray status 2>/dev/null | grep -c "^ 1 node_" || true)
    [ "$joined" -ge "$SLURM_JOB_NUM_NODES" ] && break
    sleep 2
done

"$@"
