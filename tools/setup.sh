#!/usr/bin/env bash
# Set up this checkout: .venv with the package and one of its extras, and libllama.
#
#   tools/setup.sh server    the packages that the commands of `cllm` need
#   tools/setup.sh dev       the same, and the packages for the tests and the linters
#   tools/setup.sh docs      the same as `server`, and the packages for the documentation site
#   tools/setup.sh release   the packages for a release, without those of `server`
#   tools/setup.sh clients   in .venv-clients: pinned versions of the clients that must work unchanged
#   tools/setup.sh newest    in .venv-newest: the newest versions of the same clients
#   tools/setup.sh ray       in .venv-ray: Ray Serve, and the packages for its tests
#
# VENV is another place for the environment of `server`, `dev`, `docs` or `release`.
# A second run is quick: it compares a stamp and calls build_llama.sh, which finds its earlier build.
# Only `newest` installs again in every run.
set -euo pipefail

extra=${1:?usage: tools/setup.sh server|dev|docs|release|clients|newest|ray}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

missing=()
if ! command -v "$python" >/dev/null; then
    missing+=("python3 (>= 3.11)")
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    missing+=("python3 >= 3.11 (found $("$python" -V 2>&1))")
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    missing+=("python3-venv")
fi
command -v git >/dev/null || missing+=("git")
command -v "${CXX:-g++}" >/dev/null || missing+=("g++")
if [ ${#missing[@]} -gt 0 ]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "cllm needs ${list%, }; on Debian: apt-get install python3-venv git g++ make" >&2
    exit 1
fi

# `dev` includes `server`, and none of the other extras that this script installs.
wanted=$(cat pyproject.toml setup.py | sha256sum | cut -c1-16)
venv=${VENV:-.venv}
[ "$extra" = clients ] && venv=.venv-clients
[ "$extra" = newest ] && venv=.venv-newest
[ "$extra" = ray ] && venv=.venv-ray extra=ray-test
stamped() { [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$wanted" ] && [ -x "$venv/bin/cllm" ]; }
# An interrupted run leaves an environment without pip.
make_venv() { "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"; }
installed() { stamped "$1" || { [ "$1" = server ] && stamped dev; }; }
if [ "$extra" = newest ]; then
    echo "installing the newest clients into $venv"
    make_venv
    "$python" -c 'import re, tomllib
extra = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"]
print(*(re.sub("^cllm", "--editable .", re.sub("==.*", "", name)) for name in extra), sep="\n")' >"$venv/newest.txt"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
        --requirement "$venv/newest.txt"
elif ! installed "$extra"; then
    echo "installing cllm[$extra] into $venv"
    make_venv
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"
    echo "$wanted" >"$venv/.installed-$extra"
fi

# The agents are npm packages; without npm their tests are skipped.
agents=tests/clients/agents/package.json
if [ "$extra" = newest ] || { [ "$extra" = clients ] && ! cmp -s $agents "$venv/agents/package.json"; }; then
    echo "installing the agents into $venv"
    mkdir -p "$venv/agents"
    if [ "$extra" = newest ]; then
        sed -E 's/: "[0-9.]+"/: "latest"/' $agents >"$venv/agents/package.json.new"
    else
        cp $agents "$venv/agents/package.json.new"
    fi
    (cd "$venv/agents" && rm -f package-lock.json && mv package.json.new package.json &&
        npm install --silent --no-audit --no-fund --no-update-notifier >npm.log 2>&1) ||
        { rm -f "$venv/agents/package.json" && echo "agents not installed: npm is missing or failed" >&2; }
fi

# Install cmake and ninja from their wheels if the system has no cmake, or neither ninja nor make.
command -v cmake >/dev/null && { command -v ninja || command -v make; } >/dev/null ||
    [ -x .venv/bin/cmake ] || "$venv/bin/python" -m pip install --quiet --prefix .venv cmake ninja
PYTHON=$venv/bin/python ./build_llama.sh --as-linked
