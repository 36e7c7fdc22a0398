#!/usr/bin/env bash
# On a machine with a GPU: the demo at scale, a decode step of Llama-7B part by part, the baselines beside the engine, and
# the tests of both on CudaOps.
# Writes the log and the result of each to the folder given (default: here). Exit code: the first failure.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
logs=${1:-tests/gpu}
python=${PYTHON:-python3}
status=0

step() { # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$logs/$name.json" 2>"$logs/$name.log"
    local code=$?
    printf '%s: exit code %d after %d s: %s\n' "$name" "$code" "$((SECONDS - start))" "$(tail -n 1 "$logs/$name.log")"
    [ "$status" -ne 0 ] || status=$code
}

step demo 150 "$python" -m slora_ref demo --device cuda --model llama-7b --adapters 2000 --json
step decode 120 "$python" -m slora_ref bench decode --batch 1,64,128 --mode graph,eager --json
step paper 200 "$python" -m slora_ref paper all --device cuda --json
step tests 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_executor_kept.py tests/test_kernel_engine.py \
    tests/test_baselines.py
mv "$logs/tests.json" "$logs/tests.log"
exit "$status"
