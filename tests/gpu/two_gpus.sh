#!/usr/bin/env bash
# On a machine with two GPUs: tensor parallelism over NCCL against the dense model, then a decode step of a 13B and a 30B
# shape on one GPU and on two, 64 requests over no and over 64 adapters of rank 16. Writes logs and one JSON file for each
# measurement to the folder given (default: here), and prints the bars beside what was found. Exit code: the first failure.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
logs=${1:-tests/gpu}
python=${PYTHON:-python3}
status=0

step() { # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    local code=$?
    printf '%s: exit code %d after %d s: %s\n' "$name" "$code" "$((SECONDS - start))" "$(tail -n 1 "$logs/$name.log" | cut -c 1-200)"
    [ "$status" -ne 0 ] || status=$code
}

step nccl 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_nccl.py
for model in llama-13b llama-30b; do
    for shards in 1 2; do
        name=decode-$model-$shards
        step "$name" 200 "$python" -m slora_ref bench decode --model "$model" --batch 64 --adapters 0,64 --ranks 16 \
            --prompt 128 --output 64 --shards "$shards" --json
        tail -n 1 "$logs/$name.log" >"$logs/$name.json"
    done
done
"$python" - "$logs" <<'PYTHON'
import json, pathlib, sys

folder, bars = pathlib.Path(sys.argv[1]), {"llama-13b": 1.5, "llama-30b": 1.6}
for model, bar in bars.items():
    try:
        one, two = (json.loads((folder / f"decode-{model}-{n}.json").read_text())["rows"][-1] for n in (1, 2))
    except (OSError, ValueError, KeyError) as error:
        print(f"{model}: not measured: {error!r}")
        continue
    share = two["lora_communication_ms"] / two["step_ms"]
    print(f"{model}: {one['step_ms']:.2f} ms on one GPU, {two['step_ms']:.2f} on two: {one['step_ms'] / two['step_ms']:.2f} x "
          f"(bar {bar}); LoRA's messages {share:.1%} of the step (bar 5 %), all {two['communication_ms']:.2f} ms")
PYTHON
exit "$status"
