"""Compare cllm's declarations with the headers of a llama.cpp tree; `build_llama.sh` runs it before it compiles.

The C compiler checks each prototype, type of a field, typedef and enum value against the headers.  The offsets
of fields in llama.cpp's structures of parameters may differ between versions.  They are measured and
recorded, and cllm reads the record when it loads the library (`Declarations.lay_out`).

Usage: check_headers.py HEADER RECORDS DIR...

HEADER : llama.h or mtmd.h, the header to compare
RECORDS : a directory; the record is written there, in a file named after the declarations
DIR : directories with this header, llama.h and ggml's headers

The program needs the standard library, a C compiler (`CC`) and cllm's source files, but no libllama and no
installed packages.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DECLARATIONS = ROOT / "cllm" / "bindings" / "_llama_h.py"
MODULES = {"llama.h": "_llama_h", "mtmd.h": "_mtmd_h"}
ERROR = re.compile(r"^([\w.]+):\d+(?::\d+)?: (?:fatal )?error: (.*)$", re.M)
UNDECLARED = "undeclared"  # gcc: 'x' undeclared; clang: undeclared identifier


def declarations_of(header: str) -> Any:
    """Return cllm's declarations of a header, without running the packages around them.

    numpy and anyio, which they import, may not be installed yet.
    """
    for name in ("cllm", "cllm.bindings"):
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
            sys.modules[name] = package
    return importlib.import_module(f"cllm.bindings.{MODULES[header]}").DECLARATIONS


def complaints(declared: Any, directories: Sequence[Path]) -> dict[str, str]:
    """Return the first error of the compiler for each declaration, by its name; empty if all of them fit.

    Parameters
    ----------
    declared : Declarations
    directories : sequence of Path
        Directories of the headers.
    """
    checks = [*_of_types(declared), *_of_functions(declared), *_of_enums(declared)]
    lines = [f'#include <stddef.h>\n#include "{declared.header}"']
    lines += [f'#line 1 "{name}"\n{code}' for name, code in checks]
    done = _compiled(lines, directories, "-fsyntax-only")
    found: dict[str, str] = {}
    for name, text in ERROR.findall(done.stderr):
        found.setdefault(name, text)
    if done.returncode and not found:
        raise SystemExit(f"check_headers.py: the compiler fails: {done.stderr.strip()}")
    return found


def layout(declared: Any, directories: Sequence[Path]) -> dict[str, Any]:
    """Return the size of each structure of parameters and the offsets of its fields, in bytes."""
    lines = [f'#include <stddef.h>\n#include <stdio.h>\n#include "{declared.header}"']
    lines.append("int main(void) {")
    for name in sorted(declared.parameters):
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));'
            for field in declared.fields[name]
        ]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "layout"
        done = _compiled([*lines, "return 0; }"], directories, "-o", str(program))
        if done.returncode:
            raise SystemExit(f"check_headers.py: the compiler fails: {done.stderr.strip()}")
        emulator = os.environ.get("CLLM_EMULATOR", "").split()
        told = subprocess.run(
            [*emulator, program], capture_output=True, text=True, check=True
        ).stdout
    structs: dict[str, Any] = {}
    for line in told.splitlines():
        name, number = line.split()
        struct, _, field = name.partition(".")
        if field:
            structs[struct]["offsets"][field] = int(number)
        else:
            structs[struct] = {"size": int(number), "offsets": {}}
    return structs


def _of_types(declared: Any) -> Iterator[tuple[str, str]]:
    """Yield names of declarations, each with C code that compiles only if the declaration is right."""
    for name, text in declared.typedefs.items():
        yield name, f"{text};"
    for struct, fields in declared.fields.items():
        for field, c_type in fields.items():
            # A pointer of another type has the same size: only assigning its address tells them apart.
            code = f"{{ {c_type} * same = &s->{field}; (void) same; }}"
            yield f"{struct}.{field}", f"static void f_{struct}_{field}(struct {struct} * s) {code}"
        if struct not in declared.parameters:
            natural = declared.structs[struct]
            for field in fields:
                offset = getattr(natural, field).offset
                condition = f"offsetof(struct {struct}, {field}) == {offset}"
                yield f"{struct}.{field}", f'_Static_assert({condition}, "is elsewhere");'
            size = ctypes.sizeof(natural)
            yield (
                struct,
                f'_Static_assert(sizeof(struct {struct}) == {size}, "is not {size} bytes");',
            )


def _of_functions(declared: Any) -> Iterator[tuple[str, str]]:
    for name, prototype in declared.prototypes.items():
        # C accepts a prototype for a function that no header declares.  Its address, taken before, is an error.
        yield name, f"static void * g_{name}(void) {{ return (void *) &{name}; }}"
        yield name, f"{prototype.text};"


def _of_enums(declared: Any) -> Iterator[tuple[str, str]]:
    for enum, (c_name, prefix) in declared.enums.items():
        yield c_name, f'_Static_assert(sizeof(enum {c_name}) == 4, "is not 4 bytes");'
        for name, member in enum.__members__.items():
            full, value = prefix + name, member.value
            yield full, f'_Static_assert({full} == {value}, "is not {value}");'


def _compiled(
    lines: Sequence[str], directories: Sequence[Path], *options: str
) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CC", "cc").split()
    flags = ["-std=c11", "-Werror=incompatible-pointer-types", "-Wno-deprecated-declarations"]
    flags += ["-Wno-unused-function", "-fdiagnostics-color=never"]
    places = [f"-I{directory}" for directory in directories]
    return subprocess.run(
        [*compiler, *flags, *places, "-x", "c", "-", *options],
        input="\n".join(lines), capture_output=True, text=True, check=False,
        env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip


def main() -> int:
    """Write the record, or print the declarations that do not fit and return 1."""
    header, records, *directories = sys.argv[1], *map(Path, sys.argv[2:])
    declared = declarations_of(header)
    path = records / f"{declared.digest}.json"
    if path.exists():
        return 0
    found = complaints(declared, directories)
    wrong = [
        f"  {name}: {text}"
        for name, text in found.items()
        if not (name in declared.optional and UNDECLARED in text)
    ]
    if wrong:
        print(f"{header} and cllm's declarations differ, {len(wrong)} times:", file=sys.stderr)
        print("\n".join(wrong), file=sys.stderr)
        return 1
    records.mkdir(parents=True, exist_ok=True)
    record = {"structs": layout(declared, directories)}
    waiting = path.with_suffix(f".{os.getpid()}")
    waiting.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    waiting.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
