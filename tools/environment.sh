#!/usr/bin/env bash
# Make .venv, or bring it up to date: the best Python found, and the package
# (editable) with the extras it is developed with. Does nothing, quickly, when
# neither pyproject.toml nor the extras have changed.
#
#   PYTHON=/path/to/python   use this interpreter for a new environment
#   EXTRAS=dev,mpi           what to install beside the package
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
extras=${EXTRAS:-dev,mpi}
preferred=$(cat .python-version)
# Then the newest.
versions=("$preferred" 3.14 3.13 3.12 3.11 3.10)
stamp=$venv/.rankscope-stamp
lacking=()

say() { printf '%s\n' "$*" >&2; }

# A pyenv shim exists for versions that are not active too, so every candidate
# is asked for its version. The free-threaded build has not been tested.
is_version() { # interpreter, major.minor
    "$1" -c "import sys, sysconfig as s; sys.exit(
        '%d.%d' % sys.version_info[:2] != '$2' or bool(s.get_config_var('Py_GIL_DISABLED')))" \
        >/dev/null 2>&1
}

can_make_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

candidates() { # major.minor: interpreters that may be it, best first
    local found
    command -v "python$1" || true
    for found in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1"{,.*}/bin/python; do
        [[ -x $found ]] && printf '%s\n' "$found"
    done
    if command -v uv >/dev/null; then
        uv python find --no-python-downloads --no-project "$1" 2>/dev/null || true
    fi
    command -v python3 || true
    command -v python || true
}

find_python() {
    local version python
    if [[ -n ${PYTHON:-} ]]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    for version in "${versions[@]}"; do
        while read -r python; do
            is_version "$python" "$version" || continue
            if can_make_venvs "$python"; then
                printf '%s\n' "$python"
                return
            fi
            lacking+=("$version")
        done < <(candidates "$version")
    done
    if ((${#lacking[@]})); then
        say "Python ${lacking[0]} is here, but it cannot make virtual environments"
        say "(its module ensurepip is missing). On Debian and Ubuntu:"
        say "    sudo apt-get install python${lacking[0]}-venv"
    else
        say "No Python from 3.10 to 3.14 was found on PATH, with pyenv or with uv."
        say "Install one or name it: make PYTHON=/path/to/python"
    fi
    return 1
}

# What the environment depends on: dependencies, extras, and where it lies,
# since an editable install and the scripts in bin/ hold absolute paths.
fingerprint() {
    { cat pyproject.toml; printf '%s\n%s\n' "$extras" "$PWD"; } | cksum
}

if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    say "Making $venv with $("$python" --version 2>&1) ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

wanted=$(fingerprint)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    say "Installing rankscope[$extras] into $venv (a minute or more the first time)"
    "$venv/bin/python" -m tools.install --editable ".[$extras]"
    printf '%s\n' "$wanted" >"$stamp"
fi
