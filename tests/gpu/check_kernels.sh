#!/usr/bin/env bash
# On a machine with a GPU: every kernel against its float64 oracle, the model on CudaOps, then memcheck and racecheck of
# the fixed shapes in float16. Writes the log of each to the folder given (default: here). Exit code: the first failure.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
logs=${1:-tests/gpu}
status=0

step() { # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    local code=$?
    printf '%s: exit code %d after %d s: %s\n' "$name" "$code" "$((SECONDS - start))" "$(tail -n 1 "$logs/$name.log")"
    [ "$status" -ne 0 ] || status=$code
}

python=${PYTHON:-python3}
step kernels 120 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_kernels.py tests/test_kernels_ops.py
for tool in memcheck racecheck; do
    step "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 3 "$python" -m pytest -q -m gpu \
        -p no:cacheprovider tests/test_kernels.py -k "fixed and float16"
done
exit "$status"
