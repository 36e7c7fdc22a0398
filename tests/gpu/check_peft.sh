#!/usr/bin/env bash
# On a machine with a GPU, torch, transformers and peft: a decode step of Llama-7B and a burst of requests over 200 and
# 2,000 adapters, by PEFT and by the engine in the same run. Writes the log and the result of each to the folder given
# (default: here); they have all rows of DECODE-H200.json and SERVE-H200.json in slora_ref/bench/results, and PEFT's.
# About seven minutes. Exit code: the first failure.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
logs=${1:-tests/gpu}
python=${PYTHON:-python3}
status=0

bench() { # name, seconds, options...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$python" -m slora_ref bench "$name" --json "$@" >"$logs/$name.json" 2>"$logs/$name.log"
    local code=$?
    printf '%s: exit code %d after %d s: %s\n' "$name" "$code" "$((SECONDS - start))" "$(tail -n 1 "$logs/$name.log")"
    [ "$status" -ne 0 ] || status=$code
}

bench decode 300 --batch 1,64,128 --mode graph,eager --peft
bench serve 300 --device cuda --model llama-7b --requests 1000 --host-gb 16 --max-running 512 --max-batched-tokens 4096 \
    --join-every 4 --registered 200 200 2000 --peft 40
exit "$status"
