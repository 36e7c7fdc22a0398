#!/usr/bin/env bash
# On a machine with two GPUs: NCCL and tensor parallelism, whose small arrays go by kernels, against NumPy and the dense
# model, then a decode step of a 13B and a 30B shape on one GPU and on two, the 13B one also with LoRA's messages beside
# the base model's products; 64 requests over no and over 64 adapters of rank 16. What needs one GPU runs on both at a
# time. Writes logs and one JSON file for each measurement to the folder given (default: here), and prints the bars
# beside what was found. About three minutes. Exit code: the first failure.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
logs=${1:-tests/gpu}
python=${PYTHON:-python3}

step() { # name, seconds, command...; a failure is left in a file, since lanes run beside each other
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    local code=$?
    printf '%s: exit code %d after %d s: %s\n' "$name" "$code" "$((SECONDS - start))" "$(tail -n 1 "$logs/$name.log" | cut -c 1-120)"
    [ "$code" -eq 0 ] || echo "$code" >>"$logs/failures"
}

# A test that hangs is stopped by itself, with the place where it hangs in the log; the other lanes still run.
tests() { # name, which of them
    step "nccl-$1" 90 "$python" -X faulthandler -m pytest -q -m gpu -p no:cacheprovider -o faulthandler_timeout=60 \
        --tb=short tests/test_nccl.py -k "$2"
}

decode() { # name, model, further options...
    local name=decode-$1 model=$2
    shift 2
    step "$name" 60 "$python" -m slora_ref bench decode --model "$model" --batch 64 --adapters 0,64 --ranks 16 \
        --prompt 128 --output 128 --json "$@"
    tail -n 1 "$logs/$name.log" >"$logs/$name.json"
}

rm -f "$logs/failures"
(
    export CUDA_VISIBLE_DEVICES=0
    decode llama-13b-1 llama-13b
    tests one "not (a_shard_alone_computes or two_gpus or a_process)"
) &
(
    export CUDA_VISIBLE_DEVICES=1
    decode llama-30b-1 llama-30b
    tests alone a_shard_alone_computes
) &
wait
tests two "two_gpus or a_process"
decode llama-13b-2 llama-13b --shards 2
decode llama-13b-2-overlap llama-13b --shards 2 --overlap-lora
decode llama-30b-2 llama-30b --shards 2
"$python" - "$logs" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
CASES = [("llama-13b", "2", 1.5), ("llama-13b", "2-overlap", 1.5), ("llama-30b", "2", 1.6)]
print(f"{'':21} {'one GPU':>8} {'two':>6} {'ratio':>6} {'bar':>4}   kernels: all, without LoRA's messages, base only"
      "   LoRA's messages (bar 5 %)")
for model, name, bar in CASES:
    try:
        one, two = (json.loads((folder / f"decode-{model}-{each}.json").read_text())["rows"] for each in ("1", name))
    except (OSError, ValueError, KeyError) as error:
        print(f"{model}-{name}: not measured: {error!r}")
        continue
    alone, full = one[-1]["step_ms"], two[-1]
    whole, silent = full["kernels_ms"], full["kernels_without_lora_communication_ms"]
    print(f"{f'{model}-{name}':21} {alone:8.2f} {full['step_ms']:6.2f} {alone / full['step_ms']:6.2f} {bar:4} {whole:15.2f} "
          f"{silent:26.2f} {two[0]['kernels_ms']:10.2f} {(whole - silent) / full['step_ms']:18.1%}")
PYTHON
code=0
[ -f "$logs/failures" ] && code=$(head -n 1 "$logs/failures")
rm -f "$logs/failures"
exit "$code"
