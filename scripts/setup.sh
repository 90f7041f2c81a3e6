#!/bin/sh
# Everything a fresh machine needs before `make demo` or `make test`: a virtual environment in .venv
# with the pinned packages of requirements/ and this checkout, editable; and on Linux a Vulkan driver
# for the GPU backends, which Debian can install when run as root. make runs this before each target;
# it does nothing when nothing has changed.
#
# PYTHON names the interpreter; without it the first suitable one of the usual names is taken.
set -eu
cd "$(dirname "$0")/.."

stamp=.venv/o1core-setup
here=$(pwd -P)
inputs=$(cat requirements/*.txt pyproject.toml o1core/__init__.py scripts/setup.sh | cksum)

die() {
    echo "setup: $1" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Debian has the venv module without the pip it needs; that is a package of its own.
has_venv() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

which_python() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null
}

can_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1
}

install() {
    apt-get -qq update &&
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "$1" >/dev/null
}

# Without a GPU's own driver, Mesa's runs the kernels on the CPU. Other systems bring theirs along.
need_vulkan() {
    [ "$(uname -s)" = Linux ] || return 0
    for folder in /usr/share/vulkan/icd.d /etc/vulkan/icd.d /usr/local/share/vulkan/icd.d; do
        for driver in "$folder"/*.json; do
            [ ! -e "$driver" ] || return 0
        done
    done
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0
    if can_install; then
        echo "setup: installing Debian's mesa-vulkan-drivers for the GPU backends"
        install mesa-vulkan-drivers && return
    fi
    echo "setup: no Vulkan driver is installed, so the GPU backends may find no adapter and their tests \
be skipped. On Debian or Ubuntu: apt-get install mesa-vulkan-drivers" >&2
}

need_venv() {
    if can_install; then
        echo "setup: installing Debian's python3-venv"
        install python3-venv
        has_venv "$1" && return
    fi
    die "$1 cannot make virtual environments: its venv or ensurepip module is missing. \
On Debian or Ubuntu: apt-get install python3-venv"
}

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c '' || die "PYTHON must be an interpreter that runs, got '$PYTHON'"
        new_enough "$PYTHON" ||
            die "PYTHON must be Python 3.11 or newer, got '$PYTHON': $("$PYTHON" -V 2>&1)"
        has_venv "$PYTHON" || need_venv "$PYTHON"
        python=$PYTHON
        return
    fi
    without_venv=
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        new_enough "$python" || continue
        has_venv "$python" && return
        without_venv=${without_venv:-$python}
    done
    if [ -n "$without_venv" ]; then
        need_venv "$without_venv"
        python=$without_venv
        return
    fi
    found=$(python3 -V 2>/dev/null || echo "not found")
    die "o1core needs Python 3.11 or newer, and neither python3 ($found) nor python3.11 to \
python3.14 is one: install it, or name it with PYTHON=/path/to/python3"
}

# A copied or moved .venv would run the checkout it came from.
reusable() {
    [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$here" ] || return 1
    new_enough .venv/bin/python || return 1
    [ -z "${PYTHON:-}" ] || [ "$(which_python "$PYTHON")" = "$(which_python .venv/bin/python)" ]
}

need_vulkan

if reusable; then
    [ "$(tail -n 1 "$stamp")" != "$inputs" ] || exit 0
else
    choose_python
    # Should it be that of an active .venv, the one below it: .venv is about to go.
    python=$("$python" -c 'import sys; print(sys._base_executable)')
    echo "setup: making .venv with $("$python" -V 2>&1)"
    rm -rf .venv
    "$python" -m venv .venv
fi

rm -f "$stamp"
echo "setup: installing the packages of requirements/ and this checkout into .venv"
pip() {
    .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"
}
pip install -r requirements/dev.txt
# Built with the pinned hatchling, and without dependencies: one that is not pinned fails the check.
pip install --no-build-isolation --no-deps -e .
pip check
printf '%s\n%s\n' "$here" "$inputs" >"$stamp"
