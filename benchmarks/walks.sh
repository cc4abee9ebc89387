#!/bin/bash
# The walks from the simulator to the scores, on all GPUs of a machine:
#   benchmarks/walks.sh data/walks 6000
# renders 31,000 samples and 3,000 of another seed, trains configs/walks.yaml for so many steps, draws
# clips of the last step and of half the steps, and scores them. Further arguments go to train.py.
# What exists already is kept.
set -euo pipefail
usage="usage: benchmarks/walks.sh FOLDER STEPS [flags of train.py]"
data=${1:?$usage} steps=${2:?$usage}
shift 2
if ! gpus=$(nvidia-smi -L 2> /dev/null | wc -l) || test "$gpus" = 0; then
    echo "error: nvidia-smi finds no GPU; run this on a machine that has one" >&2
    exit 2
fi
cores=$(nproc) quarter=$(((cores + 3) / 4)) run=$data/run
python=${PYTHON:-python}
mkdir -p "$data/log"

rendered() { # folder, samples, seed
    test -e "$1" && return
    $python benchmarks/simulator.py --out "$1.part" --samples "$2" --seed "$3" --workers "$cores"
    mv "$1.part" "$1"
}

drawn() { # name, flags of `list`, flags of `alload sample`; draws while the script goes on
    rm -rf "${data:?}/$1"
    $python benchmarks/walks.py list --out "$data/$1" $2
    for gpu in $(seq 0 $((gpus - 1))); do
        awk "NR % $gpus == $gpu" "$data/$1/list.jsonl" > "$data/$1/part$gpu.jsonl"
        CUDA_VISIBLE_DEVICES=$gpu XLA_PYTHON_CLIENT_MEM_FRACTION=0.3 \
            $python -m alload_jax.cli sample --checkpoint "$run" $3 \
            --list "$data/$1/part$gpu.jsonl" --steps 30 --guidance 2.5 --batch 8 \
            > "$data/log/$1_$gpu.log" 2>&1 &
        parts+=($!)
    done
}

parts=()
rendered "$data/media" 31000 0
rendered "$data/held_out" 3000 1
reader=
if ! test -e "$data/reader.safetensors"; then
    CUDA_VISIBLE_DEVICES=$((gpus - 1)) XLA_PYTHON_CLIENT_PREALLOCATE=false \
        $python benchmarks/walks.py learn --train "$data/media" --reader "$data/reader.safetensors" \
        --workers "$quarter" > "$data/log/learn.log" 2>&1 &
    reader=$!
fi
test -e "$data/store" || $python -m alload_jax.cli prepare media "$data/media" --out "$data/store" --area 96x128 48x64 \
    --frames 65 --frames-per-latent 4 --text-length 64 --workers "$cores"
$python train.py --config configs/walks.yaml --data.folder "$data/store" --run.folder "$run" \
    --run.steps "$steps" --checkpoint.every $((steps / 2)) --checkpoint.keep_every $((steps / 2)) \
    --data.loader.processes "$quarter" "$@"
drawn drawn "--clips 500" ""
drawn half "--clips 500" "--step $((steps / 2))"
drawn continued "--clips 96 --first-of $data/held_out" ""
for part in "${parts[@]}"; do wait "$part"; done
test -z "$reader" || wait "$reader"
$python benchmarks/walks.py score --reader "$data/reader.safetensors" --real "$data/held_out" \
    --drawn "$data/drawn" "$data/half" "$data/continued" --workers "$cores" --out "$data/score.json"
$python benchmarks/walks.py trained --runs "$run" --score "$data/score.json"
