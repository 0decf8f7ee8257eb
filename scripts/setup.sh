# Sourced by the other scripts: makes and keeps up the environment in .venv. Runs in macOS's bash 3.2.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
python="$venv/bin/python"
locks=("$root/scripts/requirements.lock" "$root/scripts/requirements-test.lock") # serving, and what tests need besides

say() { printf '%s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the first Python that is recent enough. A name may exist and not run: pyenv's shims do.
find_python() {
    local name
    for name in ${VLLM_MLX_PYTHON:+"$VLLM_MLX_PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 \
        /opt/homebrew/bin/python3 /usr/local/bin/python3; do
        if is_recent_python "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    die "No Python 3.11 or newer was found. Install one (on a Mac: brew install python, or brew install uv, which" \
        "brings its own), or name one: VLLM_MLX_PYTHON=/path/to/python3 $0"
}

# What an installation depends on: compared whole, so that a moved checkout is installed again.
recipe() { printf '%s\n' "$root" && cat "$root/pyproject.toml" "${locks[@]}"; }

is_installed() {
    local stamp
    for stamp in "$@"; do
        if [ -f "$venv/installed-$stamp" ] && recipe | cmp -s - "$venv/installed-$stamp"; then
            return 0
        fi
    done
    return 1
}

create_environment() {
    say "Making the environment in $venv"
    rm -rf "$venv"
    if command -v uv >/dev/null 2>&1; then
        uv venv --quiet --python "${VLLM_MLX_PYTHON:->=3.11}" "$venv"
        return
    fi
    local base
    base=$(find_python)
    "$base" -m venv "$venv" && return
    rm -rf "$venv"
    die "$base -m venv failed. On Debian and Ubuntu, install python3-venv; or install uv."
}

has_pip() { "$python" -m pip --version >/dev/null 2>&1; }

pip_install() {
    if command -v uv >/dev/null 2>&1; then
        uv pip install --python "$python" "$@"
    else
        has_pip || "$python" -m ensurepip >/dev/null # uv makes environments without pip
        "$python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

# Prints what does not fit and fails if an installed package lacks a dependency, or has it in a version it refuses.
check_versions() {
    if command -v uv >/dev/null 2>&1; then
        uv pip check --quiet --python "$python" 2>&1
    else
        "$python" -m pip check --disable-pip-version-check 2>&1
    fi
}

# install_locked OPTIONS...: installs the files that the locks in OPTIONS name and no others, then this project, editable.
# A lock is complete, so nothing is resolved: what the index has today decides nothing.
install_locked() {
    pip_install --no-deps --require-hashes "$@"
    pip_install --no-deps --no-build-isolation --editable "$root"
}

# install NAME OPTIONS...: installs by the locks in OPTIONS, and remembers it as NAME.
install() {
    local name=$1 misfits
    shift
    say "Installing into $venv (some minutes the first time)"
    install_locked "$@"
    if ! misfits=$(check_versions); then # A package that an earlier lock named may not fit to these.
        create_environment
        install_locked "$@"
        misfits=$(check_versions) || die "$misfits"
    fi
    recipe >"$venv/installed-$name"
}

# ensure_environment serve|test: the tests' environment also serves.
ensure_environment() {
    is_recent_python "$python" || create_environment
    case "$1" in
    serve) is_installed serve test || install serve -r "${locks[0]}" ;;
    test) is_installed test || install test -r "${locks[0]}" -r "${locks[1]}" ;;
    esac
}

# MLX's wheel for Linux has the reference BLAS. An installed OpenBLAS computes the same products many times faster; it
# gets one thread, because other processes share the cores.
use_openblas() {
    local blas
    blas=$({ PATH="$PATH:/sbin" ldconfig -p 2>/dev/null || true; } | sed -n '/libopenblas\.so\.0 /{s/.*=> //p;q;}')
    if [ -n "$blas" ]; then
        export LD_PRELOAD="$blas${LD_PRELOAD:+:$LD_PRELOAD}" OPENBLAS_NUM_THREADS=1
    fi
}
