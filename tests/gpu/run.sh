#!/usr/bin/env bash
# Run the tests that need a GPU, on a machine that has one and little else.
#
# It wants a Python from 3.10 on with cupy and an NCCL wheel in it (python3, or
# PYTHON=...); nccl4py and what else is missing is installed beside it, into
# .venv-gpu, from wheels in WHEELS=folder if that is given, else with pip.
#
#   tests/gpu/run.sh                  all of it
#   tests/gpu/run.sh -k "not hang"    some of it: arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
venv=.venv-gpu
needed=(nccl4py cuda-bindings pytest pytest-timeout ipyparallel ipykernel ipywidgets
    anywidget nbclient psutil pyzmq hypothesis numpy ml_dtypes mpi4py)
index=()
[[ -n ${WHEELS:-} ]] && index=(--no-index --find-links "$WHEELS")

if ! "$python" -c 'import cupy' 2>/dev/null; then
    echo "$python has no cupy: name one that has (PYTHON=...), or pip install cupy-cuda13x" >&2
    exit 2
fi
if [[ ! -x $venv/bin/python ]]; then
    # With what the other one has: cupy and NCCL are large.
    "$python" -m venv --system-site-packages --without-pip "$venv"
    purelib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    inside=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # A Python that is itself an environment is no "system" to venv.
    echo "$purelib" > "$inside/beside.pth"
fi
missing=()
for package in "${needed[@]}"; do
    "$venv/bin/python" - "$package" <<'PYTHON' 2>/dev/null || missing+=("$package")
import importlib.metadata, sys
importlib.metadata.version(sys.argv[1])
PYTHON
done
"$venv/bin/python" -c 'import setuptools as s; assert int(s.__version__.split(".")[0]) >= 77' \
    2>/dev/null || missing+=("setuptools>=77")
into_venv=("$python" -m pip --python "$venv/bin/python" install --quiet "${index[@]}")
if ((${#missing[@]})); then
    echo "installing ${missing[*]}"
    "${into_venv[@]}" "${missing[@]}" ||
        echo "some are missing: tests that need them will say so" >&2
fi
if ! "$venv/bin/python" -c 'import rankscope.engines' 2>/dev/null; then
    "${into_venv[@]}" --no-deps --no-build-isolation --editable .
fi

"$venv/bin/python" - <<'PYTHON'
import sys, cupy, rankscope
print("rankscope", rankscope.__version__, "cupy", cupy.__version__)
reason = rankscope.unavailable_reason("nccl")
print("NCCL:", reason or "can be used")
sys.exit(3 if reason else 0)
PYTHON
exec "$venv/bin/python" -m pytest -m gpu -p no:cacheprovider --durations=10 \
    tests/gpu tests/notebooks/test_nccl.py "$@"
