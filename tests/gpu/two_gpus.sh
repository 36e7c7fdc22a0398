#!/usr/bin/env bash
# On a machine with two GPUs: NCCL and tensor parallelism against NumPy and the dense model, then a decode step of a 13B
# and a 30B shape on one GPU, on two, and on two with LoRA's messages beside the base model's products; 64 requests over
# no and over 64 adapters of rank 16. Writes logs and one JSON file for each measurement to the folder given (default:
# here), and prints the bars beside what was found. About five minutes. Exit code: the first failure.
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

decode() { # name, model, further options...
    local name=decode-$1 model=$2
    shift 2
    step "$name" 100 "$python" -m slora_ref bench decode --model "$model" --batch 64 --adapters 0,64 --ranks 16 \
        --prompt 128 --output 128 --json "$@"
    tail -n 1 "$logs/$name.log" >"$logs/$name.json"
}

# A test that hangs is stopped by itself, with the place where it hangs in the log; the others still run.
for test in nccl_of_one graph a_shard_alone two_gpus_serve a_process_that_dies; do
    step "nccl-$test" 90 "$python" -X faulthandler -m pytest -q -m gpu -p no:cacheprovider -o faulthandler_timeout=60 \
        --tb=short tests/test_nccl.py -k "$test"
done
for model in llama-13b llama-30b; do
    decode "$model-1" "$model"
    decode "$model-2" "$model" --shards 2
    decode "$model-2-overlap" "$model" --shards 2 --overlap-lora
done
"$python" - "$logs" <<'PYTHON'
import json, pathlib, sys

folder, bars = pathlib.Path(sys.argv[1]), {"llama-13b": 1.5, "llama-30b": 1.6}
for model, bar in bars.items():
    try:
        one, two, beside = (
            json.loads((folder / f"decode-{model}-{name}.json").read_text())["rows"] for name in ("1", "2", "2-overlap")
        )
    except (OSError, ValueError, KeyError) as error:
        print(f"{model}: not measured: {error!r}")
        continue
    for name, rows in (("one after the other", two), ("beside products", beside)):
        base, full = rows[0], rows[-1]
        print(f"{model}, messages {name}: {one[-1]['step_ms']:.2f} ms on one GPU, {full['step_ms']:.2f} on two: "
              f"{one[-1]['step_ms'] / full['step_ms']:.2f} x (bar {bar})")
        whole, silent = full["kernels_ms"], full["kernels_without_lora_communication_ms"]
        print(f"  kernels: all {whole:.2f} ms, without LoRA's messages {silent:.2f} ms, base model alone "
              f"{base['kernels_ms']:.2f} ms; the messages are {(whole - silent) / full['step_ms']:.1%} of the step (bar 5 %)")
PYTHON
exit "$status"
