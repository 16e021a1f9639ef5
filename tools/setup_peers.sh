#!/usr/bin/env bash
# Set up what the benchmarks put beside cllm: .venv-peers, over the libllama that cllm loads.
#
#   llama-server, llama-batched-bench   the tools of ./build_llama.sh
#   llama-cpp-python                    without a llama.cpp of its own
#   its example server                  server.py of the same source distribution
#   xllamacpp                           a wheel with a llama.cpp of its own
#
# Idempotent: the second run looks at a stamp for each.  A peer that cannot be installed is named and
# left out, here and by the benchmarks.  Environment: PYTHON, XDG_CACHE_HOME as ./build_llama.sh has
# it, and CLLM_PEERS (the virtual environment; default: .venv-peers).
set -euo pipefail

readonly XLLAMACPP=xllamacpp==2026.10.11549
readonly SERVER_NEEDS=(
    'fastapi>=0.115,<1' 'jinja2>=3.1.6,<4' 'numpy>=1.26,<3' 'openai>=1.60,<4' 'pydantic>=2.7,<3'
    'safetensors>=0.4,<1' 'uvicorn>=0.30,<1' 'websockets>=13,<18'
)

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${CLLM_PEERS:-.venv-peers}
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "the peers need python3 >= 3.11 with venv; on Debian: apt-get install python3-venv" >&2
    exit 1
fi
# What is pinned there is pinned once.
pinned() { sed -n "s/^readonly .*\b$1=\([^ ]*\).*/\1/p" build_llama.sh; }
sdist=$(pinned SDIST) requirement=$(pinned REQUIREMENT) sha256=$(pinned SDIST_SHA256)

PYTHON=$python ./build_llama.sh --as-linked --tools
library=$(cd -P cllm/_native/lib && pwd)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
venv=$(cd "$venv" && pwd)
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
version=$("$venv/bin/python" -V)

failed=()
# install NAME COMMAND...: unless this was done with the same words, by the same Python.
install() {
    local name=$1 wanted stamp=$venv/.installed-$1
    shift
    wanted=$(echo "$version $sha256 ${SERVER_NEEDS[*]} $*" | sha256sum | cut -c1-16)
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    echo "installing $name into $venv"
    if "$@"; then echo "$wanted" >"$stamp"; else failed+=("$name"); fi
}

# build_llama.sh keeps the archive that it verified, but not where only the builds were cached.
fetch_archive() {
    local cache=${XDG_CACHE_HOME:-}
    [[ $cache == /* ]] || cache=$HOME/.cache
    archive=$cache/cllm/src/$sdist.tar.gz
    if [ ! -f "$archive" ]; then
        archive=$scratch/$sdist.tar.gz
        echo "$requirement --hash=sha256:$sha256" >"$scratch/requirements.txt"
        pip download --no-deps --no-binary llama-cpp-python --dest "$scratch" \
            --requirement "$scratch/requirements.txt" || return
    fi
    echo "$sha256  $archive" | sha256sum --check --quiet
}

llama_cpp_python() {
    fetch_archive && CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install "$archive"
}

example_server() {
    fetch_archive && pip install "${SERVER_NEEDS[@]}" &&
        tar -xzf "$archive" -C "$scratch" "$sdist/examples/server/server.py" &&
        mv "$scratch/$sdist/examples/server/server.py" "$venv/server.py"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
install llama-cpp-python llama_cpp_python
install example-server example_server
install xllamacpp pip install --only-binary xllamacpp "$XLLAMACPP"

# LLAMA_CPP_LIB_PATH says where libllama is; libmtmd is only looked for in the package.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
if [ -d "$packages/llama_cpp" ]; then ln -sfn "$library" "$packages/llama_cpp/lib"; fi

if [ ${#failed[@]} -gt 0 ]; then
    printf 'not installed, see above: %s\n' "${failed[@]}" >&2
else
    echo "the peers are in $venv, over $library"
fi
