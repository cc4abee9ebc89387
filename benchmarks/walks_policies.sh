#!/bin/bash
# Trains the walks under three policies and two seeds for as many minutes each, and scores what they draw:
#   benchmarks/walks_policies.sh data/walks 2 144
# FOLDER is that of walks.sh, whose data and reader are taken. CLIPS are drawn of each; 0 scores none.
# SEEDS in the environment are "0 1" if not said otherwise. With NOISE_SCALE there, a fourth policy
# plans for the least time to a loss; it wants --objective.weighting sample.
# Further arguments go to train.py.
set -euo pipefail
usage="usage: benchmarks/walks_policies.sh FOLDER MINUTES CLIPS [flags of train.py]"
data=${1:?$usage} minutes=${2:?$usage} clips=${3:?$usage}
shift 3
if ! gpus=$(nvidia-smi -L 2> /dev/null | wc -l) || test "$gpus" = 0; then
    echo "error: nvidia-smi finds no GPU; run this on a machine that has one" >&2
    exit 2
fi
python=${PYTHON:-python}
mkdir -p "$data/policies"
policies=(equal_tokens:independent sorted:independent balanced:synchronous)
policies+=(${NOISE_SCALE:+balanced:synchronous:$NOISE_SCALE})
runs=() drawn=() parts=()
for seed in ${SEEDS:-0 1}; do
    for each in "${policies[@]}"; do
        IFS=: read -r policy mode noise <<< "$each"
        name=$policy${noise:+_noise}_$seed
        run=$data/policies/$name
        runs+=("$run") drawn+=("$data/policies/drawn_$name")
        $python train.py --config configs/walks.yaml --data.folder "$data/store" --run.folder "$run" \
            --run.seed "$seed" --run.steps 100000 --planning.policy "$policy" \
            --planning.ranks_mode "$mode" --planning.noise_scale "${noise:-null}" \
            --optimizer.schedule constant --optimizer.warmup_steps 100 --optimizer.ema_decay 0.99 --validation.every 100 \
            --callbacks "[{name: time_limit, minutes: $minutes}]" --sampling.prompts '[]' "$@"
    done
done
if test "$clips" = 0; then
    $python benchmarks/walks.py trained --runs "${runs[@]}" --score "$data/policies.json"
    exit
fi
for number in "${!runs[@]}"; do
    $python benchmarks/walks.py list --out "${drawn[$number]}" --clips "$clips"
    CUDA_VISIBLE_DEVICES=$((number % gpus)) XLA_PYTHON_CLIENT_MEM_FRACTION=0.15 \
        $python -m alload_jax.cli sample --checkpoint "${runs[$number]}" \
        --list "${drawn[$number]}/list.jsonl" --steps 30 --guidance 2.5 --batch 8 &
    parts+=($!)
done
for part in "${parts[@]}"; do wait "$part"; done
$python benchmarks/walks.py score --reader "$data/reader.safetensors" --real "$data/held_out" \
    --drawn "${drawn[@]}" --workers "$(nproc)" --out "$data/policies.json"
$python benchmarks/walks.py trained --runs "${runs[@]}" --score "$data/policies.json"
