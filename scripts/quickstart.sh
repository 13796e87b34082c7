#!/usr/bin/env bash
# Set everything up and fine-tune a small MPT with FSDP2 on 2 CPU ranks, on the docstrings of Python's own library.
# Ends with a table of what each way of training computes in which dtype. Needs Python 3.10 or newer, nothing else.
#
#   bash scripts/quickstart.sh [output folder, default outputs/quickstart]
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-outputs/quickstart}"
source scripts/setup_venv.sh report
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

if [ -e "$out/precision.json" ]; then
    echo "quickstart.sh: $out holds an earlier run: remove it, or name another folder." >&2
    exit 2
fi

train() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node=2 scripts/finetune_mpt.py \
        --use_cpu --bf16 --seed 0 --learning_rate 3e-3 --per_device_train_batch_size 4 --block_size 128 \
        --report_to none --logging_steps 10 "$@"
}

echo "== Fine-tuning with FSDPAutocast under FSDP2"
train --fsdp --fsdp_config scripts/configs/fsdp2.json --preset amp --output_dir "$out" \
    --max_steps 300 --warmup_steps 20 --save_steps 150 --eval_strategy steps --eval_steps 100
echo "== The same first step in other ways: DDP, which FSDP should equal; FSDP2 as it comes; presets amp and exact"
one_step() {
    name="$1"
    shift
    train --max_steps 1 --save_strategy no --sample_tokens 0 --max_rows 1500 --output_dir "$out/$name" "$@" \
        >"$out/$name.log" 2>&1 || { tail -20 "$out/$name.log" >&2; exit 1; }
}
fsdp2=(--fsdp --fsdp_config scripts/configs/fsdp2.json)
one_step ddp --preset stock
one_step stock --preset stock "${fsdp2[@]}"
one_step amp --preset amp "${fsdp2[@]}"
one_step exact --preset exact "${fsdp2[@]}"

"$python" scripts/compare_precision.py "DDP=$out/ddp" "FSDP2 stock=$out/stock" "FSDP2 amp=$out/amp" \
    "FSDP2 exact=$out/exact" --svg "$out/compare.svg"
echo "The model, its checkpoints, loss.png, sample.txt and precision.html are in $out"
