#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Do memcheck, racecheck, initcheck and synccheck find anything in the small case of every row?
#
#   tools/sanitize.sh [quick|full] [TOOL…]
#
# One process per tool and family of rows runs tools/driver.py, which imports no torch; FA_JOBS of them side by side.
# quick: the bf16 rows of head dim 128. Status 0: clean, 2: no GPU, 77: not run, with the reason, else findings. What
# racecheck reports goes through tools/racecheck.py, for it does not follow every barrier.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
mode=${1:-full}
shift $(($# > 0 ? 1 : 0))
tools=("$@")
[ ${#tools[@]} != 0 ] || tools=(racecheck memcheck synccheck initcheck) # the longest first
python=${PYTHON:-python3}
"$python" tools/machine.py require sanitize.sh || exit 2
out=${FA_CHECK_OUT:-build/gpu_check}
mkdir -p "$out"
findings=$out/sanitize_findings.txt # whole output of every process that reported something
: >"$findings"

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

globs=('sm80_*_bf16_*' 'sm80_*_fp16_*' 'sm90_*_bf16_*' 'sm90_*_fp16_*' 'sm90_*_e4m3_*')
[ "$mode" = quick ] && globs=('sm80_*bf16_d128*' 'sm90_*bf16_d128*')

# look TOOL GLOB FOLDER: one process; its output, what racecheck.py makes of it, its word and status into FOLDER.
look() {
  local options=(--tool "$1" --error-exitcode 9) start=$SECONDS result word=clean
  [ "$1" = memcheck ] && options+=(--leak-check no)
  [ "$1" = racecheck ] && options+=(--racecheck-report analysis --print-limit 100000)
  timeout --kill-after=10 180 \
    "$sanitizer" "${options[@]}" "$python" tools/driver.py --rows "$2" >"$3/log" 2>&1
  result=$?
  if [ "$1:$result" = racecheck:9 ] && grep -q 'rows, 0 failures' "$3/log"; then # the answers were right
    "$python" tools/racecheck.py "$3/log" >"$3/judged" 2>&1 && result=0
    word="clean but for $(tail -n 1 "$3/judged")"
  fi
  [ "$result" = 2 ] && grep -q 'holds no row that matches' "$3/log" && result=none
  case $result in
    0) ;;
    none) word="no such row in this build" ;;
    124 | 137) word="FAILED: stopped after $((SECONDS - start)) s" ;;
    *) word="FAILED (status $result)" ;;
  esac
  if [ "$result" = 0 ] && ! grep -q ': ok ' "$3/log"; then
    word="FAILED: nothing ran"
    result=1
  fi
  printf '%s\n' "$result" $((SECONDS - start)) "$word" >"$3/said"
}

jobs=${FA_JOBS:-1}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for tool in "${tools[@]}"; do
  for glob in "${globs[@]}"; do
    while [ "$(jobs -pr | wc -l)" -ge "$jobs" ]; do wait -n; done
    mkdir "$folder/$tool $glob"
    look "$tool" "$glob" "$folder/$tool $glob" &
  done
done
wait
status=0
problems=0
for tool in "${tools[@]}"; do
  for glob in "${globs[@]}"; do
    one="$folder/$tool $glob"
    { read -r result && read -r seconds && read -r word; } <"$one/said"
    ran=$(grep -c ': ok ' "$one/log")
    problems=$((problems + ran))
    printf '%-10s %-22s %4d s  %3d problems  %s\n' "$tool" "$glob" "$seconds" "$ran" "$word"
    if [ -f "$one/judged" ] || [[ $result != 0 && $result != none ]]; then
      { echo "### $tool $glob" && cat "$one/log"; } >>"$findings"
    fi
    if [[ $result != 0 && $result != none ]]; then
      status=1
      if [ -f "$one/judged" ]; then head -n 25 "$one/judged"; else
        { grep -E '=========|failure:|WRONG|FAILED' "$one/log" || tail -n 5 "$one/log"; } | head -n 25
      fi
    fi
  done
done
if [ "$status" = 0 ] && [ "$problems" = 0 ]; then
  echo "FAILED: the build holds no row of ${globs[*]}, so nothing was looked at."
  status=1
fi
exit $status
