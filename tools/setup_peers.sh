#!/usr/bin/env bash
# Set up what the benchmarks put beside cllm, in .venv-peers.
#
#   llama-server, llama-batched-bench   the tools of ./build_llama.sh, without cllm's changes to llama.cpp
#   llama-cpp-python                    over the llama.cpp of its source distribution, compiled here
#   its example server                  server.py of the same source distribution
#   xllamacpp                           a wheel with a llama.cpp of its own
#
# Idempotent: the second run looks at a stamp for each.  A peer that cannot be installed is named and
# left out, here and by the benchmarks.  Environment: PYTHON, XDG_CACHE_HOME as ./build_llama.sh has
# it, and CLLM_PEERS (the virtual environment; default: .venv-peers).
set -euo pipefail

readonly XLLAMACPP=xllamacpp==2026.10.11549 LLAMA_CPP_PYTHON=llama-cpp-python==0.3.36
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
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
venv=$(cd "$venv" && pwd)
PYTHON=$python ./build_llama.sh --as-linked --tools --unpatched --prefix "$venv/llama.cpp"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
version=$("$venv/bin/python" -V)

failed=()
# install NAME COMMAND...: unless this was done with the same words, by the same Python.
install() {
    local name=$1 wanted stamp=$venv/.installed-$1
    shift
    wanted=$(echo "$version $LLAMA_CPP_PYTHON ${SERVER_NEEDS[*]} $*" | sha256sum | cut -c1-16)
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    echo "installing $name into $venv"
    if "$@"; then echo "$wanted" >"$stamp"; else failed+=("$name"); fi
}

llama_cpp_python() {
    echo "compiling its llama.cpp, some minutes"
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    rm -rf "$packages/llama_cpp/lib" # earlier versions linked it to cllm's library
    pip install --force-reinstall --no-binary llama-cpp-python "$LLAMA_CPP_PYTHON"
}

example_server() {
    local sdist=${LLAMA_CPP_PYTHON//-/_}
    sdist=${sdist/==/-}
    pip install "${SERVER_NEEDS[@]}" 'scikit-build-core>=0.10,<1' &&
        pip download --no-deps --no-build-isolation --no-binary llama-cpp-python --dest "$scratch" \
            "$LLAMA_CPP_PYTHON" &&
        tar -xzf "$scratch/$sdist.tar.gz" -C "$scratch" "$sdist/examples/server/server.py" &&
        mv "$scratch/$sdist/examples/server/server.py" "$venv/server.py"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
install llama-cpp-python llama_cpp_python
install example-server example_server
install xllamacpp pip install --only-binary xllamacpp "$XLLAMACPP"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'not installed, see above: %s\n' "${failed[@]}" >&2
else
    echo "the peers are in $venv"
fi
