#!/usr/bin/env bash
# Build libllama and libmtmd, the only native parts of cllm, and link them into the package.
#
# Everything is made under one cache directory, in a directory named after what went in, and appears
# there by one rename after it has decoded a quantized model.  So an interrupted build leaves
# nothing that could be loaded, and a second run finds the first one's work.
set -euo pipefail
# Where tools/setup.sh puts the cmake and the ninja of PyPI.
PATH=$PATH:$(dirname "${BASH_SOURCE[0]}")/.venv/bin

# tools/bump.py edits these; bindings/_llama_h.py has the same commit, and a test compares the two.
readonly COMMIT=b11549
readonly SDIST=xllamacpp-2026.10.11549 REQUIREMENT=xllamacpp==2026.10.11549 TREE=thirdparty/llama.cpp
readonly SDIST_SHA256=c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b
# Part of the key: raise it when this script installs something else for the same flags.
readonly LAYOUT=2
readonly TOOLS=(llama-server llama-bench llama-batched-bench llama-quantize)
readonly RPC_SERVER=ggml-rpc-server
# What is changed in the pinned source: see there.
readonly CHANGE=tools/native/change_llama.py

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here link=$here/cllm/_native
readonly check_model=${CLLM_CHECK_MODEL:-$here/cllm/models/cllm-tiny.gguf}
cache=${XDG_CACHE_HOME:-}
# The XDG specification says to ignore a relative path.
[[ $cache == /* ]] || cache=${HOME:?is not set}/.cache
readonly root=$cache/cllm
readonly python=${PYTHON:-python3} cc=${CC:-cc} cxx=${CXX:-c++}

usage() {
  cat <<'TEXT'
Usage: ./build_llama.sh [options]

Builds libllama, and libmtmd for images, from the pinned source, and makes cllm/_native a link to
them.

  --source DIR   build this llama.cpp tree, as it is, instead of the pinned one
  --unpatched    build the pinned source as it is, with slower kernels for CPUs (docs/building.md)
  --tools        also build llama-server, llama-bench, llama-batched-bench and llama-quantize
  --cuda, --vulkan, --metal (macOS)   with this backend
  --rpc          with llama.cpp's RPC, which is experimental and insecure, and ggml-rpc-server:
                 layers of a model may be on other machines (docs/rpc.md)
  --portable     for any CPU of this architecture: its code is built once for each kind (x86-64 from
                 SSE2 to AVX-512, ARMv8.0 to 9.2), the best one is chosen at run time, and the
                 OpenMP runtime is copied beside them
  --sanitize     with AddressSanitizer and UndefinedBehaviorSanitizer, for tests: slow
  --as-linked    with the options of the build that cllm/_native links to, and those given here
  --prefix DIR   install real files to DIR and leave cllm/_native as it is
  --jobs N       compile N files at a time (default: one per CPU)
  --verbose      print the compiler's output even if standard output is no terminal
  --clean        remove the cached builds and the link to them; the downloaded source stays
  --help         this text

Environment: XDG_CACHE_HOME (everything is kept in its subdirectory cllm), PYTHON (its pip downloads
the source), CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS, CLLM_CHECK_MODEL (the float16 GGUF that the new
library has to quantize and decode; default: the model embedded in cllm), CLLM_EMULATOR (a command
that runs programs of the compiler's architecture).
TEXT
}

say() { printf '%s\n' "$*"; }
fail() { printf 'build_llama.sh: %s\n' "$*" >&2; exit 1; }
misused() { printf 'build_llama.sh: %s (see --help)\n' "$*" >&2; exit 2; }

# The value of a name in the record of the linked build; nothing if there is no build.
linked_value() { sed -n "s/^  \"$1\": \"\(.*\)\",\{0,1\}$/\1/p" "$link/build.json" 2>/dev/null || true; }

read_linked_options() {
  local tree
  read -r -a linked_options <<<"$(linked_value options)"
  tree=$(linked_value source)
  [[ -z $tree ]] || linked_options+=(--source "$tree")
}

# Where the pinned source is unpacked; its name says what it is.
name_pinned_source() {
  pinned_source=$root/src/llama.cpp-$COMMIT-${SDIST_SHA256:0:12} change=''
  if [[ -z $source ]] && ! $unpatched; then
    change=$(sha256sum "$here/$CHANGE" | cut -c 1-8)
    pinned_source+=-$change
  fi
}

# The CPUs that this process may use; a container may have a quota besides.
count_cpus() {
  local n quota=max period=1
  n=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  if [[ -r /sys/fs/cgroup/cpu.max ]]; then read -r quota period </sys/fs/cgroup/cpu.max; fi
  [[ $quota == max ]] || ((n <= quota / period)) || n=$((1 + (quota - 1) / period))
  printf '%s' "$n"
}

parse_arguments() {
  local name
  source='' prefix='' jobs='' tools=false unpatched=false portable=false sanitize=false clean=false verbose=false
  own_source='' options=() backends=(cpu) cuda=OFF metal=OFF vulkan=OFF rpc=OFF
  while (($#)); do
    case $1 in
      --source | --prefix | --jobs)
        [[ -n ${2:-} ]] || misused "$1 needs a value"
        printf -v "${1#--}" '%s' "${2%/}"
        shift
        ;;
      --tools | --unpatched | --portable | --sanitize | --clean | --verbose) printf -v "${1#--}" true ;;
      --cuda | --metal | --vulkan | --rpc) printf -v "${1#--}" ON ;;
      --as-linked) read_linked_options && set -- "$1" "${linked_options[@]}" "${@:2}" ;;
      --help | -h) usage; exit 0 ;;
      *) misused "unknown option: $1" ;;
    esac
    shift
  done
  [[ -z $jobs || $jobs =~ ^[1-9][0-9]*$ ]] || misused "--jobs needs a number, not $jobs"
  : "${jobs:=$(count_cpus)}"
  if [[ -t 1 ]]; then verbose=true; fi
  for name in cuda metal vulkan rpc; do
    [[ ${!name} == OFF ]] || { backends+=("$name"); options+=("--$name"); }
  done
  for name in unpatched portable sanitize; do ! ${!name} || options+=("--$name"); done
  programs=()
  if [[ $rpc == ON ]]; then programs+=("$RPC_SERVER"); fi
  if $tools; then programs+=("${TOOLS[@]}"); fi
  [[ -n $source ]] || return 0
  [[ -f $source/include/llama.h ]] || misused "--source $source is not a llama.cpp tree"
  source=$(cd "$source" && pwd -P)
  own_source=$source
}

# need NAME PACKAGE [COMMAND...]: note both if the command fails (default: if NAME is not found).
need() {
  if (($# == 2)); then set -- "$@" command -v "$1"; fi
  "${@:3}" >/dev/null 2>&1 || { missing+=("$1"); packages+=("$2"); }
}

check_needs() {
  missing=() packages=() generator=(Ninja ninja)
  need cmake cmake
  need "a C compiler ($cc)" build-essential command -v "$cc"
  need "a C++ compiler ($cxx)" build-essential command -v "$cxx"
  command -v ninja >/dev/null || generator=('Unix Makefiles' make)
  need 'ninja or make' ninja-build command -v "${generator[1]}"
  need flock util-linux; need sha256sum coreutils; need tar tar; need "$python" python3
  if [[ -z $source && ! -f $root/src/$SDIST.tar.gz ]]; then
    need pip python3-pip "$python" -c 'import importlib.util as u; exit(not u.find_spec("pip"))'
  fi
  if [[ $cuda == ON ]]; then need nvcc nvidia-cuda-toolkit; fi
  if [[ $vulkan == ON ]]; then need glslc 'glslc libvulkan-dev spirv-headers'; fi
  if [[ $vulkan == ON && -z $source ]] && ! has_vulkan_headers; then
    need 'headers of Vulkan 1.3.272 (Debian 13, Ubuntu 24.04; CPATH=DIRECTORY adds newer ones)' libvulkan-dev false
  fi
  [[ $metal == OFF || $(uname -s) == Darwin ]] || fail '--metal needs macOS'
  ((${#missing[@]})) || return 0
  local list && printf -v list '%s, ' "${missing[@]}"
  fail "missing: ${list%, }; on Debian or Ubuntu: apt install" \
    "$(printf '%s\n' "${packages[@]}" | uniq | paste -sd ' ' -)"
}

# The pinned source needs this extension.
has_vulkan_headers() {
  "$cxx" -E -x c++ - >/dev/null 2>&1 <<'TEXT'
#include <vulkan/vulkan.hpp>
#ifndef VK_EXT_layer_settings
#error
#endif
TEXT
}

# Whether -march=native code with Intel's matrix tiles runs here: see tools/native/amx_probe.c.
probe_amx() {
  local code=$here/tools/native/amx_probe.c probe
  amx=absent
  if $portable; then
    amx=disabled
  elif "$cc" -march=native -dM -E - </dev/null 2>/dev/null | grep __AMX_INT8__ >/dev/null; then
    amx=faults
    # Compiled once but run every time, because the next boot may be on another hypervisor.
    probe=$root/amx_probe-$(cat "$code" - <<<"$cc_version $cpu" | sha256sum | cut -c 1-16)
    mkdir -p "$root"
    [[ -x $probe ]] || { "$cc" -O3 -march=native "$code" -o "$probe.$$" -pthread 2>/dev/null &&
      mv "$probe.$$" "$probe"; } || return 0
    # In a shell of its own, whose message about a signal goes to /dev/null as well.
    if bash -c '"$1"; exit $?' _ "$probe" >/dev/null 2>&1; then amx=works; fi
  fi
}

# Nothing where there is no /proc/cpuinfo.
cpu_line() { grep -m 1 -E "^($1)" /proc/cpuinfo 2>/dev/null || true; }

# The arguments of cmake that change the library, in `flags`.
choose_flags() {
  local compiler_flags=() linker_flags=() build_type=Release beside=\$ORIGIN
  if [[ $(uname -s) == Darwin ]]; then beside=@loader_path; fi
  # Plain file names and sonames: a wheel cannot carry symbolic links.
  flags=(
    -DBUILD_SHARED_LIBS=ON -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=$beside;$beside/../lib"
    -DGGML_CCACHE=OFF "-DGGML_RPC=$rpc" -DLLAMA_{ALL_WARNINGS,OPENSSL}"=OFF"
    -DLLAMA_BUILD_{APP,EXAMPLES,TESTS}"=OFF" "-DLLAMA_BUILD_COMMIT=$commit"
    -DLLAMA_BUILD_MTMD=ON -DMTMD_VIDEO=OFF
    "-DGGML_CUDA=$cuda" "-DGGML_METAL=$metal" "-DGGML_VULKAN=$vulkan"
  )
  if $portable; then
    flags+=(-DGGML_{BACKEND_DL,CPU_ALL_VARIANTS}"=ON" -DGGML_NATIVE=OFF)
  else
    flags+=(-DGGML_{BACKEND_DL,CPU_ALL_VARIANTS}"=OFF")
    # A compiler for another architecture knows nothing of the CPU that the code is for.
    if [[ -n ${CLLM_EMULATOR:-} ]]; then flags+=(-DGGML_NATIVE=OFF); else flags+=(-DGGML_NATIVE=ON); fi
  fi
  # gcc and clang let these win over -march=native wherever they stand, and ggml asks the compiler's
  # own macros whether to compile its AMX kernels.
  if [[ $amx == faults ]]; then compiler_flags+=(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16); fi
  if $sanitize; then
    build_type=RelWithDebInfo linker_flags=('-fsanitize=address,undefined')
    compiler_flags+=("${linker_flags[@]}" -fno-omit-frame-pointer)
  fi
  flags+=(
    "-DCMAKE_BUILD_TYPE=$build_type" "-DCMAKE_C_FLAGS=${CFLAGS:-} ${compiler_flags[*]-}"
    "-DCMAKE_CXX_FLAGS=${CXXFLAGS:-} ${compiler_flags[*]-}"
    "-DCMAKE_EXE_LINKER_FLAGS=${LDFLAGS:+$LDFLAGS }${linker_flags[*]-}"
    "-DCMAKE_SHARED_LINKER_FLAGS=${LDFLAGS:+$LDFLAGS }${linker_flags[*]-}"
  )
}

# check_headers RECORDS DIR...: compare the headers in DIR... with cllm's declarations, and record where
# the structures have their fields.  libmtmd is left out if it does not fit.
check_headers() {
  local script=$here/tools/native/check_headers.py directory
  CC=$cc "$python" "$script" llama.h "$@" ||
    fail "llama.cpp $commit does not fit cllm's declarations, which are in cllm/bindings/_llama_h.py"
  media=false
  for directory in "${@:2}"; do
    if [[ -f $directory/mtmd.h ]]; then media=true; fi
  done
  if $media; then CC=$cc "$python" "$script" mtmd.h "$@" || media=false; fi
  $media || say "llama.cpp $commit has no libmtmd that fits: cllm takes no images with it"
}

# One hash over the files that the build reads.
hash_source() {
  (cd "$1" && find CMakeLists.txt cmake common ggml include src tools vendor -type f -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
}

# The commit of a tree of its own (not of a repository that it merely lies in), or "unknown".
commit_of() {
  local head=unknown
  if [[ "$(git -C "$1" rev-parse --show-toplevel 2>/dev/null)" == "$1" ]]; then
    head=$(git -C "$1" rev-parse --short=9 HEAD)
    git -C "$1" diff-index --quiet HEAD -- || head+=-dirty
  fi
  printf '%s' "$head"
}

# What llama.cpp calls itself, such as 0.5.0, with the number of commits if there is a history.
version_of() {
  local name number=''
  name=$(sed -n 's/^set(LLAMA_VERSION_[MP][A-Z]* *\([0-9]*\))$/\1/p' "$1/CMakeLists.txt" | paste -sd . -)
  if [[ $(commit_of "$1") != unknown ]]; then number=-b$(git -C "$1" rev-list --count HEAD); fi
  printf '%s' "${name:-unknown}$number"
}

choose_build() {
  commit=$COMMIT source_sha256=$SDIST_SHA256
  if [[ -n $source ]]; then
    commit=$(commit_of "$source")
    source_sha256=$(hash_source "$source")
  fi
  # Not head and not grep -q: they leave early, and pipefail counts the writer's SIGPIPE.
  compiler=$("$cxx" --version | sed -n 1p) cc_version=$("$cc" --version | sed -n 1p)
  cpu=$(cpu_line 'model name|CPU part')
  cpu="${cpu#*: } ($(uname -m))"
  probe_amx
  choose_flags
  name_pinned_source
  local identity=("$LAYOUT" "$source_sha256$change" "$compiler" "$cc_version")
  $portable || identity+=("$cpu" "$(cpu_line 'flags|Features')")
  key=$(printf '%s\n' "${identity[@]}" "${flags[@]}" | sha256sum | cut -c 1-16)
  build=$root/build/$key
}

# A build with the tools serves a request without them, so it is looked for first.
find_installed() {
  installed=$root/native/$key-tools
  [[ -f $installed/build.json ]] && return
  $tools && return 1
  installed=$root/native/$key
  [[ -f $installed/build.json ]]
}

# Run a long command so that a signal to this script ends both at once: bash would wait for a
# foreground child before it runs a trap, and without a trap would leave the child running.
supervise() {
  local status=0
  before=${!:-} child=starting
  "$@" &
  child=$!
  wait "$child" || status=$?
  child=''
  return "$status"
}

clean_up() {
  local status=$?
  # The signal may come between the start of a child and the line that notes which it is.
  [[ ${child:-} != starting ]] || child=${!:-}
  [[ ${child:-} != "${before:-}" ]] || child=''
  if [[ -n ${child:-} ]]; then { kill "$child" && wait "$child"; } 2>/dev/null || true; fi
  [[ -z ${stage:-} ]] || rm -rf "$stage"
  exit "$status"
}

lock() {
  mkdir -p "$root"
  # The builders inherit the descriptor: should only this script be killed, the lock stays until
  # the last of them has left the build directory.
  exec 9>"$root/lock"
  flock -n 9 && return
  say 'waiting for another build'
  supervise flock 9
}

get_source() {
  [[ -z $source ]] || return 0
  source=$pinned_source
  # The directory appears by a rename after its archive was verified, so its name is the proof.
  [[ ! -d $source ]] || return 0
  local archive=$root/src/$SDIST.tar.gz actual
  stage=$root/src/.tmp.$$
  mkdir -p "$stage"
  if [[ ! -f $archive ]]; then
    say "downloading $REQUIREMENT"
    # The hash is for pip as well, which runs code of the archive to learn its metadata.
    printf '%s --hash=sha256:%s\n' "$REQUIREMENT" "$SDIST_SHA256" >"$stage/requirements.txt"
    supervise "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
      --no-binary "${REQUIREMENT%%=*}" --dest "$stage" --requirement "$stage/requirements.txt" ||
      fail "pip could not download $REQUIREMENT"
    mv "$stage/$SDIST.tar.gz" "$archive"
  fi
  actual=$(sha256sum "$archive" | cut -d ' ' -f 1)
  if [[ $actual != "$SDIST_SHA256" ]]; then
    rm -f "$archive"
    fail "$SDIST.tar.gz has sha256 $actual instead of $SDIST_SHA256; removed it"
  fi
  tar -xzf "$archive" -C "$stage" "$SDIST/$TREE"
  [[ -z $change ]] || "$python" "$here/$CHANGE" "$stage/$SDIST/$TREE" ||
    fail "$CHANGE does not fit llama.cpp $COMMIT (--unpatched builds it as it is)"
  mv "$stage/$SDIST/$TREE" "$source"
  rm -rf "$stage"
}

compile() {
  local targets=(llama) tool_flags=(-DLLAMA_BUILD_{COMMON,TOOLS,SERVER}"=OFF")
  if $media; then targets+=(mtmd); fi
  if ((${#programs[@]})); then
    targets+=("${programs[@]}")
    # The server without its web page, which would be built by npm or downloaded.
    tool_flags=(-DLLAMA_BUILD_{COMMON,TOOLS,SERVER}"=ON" -DLLAMA_{BUILD,USE_PREBUILT}_UI"=OFF")
  fi
  # An interrupted build may have had another generator, or one that pip had in a temporary folder.
  grep -qs "^CMAKE_GENERATOR:INTERNAL=${generator[0]}$" "$build/CMakeCache.txt" || rm -rf "$build"
  mkdir -p "$build"
  # The program that compiles Vulkan's shaders is a project of its own, and keeps the path of that generator.
  find "$build" -mindepth 2 -name CMakeCache.txt -delete
  # git must not take the commit of a repository around the source for llama.cpp's.
  GIT_CEILING_DIRECTORIES=$(dirname "$source") logged configuring \
    cmake -S "$source" -B "$build" -G "${generator[0]}" \
    -DCMAKE_MAKE_PROGRAM="$(command -v "${generator[1]}")" \
    -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" "${flags[@]}" "${tool_flags[@]}"
  # Not through cmake --build, which would not pass a signal on.
  logged compiling "${generator[1]}" -C "$build" -j "$jobs" "${targets[@]}"
}

# Run a command with its output in the log, or on standard output if that is a terminal or --verbose was given.
logged() {
  local what=$1 log=$build/build.log
  shift
  if $verbose; then supervise "$@" || fail "$what failed"; return; fi
  supervise "$@" >>"$log" 2>&1 && return
  tail -n 30 "$log" >&2
  fail "$what failed; the whole output is in $log"
}

fill_stage() {
  local libraries=("$build"/bin/lib{llama.,ggml}*) headers=("$source"/include/llama.h)
  if $media; then
    libraries+=("$build"/bin/libmtmd.*)
    headers+=("$source"/tools/mtmd/mtmd.h)
  fi
  mkdir -p "$stage/lib" "$stage/include" "$stage/check"
  if $tools; then libraries=("$build"/bin/lib*); fi
  if ((${#programs[@]})); then
    mkdir "$stage/bin"
    cp "${programs[@]/#/$build/bin/}" "$stage/bin/"
  fi
  cp -L "${libraries[@]}" "$stage/lib/"
  if $portable; then make_portable; fi
  cp "${headers[@]}" "$source"/ggml/include/{ggml*,gguf}.h "$stage/include/"
  copy_licenses
}

# The licences of llama.cpp and of what libmtmd contains.
copy_licenses() {
  local file
  cp "$source/LICENSE" "$stage/LICENSE.llama.cpp"
  # llama-server needs libmtmd, also one that does not fit.
  compgen -G "$stage/lib/libmtmd.*" >/dev/null || return 0
  for file in "$source"/vendor/{hash/*/LICENSE*,stb/stb_image.h,miniaudio/miniaudio.h}; do
    [[ -f $file ]] || continue
    printf '\n== %s\n\n' "${file#"$source/vendor/"}"
    case $file in
      *.h) sed -n '/^This software is available/,/^\*\//p' "$file" ;;
      *) cat "$file" ;;
    esac
  done >"$stage/LICENSE.libmtmd"
}

# What a build needs that travels to machines with another CPU and without the compiler's OpenMP.
make_portable() {
  local variants variant
  # The variant with Intel's matrix tiles is chosen by CPUID alone, and tools/native/amx_probe.c says
  # why that is no evidence.  Without it, such a CPU gets the same but for the tiles (zen4).
  rm -f "$stage"/lib/libggml-cpu-sapphirerapids.so
  variants=("$stage"/lib/libggml-cpu-*.so)
  # Apple's compiler has no OpenMP.
  [[ $(uname -s) == Darwin ]] || ldd "${variants[0]}" |
    awk '$1 ~ /^lib(g|i)?omp/ { print $3 }' | xargs -r cp -L -t "$stage/lib"
  # Programs look for the variants beside themselves; an RPC server for what it is to compute with, too.
  if [[ $rpc == ON ]]; then variants=("$stage"/lib/libggml-{cpu-*,rpc,cuda,vulkan,metal}.so); fi
  if ((${#programs[@]})); then
    for variant in "${variants[@]}"; do
      [[ ! -e $variant ]] || ln -s "../lib/${variant##*/}" "$stage/bin/"
    done
  fi
}

# In a child process, because what to look for is a crash: of a portable build, once with each
# variant of its code for CPUs; those that this CPU cannot run say so (status 3).
check_decode() {
  local scratch=$stage/check sanitizers=() variant
  if $sanitize; then sanitizers=('-fsanitize=address,undefined'); fi
  "$cc" -std=c11 -O1 ${sanitizers[@]+"${sanitizers[@]}"} -I"$stage/include" \
    "$here/tools/native/decode_check.c" -o "$scratch/decode_check" \
    -L"$stage/lib" -lllama -lggml -lggml-base -lm -Wl,-rpath,"$stage/lib" ||
    fail 'libllama was built, but a program cannot be linked with it'
  if ! $portable; then
    check_decode_with
  else
    for variant in "$stage"/lib/libggml-cpu-*.so; do check_decode_with "$variant"; done
  fi
  rm -rf "$scratch"
}

check_decode_with() {
  local status=0 what=${1:+ with $(basename "$1")}
  # Only crashes count here, and the leak checker itself fails where ptrace is forbidden.
  # shellcheck disable=SC2086  # the emulator may have arguments
  ASAN_OPTIONS=detect_leaks=0 supervise bash -c '"$@"; exit $?' _ ${CLLM_EMULATOR:-} \
    "$scratch/decode_check" "$check_model" "$scratch" "$@" >"$scratch/log" 2>&1 || status=$?
  if ((status > 128)); then
    fail "libllama was built, but decoding a quantized model$what died with" \
      "SIG$(kill -l $((status - 128))); try --portable, or another compiler (CC, CXX)"
  elif ((status == 3)) && [[ -n $what ]]; then
    say "not tried here, for want of such a CPU: $(basename "$1")"
  elif ((status)); then
    fail "libllama was built, but cannot decode a quantized model$what: $(tail -n 1 "$scratch/log")"
  fi
}

write_record() {
  "$python" - "$stage/build.json" "commit=$commit" "source_sha256=$source_sha256" \
    "version=$(version_of "$source")" \
    "cmake_version=$(cmake --version | awk 'NR == 1 { print $NF }')" "compiler=$compiler" \
    "cpu=$cpu" "amx=$amx" "patched=${change:+true}" "portable=$portable" "sanitize=$sanitize" \
    "tools=$tools" "media=$media" \
    "backends=${backends[*]}" "options=${options[*]}" "source=$own_source" -- "${flags[@]}" <<'PYTHON'
import datetime, json, pathlib, sys

end = sys.argv.index("--")
record = dict(pair.split("=", 1) for pair in sys.argv[2:end])
record |= {key: record[key] == "true" for key in ("patched", "portable", "sanitize", "tools", "media")}
record |= {"backends": record["backends"].split(), "flags": sys.argv[end + 1:]}
record["built_at"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
pathlib.Path(sys.argv[1]).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
PYTHON
}

build_and_install() {
  [[ -f $check_model ]] || fail "no model to check the build with: $check_model is missing"
  lock
  if find_installed; then return; fi
  rm -rf "$root"/native/.tmp.* "$root"/src/.tmp.*
  get_source
  check_headers "$build/layouts" "$source"/{,ggml/}include "$source/tools/mtmd"
  # Older trees build libmtmd with all tools alone.
  grep LLAMA_BUILD_MTMD "$source/CMakeLists.txt" >/dev/null || media=false
  $verbose || where="; log: $build/build.log"
  say "building libllama $commit with $jobs jobs, some minutes${where:-}"
  compile
  stage=$root/native/.tmp.$key.$$
  fill_stage
  check_decode
  write_record
  installed=$root/native/$key
  if $tools; then installed+=-tools; fi
  mv "$stage" "$installed"
  fresh=true
}

link_into_package() {
  [[ $(readlink "$link" 2>/dev/null) != "$installed" ]] || return 0
  [[ ! -e $link || -L $link ]] || fail "$link is not a link; remove it first"
  ln -s "$installed" "$link.$$"
  "$python" -c 'import os, sys; os.replace(*sys.argv[1:])' "$link.$$" "$link"  # mv -T is GNU's
}

# DIR is replaced as a whole, so it has to be ours: --prefix /usr must not empty /usr.
install_to_prefix() {
  [[ ! -L $prefix && (! -e $prefix || -f $prefix/build.json) ]] || rmdir "$prefix" 2>/dev/null ||
    fail "--prefix $prefix exists and is not an earlier installation"
  mkdir -p "$(dirname "$prefix")"
  stage=$prefix.tmp.$$
  cp -RL "$installed" "$stage"
  rm -rf "$stage/layouts"
  check_headers "$stage/layouts" "$stage/include"
  rm -rf "$prefix"
  mv "$stage" "$prefix"
}

report() {
  [[ -n ${fresh:-} ]] || { say "libllama $commit is already built: ${prefix:-$link}"; return; }
  say "built libllama $commit in $((SECONDS / 60)) min $((SECONDS % 60)) s, decodes Q8_0 and Q4_0"
  say "  for   $cpu; portable: $portable; AMX: $amx; backends: ${backends[*]}"
  say "  with  $compiler"
  say "  in    $installed; used as ${prefix:-$link}"
}

clean_cache() {
  lock
  rm -rf "$root/build" "$root/native" "$root"/amx_probe-*
  # A link into another cache directory belongs to another user.
  if [[ $(readlink "$link" 2>/dev/null) == "$root"/native/* ]]; then rm "$link"; fi
  say "removed the builds in $root"
}

main() {
  parse_arguments "$@"
  trap clean_up EXIT
  trap 'exit 129' HUP; trap 'exit 130' INT; trap 'exit 143' TERM
  if $clean; then clean_cache; exit; fi
  check_needs
  choose_build
  find_installed || build_and_install
  check_headers "$installed/layouts" "$installed/include"
  if [[ -n $prefix ]]; then install_to_prefix; else link_into_package; fi
  report
}

main "$@"
