#!/usr/bin/env bash
# Compile libllama for aarch64, and test cllm with it under qemu's user emulation.
#
# Needs Debian's packages qemu-user and g++-aarch64-linux-gnu.  apt fetches Python for aarch64 into
# build/aarch64, without installing it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for program in qemu-aarch64 aarch64-linux-gnu-g++ apt-get dpkg-deb; do
  command -v "$program" >/dev/null || { echo "there is no $program: nothing is tested"; exit 0; }
done
readonly place=$PWD/build/aarch64 python=3.11
readonly root=$place/root site=$place/site

# Debian's Python, with its libraries, from an apt that knows nothing of this system.
if [[ ! -d $root ]]; then
  mkdir -p "$place"/{lists,archives}/partial
  : >"$place/status"
  cat >"$place/apt.conf" <<TEXT
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Dir::State::lists "$place/lists";
Dir::State::status "$place/status";
Dir::Cache::archives "$place/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
TEXT
  export APT_CONFIG=$place/apt.conf
  apt-get -qq update
  apt-get -qq install -y --download-only "python$python" libgomp1 libstdc++6
  unset APT_CONFIG
  rm -rf "$root.new"
  for package in "$place"/archives/*.deb; do dpkg-deb -x "$package" "$place/root.new"; done
  mv "$place/root.new" "$root"
fi
if [[ ! -d $site ]]; then
  rm -rf "$site.new"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$site.new" \
    --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --only-binary :all: \
    --python-version "$python" 'numpy>=1.26,<3' 'anyio>=4.12,<5'
  mv "$site.new" "$site"
fi
cat >"$place/toolchain.cmake" <<'TEXT'
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
TEXT
CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ CLLM_EMULATOR="qemu-aarch64 -L $root" \
  CMAKE_TOOLCHAIN_FILE=$place/toolchain.cmake ./build_llama.sh --prefix "$place/library"
CLLM_LIBRARY=$place/library PYTHONPATH=$site:$PWD \
  qemu-aarch64 -L "$root" "$root/usr/bin/python$python" -P -m tools.smoke
