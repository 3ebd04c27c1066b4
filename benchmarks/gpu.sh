#!/bin/sh
# Everything that only a GPU can show, on a machine with one H200, in under ten minutes, without
# network:
#
#   benchmarks/gpu.sh --target DIR --head DIR [--out DIR] [--python PATH]
#
# Every kernel against its reference on the device; decoding without kernels, with them, and in
# rounds that stay on the device as CUDA graphs: a target with
# its trained head (greedy text checked), and random weights in the sizes of Llama-3.1-8B and
# Qwen3-30B-A3B with forced acceptance, batch 1, 4 and 16, chain and tree, plain decoding and
# transformers' generate; training steps. Writes JSON files, result.json and table.md into --out.
# A part that fails does not stop the others; the exit status is that of the worst.
#
# --dry goes through all of it on the CPU with tiny shapes, in Triton's interpreter: minutes, if the
# target is a tiny one too.
set -u

target=smollm2-135m-instruct head='' out=outputs/gpu python=python dry=''
while [ $# -gt 0 ]; do
  case "$1" in
    --target) target=$2; shift 2 ;;
    --head) head=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    --dry) dry=--dry; shift ;;
    *) echo "gpu.sh: unknown argument $1" >&2; exit 2 ;;
  esac
done
if [ -z "$head" ]; then
  echo "gpu.sh: --head DIR is missing: the trained head of the target" >&2
  exit 2
fi

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
wish=auto
if [ -n "$dry" ]; then
  # In the interpreter kernels run on the CPU, where `auto` would leave them out.
  wish=on
  export TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
fi
mkdir -p "$out"
rm -f "$out"/kernels.json "$out"/decode-*.json "$out"/training.json
worst=0

part() { # part NAME COMMAND...: run it, say how long it took, keep the worst status
  name=$1; shift
  begin=$(date +%s)
  "$@"
  status=$?
  echo "gpu.sh: $name took $(($(date +%s) - begin)) s, status $status"
  [ "$status" -le "$worst" ] || worst=$status
}

[ -n "$dry" ] || nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv
HEADSMITH_KERNELS=$wish part kernels \
  "$python" "$here/gpu_kernels.py" $dry --json "$out/kernels.json"
for shape in trained llama-8b qwen3-30b-a3b; do
  part "decoding, $shape" "$python" "$here/gpu_decode.py" $dry --shape "$shape" \
    --target "$target" --head "$head" --kernels "off,$wish/host,$wish" --json "$out/decode-$shape.json"
done
part training "$python" "$here/gpu_train.py" $dry --target "$target" --kernels "off,$wish" \
  --json "$out/training.json"
part table "$python" "$here/gpu_table.py" $dry "$out"
exit "$worst"
