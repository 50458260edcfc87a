#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: check every kernel on it, then time the patterns whose times the paper's authors published.
#   bash benchmarks/on_gpu.sh RESULTS_FOLDER        (BATCH=25088 unless set)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bash benchmarks/on_gpu.sh FOLDER}
results=$(mkdir -p "$folder" && cd "$folder" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[ -x .venv/bin/python ] && own=.venv/bin/python || own=python3
python=${PYTHON:-$own}
batch=${BATCH:-25088}

$python -m ksgen doctor | tee "$results/doctor.txt"
$python -m tests.gpu_check "$results" | tee "$results/tests.txt"
$python -m ksgen demo --batch "$batch" --json >"$results/vit.json"
for pattern in 1,48,48,16 1,192,48,2 2,48,192,1 6,64,64,1 1,768,192,2 1,64,64,64 1,128,128,16 1,256,256,4 1,1024,1024,4 16,64,64,4 96,48,48,4 8,192,192,16; do
    for job in "float32 bsl" "float32 bsf" "float16 bsl" "float16 bsf" "tf32x3 bsl" "tf32x3 bsf"; do
        read -r precision layout <<<"$job"
        $python -m ksgen run --pattern "$pattern" --batch "$batch" --precision "$precision" --layout "$layout" --json >"$results/run.json" ||
            { echo "$pattern $job FAILED" | tee -a "$results/failed.txt" && continue; }
        $python -c '
import json, sys
run = json.load(open(sys.argv[1]))
print(json.dumps(run), file=open(sys.argv[2], "a"))
print("{kernel:40} {median_us:9.1f} us  {share_of_floor:4.0%} of the floor  error {error:.1e}".format(**run))
' "$results/run.json" "$results/runs.jsonl"
    done
done
rm -f "$results/run.json"
