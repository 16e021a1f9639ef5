"""What build_llama.sh promises, with programs in place of cmake, ninja, pip and the compilers.

`build_sandbox` makes them and the project.  Whoever has to wait for another process here waits for
it at a named pipe.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from cllm.bindings._llama_h import LLAMA_CPP_COMMIT
from tests.build.build_sandbox import (
    DEADLINE_S,
    PROJECT,
    REQUIREMENT,
    SDIST,
    SOURCE_FILES,
    Sandbox,
    make_sandbox,
    names_in,
    write_program,
    write_tree,
)
from tools.native import change_llama

LIBRARIES = ["libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so", "libmtmd.so"]
AMX_FLAGS = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return make_sandbox(tmp_path)


def _when_started(sandbox: Sandbox) -> int:
    """Wait until the blocking ninja runs; its process id."""
    return int((sandbox.stub / "started").read_text(encoding="utf-8"))


def _release(sandbox: Sandbox) -> None:
    (sandbox.stub / "release").write_text("\n", encoding="utf-8")


def test_the_pinned_commit_is_the_one_the_declarations_are_of() -> None:
    script = (PROJECT / "build_llama.sh").read_text(encoding="utf-8")
    assert f"readonly COMMIT={LLAMA_CPP_COMMIT}\n" in script


def test_a_build_is_installed_linked_and_recorded(sandbox: Sandbox) -> None:
    sandbox.build()

    assert sandbox.link.readlink().parent == sandbox.native
    assert names_in(sandbox.link) == [
        "LICENSE.libmtmd",
        "LICENSE.llama.cpp",
        "build.json",
        "include",
        "layouts",
        "lib",
    ]
    assert names_in(sandbox.link / "lib") == LIBRARIES
    headers = ["ggml-cpu.h", "ggml.h", "gguf.h", "llama.h", "mtmd.h"]
    assert names_in(sandbox.link / "include") == headers
    record = sandbox.record()
    assert record["version"] == "9.8.7"
    assert record["compiler"] == "c++ (stand-in) 1.0"
    assert record["cmake_version"] == "3.99.0"
    assert record["backends"] == ["cpu"]
    assert [record[key] for key in ("portable", "sanitize", "tools")] == [False, False, False]
    assert "-DGGML_NATIVE=ON" in record["flags"]
    assert set(record["flags"]) <= set(sandbox.log("cmake"))


def test_only_llama_cpp_is_unpacked(sandbox: Sandbox) -> None:
    sandbox.build()
    source = sandbox.cache / "cllm" / "src"
    assert [path.name for path in source.rglob("setup.py")] == []
    assert len(list(source.glob("llama.cpp-*/include/llama.h"))) == 1


def test_a_second_run_builds_nothing_and_says_so_in_one_line(sandbox: Sandbox) -> None:
    sandbox.build()
    calls = [sandbox.log(program) for program in ("cmake", "ninja", "pip")]
    output = sandbox.build()
    assert len(output.splitlines()) == 1
    assert "already built" in output
    assert [sandbox.log(program) for program in ("cmake", "ninja", "pip")] == calls


def test_headers_that_do_not_fit_end_the_build_before_anything_is_compiled(
    sandbox: Sandbox,
) -> None:
    result = sandbox.run(HEADERS="llama.h")
    assert result.returncode == 1
    assert "a_function: conflicting types" in result.stderr
    assert "does not fit cllm's declarations" in result.stderr
    assert sandbox.log("cmake") == sandbox.installed() == []


def test_a_libmtmd_that_does_not_fit_is_left_out(sandbox: Sandbox) -> None:
    output = sandbox.build(HEADERS="mtmd.h")
    assert "has no libmtmd that fits: cllm takes no images with it" in output
    assert "libmtmd.so" not in names_in(sandbox.link / "lib")
    assert "mtmd.h" not in names_in(sandbox.link / "include")
    assert not (sandbox.link / "LICENSE.libmtmd").exists()
    assert sandbox.record()["media"] is False


def test_the_licences_of_what_libmtmd_contains_are_installed(sandbox: Sandbox) -> None:
    sandbox.build()
    assert sandbox.record()["media"] is True
    text = (sandbox.link / "LICENSE.libmtmd").read_text()
    assert "== hash/sha256/LICENSE\n\nPublic domain" in text
    assert "== stb/stb_image.h\n\nThis software is available under 2 licenses" in text
    assert "code" not in text


def test_other_declarations_are_compared_with_the_build_that_is_there(sandbox: Sandbox) -> None:
    sandbox.build()
    calls = sandbox.log("ninja")
    assert "already built" in sandbox.build(DECLARATIONS="second")
    assert names_in(sandbox.link / "layouts") == ["first.json", "second.json"]
    assert sandbox.log("ninja") == calls
    assert sandbox.log("headers")[-1] == f"{sandbox.link.readlink()}/include"


def test_an_installation_elsewhere_has_the_record_of_its_own_declarations(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.build()
    sandbox.build("--prefix", str(tmp_path / "there"), DECLARATIONS="second")
    assert names_in(tmp_path / "there" / "layouts") == ["second.json"]


def test_a_rebuild_after_a_failure_does_not_download_again(sandbox: Sandbox) -> None:
    assert sandbox.run(NINJA="fails").returncode == 1
    calls = sandbox.log("pip")
    sandbox.build()
    assert sandbox.log("pip") == calls


def test_another_compiler_is_another_build(sandbox: Sandbox) -> None:
    sandbox.build()
    first = sandbox.link.readlink()
    sandbox.build(CC_VERSION="2.0")
    assert sandbox.link.readlink() != first
    assert first.exists()


def test_the_link_replaces_an_older_link(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.link.symlink_to(tmp_path / "gone")
    sandbox.build()
    assert sandbox.link.readlink().parent == sandbox.native
    assert names_in(sandbox.link.parent) == ["_native"]


def test_a_directory_in_the_place_of_the_link_is_left_alone(sandbox: Sandbox) -> None:
    sandbox.link.mkdir()
    result = sandbox.run()
    assert result.returncode == 1
    assert "is not a link" in result.stderr
    assert sandbox.link.is_dir()


def test_an_interrupted_build_leaves_no_library_behind(sandbox: Sandbox) -> None:
    with sandbox.start(NINJA="blocks") as process:
        ninja = _when_started(sandbox)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert sandbox.installed() == []
    assert not sandbox.link.is_symlink()
    with pytest.raises(ProcessLookupError):
        os.kill(ninja, 0)

    sandbox.build()
    assert names_in(sandbox.link / "lib") == LIBRARIES


def test_what_a_killed_build_left_is_removed_by_the_next(sandbox: Sandbox) -> None:
    half_finished = sandbox.native / ".tmp.0123456789abcdef.1" / "lib"
    half_finished.mkdir(parents=True)
    sandbox.build()
    assert sandbox.installed() == [sandbox.link.readlink().name]


def test_a_concurrent_run_waits_and_uses_the_build_of_the_first(sandbox: Sandbox) -> None:
    with sandbox.start(NINJA="blocks") as first:
        _when_started(sandbox)
        with sandbox.start() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting for another build\n"
            _release(sandbox)
            second_output, _ = second.communicate(timeout=DEADLINE_S)
        first.communicate(timeout=DEADLINE_S)
    assert [first.returncode, second.returncode] == [0, 0]
    assert "already built" in second_output
    assert len(sandbox.log("ninja")) == 1


@pytest.mark.parametrize("how", ["dies", "wrong"])
def test_a_library_that_cannot_decode_is_not_installed(sandbox: Sandbox, how: str) -> None:
    result = sandbox.run(DECODE=how)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    expected = {"dies": "died with SIGSEGV; try --portable", "wrong": "a logit is not finite"}
    assert expected[how] in result.stderr
    assert sandbox.installed() == []
    assert not sandbox.link.is_symlink()


def test_a_failed_compilation_shows_the_end_of_its_log(sandbox: Sandbox) -> None:
    result = sandbox.run(NINJA="fails")
    assert result.returncode == 1
    assert "FAILED: ggml.c.o" in result.stderr
    assert result.stderr.rstrip().endswith("build.log")
    assert sandbox.installed() == []


def test_a_verbose_build_prints_what_the_compiler_says_without_a_terminal(sandbox: Sandbox) -> None:
    """setup.py reads the progress there, and the last line is the error that pip shows last."""
    result = sandbox.run("--verbose", NINJA="fails")
    assert "FAILED: ggml.c.o" in result.stdout
    assert result.stderr.splitlines()[-1] == "build_llama.sh: compiling failed"


@pytest.mark.parametrize(
    ("amx", "verdict", "compiled_out"),
    [("", "absent", False), ("works", "works", False), ("dies", "faults", True)],
)
def test_amx_is_compiled_out_where_executing_it_faults(
    sandbox: Sandbox, amx: str, verdict: str, compiled_out: bool
) -> None:
    sandbox.build(AMX=amx)
    record = sandbox.record()
    assert record["amx"] == verdict
    for language in ("C", "CXX"):
        (flags,) = (f for f in record["flags"] if f.startswith(f"-DCMAKE_{language}_FLAGS="))
        assert (AMX_FLAGS in flags) is compiled_out


def test_a_portable_build_is_not_for_this_cpu(sandbox: Sandbox) -> None:
    sandbox.build("--portable", AMX="dies")
    record = sandbox.record()
    assert record["portable"] is True
    assert record["amx"] == "disabled"
    assert {"-DGGML_NATIVE=OFF", "-DGGML_CPU_ALL_VARIANTS=ON"} <= set(record["flags"])
    assert AMX_FLAGS not in " ".join(record["flags"])
    variants = ["libggml-cpu-haswell.so", "libggml-cpu-x64.so"]
    others = [
        "libggml-base.so", "libggml.so", "libgomp.so.1", "libllama.so", "libmtmd.so",
    ]  # fmt: skip
    assert names_in(sandbox.link / "lib") == sorted(variants + others)


def test_every_variant_of_a_portable_build_has_to_decode(sandbox: Sandbox) -> None:
    result = sandbox.run("--portable", DECODE="haswell-dies")
    assert result.returncode == 1
    assert "with libggml-cpu-haswell.so died with SIGSEGV" in result.stderr
    assert sandbox.installed() == []


def test_a_variant_that_cannot_run_here_is_named(sandbox: Sandbox) -> None:
    said = sandbox.build("--portable", DECODE="old-cpu")
    assert "not tried here, for want of such a CPU: libggml-cpu-haswell.so" in said


def test_the_programs_of_a_portable_build_find_its_variants(sandbox: Sandbox) -> None:
    sandbox.build("--portable", "--tools")
    variant = sandbox.link / "bin" / "libggml-cpu-x64.so"
    assert variant.read_text(encoding="utf-8") == "libggml-cpu-x64\n"


def test_the_linked_build_is_made_again_with_its_options(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "a tree")
    sandbox.build("--as-linked")  # without any: for this CPU
    assert sandbox.record()["options"] == ""
    sandbox.build("--portable", "--source", str(tree))
    chosen = sandbox.link.readlink()
    assert "already built" in sandbox.build("--as-linked")
    assert sandbox.link.readlink() == chosen
    sandbox.build("--as-linked", "--portable", "--tools")
    assert sandbox.record()["source"] == str(tree)
    assert sandbox.link.readlink().name == f"{chosen.name}-tools"
    sandbox.build()
    assert sandbox.record()["portable"] is False


def test_a_sanitized_build_is_a_build_of_its_own(sandbox: Sandbox) -> None:
    sandbox.build()
    sandbox.build("--sanitize")
    record = sandbox.record()
    assert record["sanitize"] is True
    assert "-DCMAKE_BUILD_TYPE=RelWithDebInfo" in record["flags"]
    assert "-DCMAKE_SHARED_LINKER_FLAGS=-fsanitize=address,undefined" in record["flags"]
    assert len(sandbox.installed()) == 2


def test_backends_are_passed_on_and_recorded(sandbox: Sandbox) -> None:
    write_program(sandbox.stub / "bin" / "nvcc", "")
    sandbox.build("--cuda")
    record = sandbox.record()
    assert record["backends"] == ["cpu", "cuda"]
    assert {"-DGGML_CUDA=ON", "-DGGML_VULKAN=OFF"} <= set(record["flags"])


def test_old_headers_of_vulkan_are_named_before_anything_is_compiled(sandbox: Sandbox) -> None:
    write_program(sandbox.stub / "bin" / "glslc", "")
    sandbox.build("--vulkan")
    assert "-DGGML_VULKAN=ON" in sandbox.record()["flags"]
    write_program(sandbox.stub / "bin" / "c++", '[ "$1" != -E ] || exit 1; echo "c++ (other) 2.0"')
    refused = sandbox.run("--vulkan")
    assert refused.returncode == 1
    assert "missing: headers of Vulkan 1.3.272 (Debian 13" in refused.stderr
    assert "apt install libvulkan-dev" in refused.stderr


def test_a_resumed_build_forgets_the_generator_of_the_program_that_compiles_shaders(
    sandbox: Sandbox,
) -> None:
    sandbox.run(NINJA="fails")
    (build,) = (sandbox.cache / "cllm" / "build").iterdir()
    nested = build / "ggml" / "CMakeCache.txt"
    nested.parent.mkdir(exist_ok=True)
    nested.write_text("CMAKE_MAKE_PROGRAM:FILEPATH=/tmp/pip-build-env-gone/bin/ninja")
    (build / "CMakeCache.txt").write_text("CMAKE_GENERATOR:INTERNAL=Ninja\n")
    sandbox.build()
    assert not nested.exists()


def test_a_build_with_tools_serves_a_request_without_them(sandbox: Sandbox) -> None:
    sandbox.build("--tools")
    tools = ["llama-batched-bench", "llama-bench", "llama-quantize", "llama-server"]
    assert names_in(sandbox.link / "bin") == tools
    assert "libllama-common.so" in names_in(sandbox.link / "lib")
    assert sandbox.record()["tools"] is True
    assert "already built" in sandbox.build()
    assert names_in(sandbox.link / "bin") == tools


def test_a_build_without_tools_does_not_serve_a_request_for_them(sandbox: Sandbox) -> None:
    sandbox.build()
    sandbox.build("--tools")
    assert (sandbox.link / "bin" / "llama-server").is_file()


def test_the_web_page_of_the_server_is_neither_built_nor_downloaded(sandbox: Sandbox) -> None:
    sandbox.build("--tools")
    assert {"-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"} <= set(sandbox.log("cmake"))


def test_prefix_gets_real_files_and_no_link(sandbox: Sandbox, tmp_path: Path) -> None:
    prefix = tmp_path / "wheel" / "_native"
    for _ in range(2):  # the second replaces the first
        sandbox.build("--prefix", f"{prefix}/")
        assert names_in(prefix / "lib") == LIBRARIES
        assert not any(path.is_symlink() for path in [prefix, *prefix.rglob("*")])
    assert names_in(prefix.parent) == ["_native"]
    assert not sandbox.link.is_symlink()


def test_a_prefix_that_is_not_an_installation_is_left_alone(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    prefix = tmp_path / "usr"
    (prefix / "lib").mkdir(parents=True)
    result = sandbox.run("--prefix", str(prefix))
    assert result.returncode == 1
    assert "not an earlier installation" in result.stderr
    assert names_in(prefix) == ["lib"]


def test_own_source_is_used_without_a_download(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "llama.cpp")
    sandbox.build("--source", str(tree))
    assert sandbox.record()["commit"] == "unknown"
    assert sandbox.log("pip") == []
    assert str(tree) in sandbox.log("cmake")


def code_of(tree: Path) -> dict[str, str]:
    """Return the code of the files that are changed, as it is in an unpacked source."""
    return {str(file): (tree / file).read_text(encoding="utf-8") for file in change_llama.EDITS}


def sources_of(sandbox: Sandbox) -> list[Path]:
    """Return all unpacked sources."""
    return list((sandbox.cache / "cllm" / "src").glob("llama.cpp-*/"))


AS_IT_IS = {str(file): SOURCE_FILES[str(file)] for file in change_llama.EDITS}


def test_the_pinned_source_is_built_with_the_changes(sandbox: Sandbox) -> None:
    sandbox.build()
    (tree,) = sources_of(sandbox)
    code = code_of(tree)
    for file, edits in change_llama.EDITS.items():
        assert all(new in code[str(file)] for new in edits.values())
    assert sandbox.record()["patched"] is True


def test_an_unpatched_build_is_one_of_its_own_from_the_source_as_it_is(sandbox: Sandbox) -> None:
    sandbox.build()
    first, changed = sandbox.link.readlink(), sources_of(sandbox)
    sandbox.build("--unpatched")
    assert sandbox.link.readlink() != first
    assert sandbox.record()["patched"] is False
    (tree,) = set(sources_of(sandbox)) - set(changed)
    assert code_of(tree) == AS_IT_IS
    sandbox.build("--as-linked")
    assert sandbox.record()["patched"] is False


def test_another_change_is_another_build(sandbox: Sandbox) -> None:
    sandbox.build()
    first = sandbox.link.readlink()
    script = sandbox.project / "tools" / "native" / "change_llama.py"
    script.write_text(
        script.read_text(encoding="utf-8").replace("16 at", "64 at"), encoding="utf-8"
    )
    sandbox.build()
    assert sandbox.link.readlink() != first
    assert len(sources_of(sandbox)) == 2


def test_a_change_that_does_not_fit_ends_the_build_and_leaves_no_source(sandbox: Sandbox) -> None:
    script = sandbox.project / "tools" / "native" / "change_llama.py"
    code = script.read_text(encoding="utf-8")
    script.write_text(
        code.replace("float s; // KQ value", "double s; // KQ value"), encoding="utf-8"
    )
    result = sandbox.run()
    assert result.returncode == 1
    assert "double s" in result.stderr
    assert "--unpatched builds it as it is" in result.stderr
    assert sources_of(sandbox) == []
    sandbox.build("--unpatched")


def test_own_source_is_left_as_it_is(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "llama.cpp")
    sandbox.build("--source", str(tree))
    assert sandbox.record()["patched"] is False
    assert code_of(tree) == AS_IT_IS


def test_changed_source_is_another_build(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "llama.cpp")
    sandbox.build("--source", str(tree))
    first = sandbox.link.readlink()
    (tree / "src" / "llama.cpp").write_text("int changed;", encoding="utf-8")
    sandbox.build("--source", str(tree))
    assert sandbox.link.readlink() != first


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_own_source_is_recorded(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "llama.cpp")
    author = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "One"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True)
    sandbox.build("--source", str(tree))
    commit = sandbox.record()["commit"]
    assert len(commit) == 9

    (tree / "src" / "CMakeLists.txt").write_text("# changed", encoding="utf-8")
    sandbox.build("--source", str(tree))
    assert sandbox.record()["commit"] == f"{commit}-dirty"


def test_an_archive_with_another_hash_is_refused_and_removed(sandbox: Sandbox) -> None:
    archive = sandbox.cache / "cllm" / "src" / f"{SDIST}.tar.gz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"something else")
    result = sandbox.run()
    assert result.returncode == 1
    assert "has sha256" in result.stderr
    assert list(archive.parent.iterdir()) == []
    sandbox.build()


def test_pip_is_told_the_hash_before_it_runs_code_of_the_archive(sandbox: Sandbox) -> None:
    sandbox.build()
    command, requirement = sandbox.log("pip")
    assert f"--no-deps --no-binary {REQUIREMENT.partition('=')[0]}" in command
    sha256 = hashlib.sha256((sandbox.stub / "sdist.tar.gz").read_bytes()).hexdigest()
    assert requirement == f"{REQUIREMENT} --hash=sha256:{sha256}"


def test_clean_removes_the_builds_and_the_link_but_not_the_download(sandbox: Sandbox) -> None:
    sandbox.build()
    sandbox.build("--clean")
    assert not sandbox.link.is_symlink()
    assert not sandbox.native.exists()
    assert not (sandbox.cache / "cllm" / "build").exists()
    assert (sandbox.cache / "cllm" / "src" / f"{SDIST}.tar.gz").is_file()


def test_clean_leaves_a_link_into_another_cache_alone(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.build()
    sandbox.build("--clean", XDG_CACHE_HOME=str(tmp_path / "other"))
    assert (sandbox.link / "lib" / "libllama.so").is_file()


def test_everything_that_is_missing_is_named_in_one_line(sandbox: Sandbox, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "env", "getconf", "paste", "sha256sum", "tar", "uniq"):
        found = shutil.which(name)
        assert found is not None
        (bare / name).symlink_to(found)
    result = sandbox.run(PATH=str(bare))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "build_llama.sh: missing: cmake, a C compiler (cc), a C++ compiler (c++), ninja or make, "
        "flock, python, pip; on Debian or Ubuntu: apt install cmake build-essential ninja-build "
        "util-linux python3 python3-pip"
    ]


def test_a_missing_model_to_check_with_is_found_before_the_build(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    result = sandbox.run(CLLM_CHECK_MODEL=str(tmp_path / "none.gguf"))
    assert result.returncode == 1
    assert "none.gguf is missing" in result.stderr
    assert sandbox.log("ninja") == []


@pytest.mark.parametrize(
    "arguments",
    [["--nonsense"], ["--jobs", "none"], ["--jobs"], ["--source", "."], ["extra"]],
    ids=" ".join,
)
def test_a_misuse_is_one_line_and_exit_status_2(sandbox: Sandbox, arguments: list[str]) -> None:
    result = sandbox.run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_help_names_every_option(sandbox: Sandbox) -> None:
    output = sandbox.build("--help")
    script = (PROJECT / "build_llama.sh").read_text(encoding="utf-8")
    parser = script[script.index("parse_arguments() {") : script.index("check_needs() {")]
    options = set(re.findall(r"--[a-z]+", parser))
    assert {"--source", "--tools", "--cuda", "--clean"} < options
    assert [option for option in sorted(options) if option not in output] == []
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.parametrize("options", [(), ("--verbose",)])
def test_the_log_is_named_where_one_is_written(sandbox: Sandbox, options: tuple[str, ...]) -> None:
    said = sandbox.build(*options)
    assert ("; log: " in said) is (options == ())
    assert any(sandbox.cache.rglob("build.log")) is (options == ())


def test_as_many_jobs_run_as_the_process_has_processors(sandbox: Sandbox) -> None:
    write_program(sandbox.stub / "bin" / "nproc", "echo 1")
    sandbox.build()
    assert "-j 1 " in sandbox.log("ninja")[-1]


def test_jobs_is_passed_on(sandbox: Sandbox) -> None:
    sandbox.build("--jobs", "7")
    assert "-j 7" in sandbox.log("ninja")[0]
