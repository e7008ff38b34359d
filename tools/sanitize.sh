#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Do memcheck, racecheck, initcheck and synccheck find anything in the small case of every row?
#
#   tools/sanitize.sh [quick|full] [TOOL…]
#
# One process per tool (racecheck: one per architecture) runs tools/driver.py, which imports no torch. quick: the
# bf16 rows of head dim 128. Status 0: clean, 2: no GPU, 77: not run, with the reason, else findings. What racecheck
# reports goes through tools/racecheck.py, for it does not follow every barrier.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
mode=${1:-full}
shift $(($# > 0 ? 1 : 0))
tools=("$@")
[ ${#tools[@]} != 0 ] || tools=(memcheck synccheck initcheck racecheck)
python=${PYTHON:-python3}
"$python" tools/machine.py require sanitize.sh || exit 2
out=${FA_CHECK_OUT:-build/gpu_check}
mkdir -p "$out"
findings=$out/sanitize_findings.txt # whole output of every process that reported something
: >"$findings"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

not_run() {
  echo "not run: $1"
  exit 77
}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
[ -n "$sanitizer" ] || not_run "compute-sanitizer is not installed (it comes with the CUDA toolkit)."
"$python" -c 'import cuda.bindings' 2>/dev/null || not_run "the Python package cuda-bindings is missing."
first=$(PYTHONPATH="tools${PYTHONPATH:+:$PYTHONPATH}" "$python" -c 'import libfa
rows = libfa.Library().rows()
print(rows[0].id if rows else "")') || exit 1
[ -n "$first" ] || not_run "the library holds no kernel row."

# A sandbox kernel (it calls itself 4.4.0) lets no debugger at the device: try before blaming a row.
# There was a GPU without it, so a driver that finds none under it says the same.
probe=$(timeout 90 "$sanitizer" --tool memcheck "$python" tools/driver.py --rows "$first" 2>&1)
if grep -qE 'Device not supported|LibraryNotLoaded|Unable to (find|attach)|error 999|cudaErrorUnknown|needs a CUDA GPU' <<<"$probe"; then
  not_run "compute-sanitizer cannot attach to the GPU on this machine (kernel $(uname -r)): $(
    grep -m 1 -E 'Device not supported|LibraryNotLoaded|Unable to|999|Unknown|needs a CUDA GPU' <<<"$probe")"
fi

globs=('sm80_*' 'sm90_*')
[ "$mode" = quick ] && globs=('sm80_*bf16_d128*' 'sm90_*bf16_d128*')
status=0
problems=0
for tool in "${tools[@]}"; do
  for glob in "${globs[@]}"; do
    options=(--tool "$tool" --error-exitcode 9)
    [ "$tool" = memcheck ] && options+=(--leak-check no)
    [ "$tool" = racecheck ] && options+=(--racecheck-report analysis --print-limit 100000)
    start=$SECONDS
    timeout --kill-after=10 180 "$sanitizer" "${options[@]}" "$python" tools/driver.py --rows "$glob" >"$log" 2>&1
    result=$?
    word="clean"
    judged=
    if [ "$tool:$result" = racecheck:9 ] && grep -q 'rows, 0 failures' "$log"; then # the answers were right
      judged=$("$python" tools/racecheck.py "$log" 2>&1) && result=0
      word="clean but for $(tail -n 1 <<<"$judged")"
    fi
    [ "$result" = 2 ] && grep -q 'holds no row that matches' "$log" && result=none
    case $result in
      0) ;;
      none) word="no such row in this build" ;;
      124 | 137) word="FAILED: stopped after 180 s" ;;
      *) word="FAILED (status $result)" ;;
    esac
    ran=$(grep -c ': ok ' "$log")
    problems=$((problems + ran))
    if [ "$result" = 0 ] && [ "$ran" = 0 ]; then
      word="FAILED: nothing ran"
      result=1
    fi
    printf '%-10s %-22s %4d s  %3d problems  %s\n' "$tool" "$glob" $((SECONDS - start)) "$ran" "$word"
    if [ -n "$judged" ] || { [ "$result" != 0 ] && [ "$result" != none ]; }; then
      { echo "### $tool $glob" && cat "$log"; } >>"$findings"
    fi
    if [ "$result" != 0 ] && [ "$result" != none ]; then
      status=1
      head -n 25 <<<"${judged:-$(grep -E '=========|failure:|WRONG|FAILED' "$log" | grep . || tail -n 5 "$log")}"
    fi
  done
done
if [ "$status" = 0 ] && [ "$problems" = 0 ]; then
  echo "FAILED: the build holds no row of ${globs[*]}, so nothing was looked at."
  status=1
fi
exit $status
