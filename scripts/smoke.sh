#!/usr/bin/env bash
# Install the built wheel into a second environment, outside the checkout, and run scripts/smoke.py there; then see that
# mypy reads its types. As with a user, pip takes the newest release of everything; only torch is that of constraints.txt,
# of which the newest may be gigabytes of CUDA.
# Usage: scripts/smoke.sh PYTHON
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
[[ $python == /* ]] || python=$PWD/$python

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
grep '^torch==' "$root/constraints.txt" > "$work/torch.txt"
wheel=$(echo "$root"/dist/blockformer-*.whl)
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel[demo]" -c "$work/torch.txt"
"$work/venv/bin/python" -m pip list --disable-pip-version-check | grep -iE '^(torch|transformers|tokenizers|safetensors|accelerate|huggingface_hub) '
cp "$root/scripts/smoke.py" "$root/scripts/typed_user.py" "$work/"
mkdir "$work/empty"
cd "$work/empty"
HF_HOME="$work/hf" "$work/venv/bin/python" -I "$work/smoke.py"
"$python" -m mypy --cache-dir "$work/mypy" --python-executable "$work/venv/bin/python" "$work/typed_user.py"
