"""Two referees agree with the declarations, and each catches every kind of wrong one.

The C compiler reads every prototype beside the installed llama.h (C rejects a conflicting
redeclaration) and checks struct sizes, field offsets and enum values.  cffi's parser reads the same
text independently, and its layouts and argument types are compared with ours.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

import cffi
import pytest

from cllm.bindings import _llama_h as h
from cllm.bindings import library

Enums = Mapping[type[IntEnum] | type[IntFlag], tuple[str, str]]


def enum_values(enums: Enums) -> list[tuple[str, int]]:
    """Full C names and values of all enum members."""
    return [
        (prefix + name, member.value)
        for enum, (_, prefix) in enums.items()
        for name, member in enum.__members__.items()
    ]


def complaint_of_the_compiler(declarations: h.Declarations, enums: Enums = h.C_PREFIX) -> str:
    """What the C compiler has against the declarations; empty if nothing."""
    include = library().path.parent.parent / "include"
    assert (include / "llama.h").is_file(), "build_llama.sh installs the headers"
    typedefs, _, prototypes = declarations.text
    lines = ["#include <stddef.h>", '#include "llama.h"', typedefs, prototypes]
    for name, struct in declarations.structs.items():
        c_name = f"struct {name}"
        lines.append(f'_Static_assert(sizeof({c_name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, ctype, *_ in struct._fields_:
            descriptor = getattr(struct, field)
            where = f"({c_name} *) 0)->{field}"
            lines += [
                f'_Static_assert(offsetof({c_name}, {field}) == {descriptor.offset}, "{field}");',
                f'_Static_assert(sizeof(({where}) == {ctypes.sizeof(ctype)}, "{field}");',
            ]
    # A pointer of another type has the same size: only assigning its address tells them apart.
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", declarations.text[1], re.S):
        lines.append(f"static void check_{name}(struct {name} * s) {{ (void) s;")
        for statement in body.split(";"):
            if statement.strip():
                field = statement.replace("*", " ").split()[-1]
                field_type = " ".join(statement.split()).removesuffix(field).strip()
                lines.append(f"    {{ {field_type} * same = &s->{field}; (void) same; }}")
        lines.append("}")
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in enum_values(enums)]
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    done = subprocess.run(
        [compiler, "-std=c11", "-fsyntax-only", "-Werror", "-Wno-unused-function", "-x", "c",
         f"-I{include}", "-"],
        input="\n".join(lines), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr if done.returncode else ""


def complaints_of_cffi(
    declarations: h.Declarations, text: tuple[str, str, str], enums: Enums = h.C_PREFIX
) -> list[str]:
    """Where cffi's reading of `text` differs from our ctypes reading."""
    ffi = cffi.FFI()
    typedefs, structs, prototypes = text
    enum_text = "".join(
        f"enum {c_name} {{ {', '.join(f'{prefix}{n} = {m.value}' for n, m in e.__members__.items())} }};"
        for e, (c_name, prefix) in enums.items()
    )
    ffi.cdef(f"{enum_text}\n{typedefs}\n{structs}\n{prototypes}")
    found = []
    for name, struct in declarations.structs.items():
        c_struct = ffi.typeof(f"struct {name}")
        if ffi.sizeof(c_struct) != ctypes.sizeof(struct):
            found.append(f"sizeof {name}")
        theirs = dict(c_struct.fields)
        for field, ctype, *_ in struct._fields_:
            if field not in theirs:
                found.append(f"{name}.{field}")
                continue
            if theirs[field].offset != getattr(struct, field).offset:
                found.append(f"offset of {name}.{field}")
            if shape_of_cffi(theirs[field].type) != shape_of_ctypes(ctype):
                found.append(f"type of {name}.{field}")
    loaded = ffi.dlopen(str(library().path))
    for name, prototype in declarations.prototypes.items():
        function = ffi.typeof(getattr(loaded, name))
        ours = [shape_of_ctypes(t) for t in prototype.argtypes]
        if [shape_of_cffi(t) for t in function.args] != ours:
            found.append(f"arguments of {name}")
        if shape_of_cffi(function.result) != shape_of_ctypes(prototype.restype):
            found.append(f"result of {name}")
    return found


SCALAR_SHAPES = {
    ctypes.c_bool: "bool", ctypes.c_char: "char", ctypes.c_float: "float",
    ctypes.c_double: "double", ctypes.c_int8: "int8", ctypes.c_uint8: "uint8",
    ctypes.c_int32: "int32", ctypes.c_uint32: "uint32", ctypes.c_int64: "int64",
    ctypes.c_uint64: "uint64", None: "void",
}  # fmt: skip
CFFI_SHAPES = {
    "_Bool": "bool", "bool": "bool", "char": "char", "float": "float", "double": "double",
    "int8_t": "int8", "signed char": "int8", "uint8_t": "uint8", "unsigned char": "uint8",
    "int32_t": "int32", "int": "int32", "uint32_t": "uint32", "unsigned int": "uint32",
    "int64_t": "int64", "long": "int64", "uint64_t": "uint64", "size_t": "uint64",
    "unsigned long": "uint64", "void": "void",
}  # fmt: skip


def shape_of_ctypes(ctype: Any) -> str:
    """A ctypes type in the words both referees share."""
    if ctype in SCALAR_SHAPES:
        return SCALAR_SHAPES[ctype]
    if ctype is ctypes.c_char_p:
        return "char*"
    if ctype is ctypes.c_void_p:
        return "void*"
    if isinstance(ctype, type) and issubclass(ctype, ctypes.Structure):
        return ctype.__name__
    if hasattr(ctype, "_argtypes_"):  # a callback
        arguments = ", ".join(shape_of_ctypes(t) for t in ctype._argtypes_)
        return f"{shape_of_ctypes(ctype._restype_)}({arguments})"
    return shape_of_ctypes(ctype._type_) + "*"


def shape_of_cffi(ctype: Any) -> str:
    """A cffi type in the words both referees share."""
    match ctype.kind:
        case "primitive" | "void":
            return CFFI_SHAPES[ctype.cname]
        case "enum":
            # token_attr is a set of flags and has no negative member: unsigned, like gcc has it.
            return "uint32" if ctype.cname == "enum llama_token_attr" else "int32"
        case "pointer":
            return shape_of_cffi(ctype.item) + "*"
        case "struct":
            return str(ctype.cname).removeprefix("struct ")
        case "function":
            arguments = ", ".join(shape_of_cffi(t) for t in ctype.args)
            return f"{shape_of_cffi(ctype.result)}({arguments})"
        case kind:
            raise AssertionError(f"{kind}: {ctype}")


def test_the_c_compiler_accepts_every_declaration_beside_llama_h() -> None:
    assert complaint_of_the_compiler(h.DECLARATIONS) == ""


def test_cffi_reads_the_same_layouts_and_signatures_from_the_text() -> None:
    assert complaints_of_cffi(h.DECLARATIONS, h.DECLARATIONS.text) == []


def test_every_declared_function_is_in_the_library() -> None:
    for name in h.DECLARATIONS.prototypes:
        assert getattr(library(), name) is not None
    assert set(h.DECLARATIONS.prototypes) >= h.RELEASES_GIL


def test_the_pinned_commit_and_header_are_the_ones_build_llama_sh_installs() -> None:
    script = (Path(__file__).parents[2] / "build_llama.sh").read_text()
    assert h.LLAMA_CPP_COMMIT in script
    assert library().record["commit"] == h.LLAMA_CPP_COMMIT
    assert library().record["llama_h_sha256"] == h.LLAMA_H_SHA256


def replaced(index: int, old: str, new: str) -> Callable[[], tuple[str, str, str]]:
    """The C text with one declaration changed: 0 typedefs, 1 structs, 2 prototypes."""

    def make() -> tuple[str, str, str]:
        parts = list(h.DECLARATIONS.text)
        assert parts[index].count(old) == 1, old
        parts[index] = parts[index].replace(old, new)
        return parts[0], parts[1], parts[2]

    return make


WRONG = {
    "an integer of another width": replaced(
        2, "uint32_t llama_n_batch(", "uint64_t llama_n_batch("
    ),
    "an integer of another sign": replaced(2, "uint32_t llama_n_ubatch(", "int32_t llama_n_ubatch("),
    "double for float": replaced(2, "init_top_p(float p,", "init_top_p(double p,"),
    "another pointer type": replaced(
        2, "void llama_synchronize(struct llama_context *", "void llama_synchronize(struct llama_model *"
    ),
    "another return type": replaced(2, "bool llama_memory_seq_rm(", "void llama_memory_seq_rm("),
    "an argument too few": replaced(
        2, "llama_seq_id seq_id, llama_pos p0, llama_pos p1);\nvoid llama_memory_seq_cp",
        "llama_seq_id seq_id, llama_pos p0);\nvoid llama_memory_seq_cp",
    ),
    "fields in another order": replaced(
        1, "    llama_token * token;\n    float * embd;", "    float * embd;\n    llama_token * token;"
    ),
    "a field of another width": replaced(1, "    int64_t selected;", "    int32_t selected;"),
    "a field of another pointer type": replaced(1, "    int8_t * logits;", "    int32_t * logits;"),
    "a typedef of another width": replaced(
        0, "typedef int32_t llama_pos;", "typedef int64_t llama_pos;"
    ),
    "a callback of another signature": replaced(
        0, "(*ggml_abort_callback)(void * data)", "(*ggml_abort_callback)(int32_t data)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_the_compiler_catches(kind: str) -> None:
    assert complaint_of_the_compiler(h.Declarations(*WRONG[kind]())) != ""


@pytest.mark.parametrize("kind", WRONG)
def test_cffi_catches_our_reading_differing_from_the_text(kind: str) -> None:
    """cffi reads the true text, our parser the changed one: they must disagree."""
    changed = h.Declarations(*WRONG[kind]())
    assert complaints_of_cffi(changed, h.DECLARATIONS.text) != []


def test_the_compiler_catches_a_stale_enum_value() -> None:
    """The mistake of another binding: an old header's ERROR = 3."""
    stale = IntEnum("stale", {"ERROR": 3})
    complaint = complaint_of_the_compiler(
        h.DECLARATIONS, {stale: ("ggml_log_level", "GGML_LOG_LEVEL_")}
    )
    assert "GGML_LOG_LEVEL_ERROR" in complaint


def test_a_struct_pointer_of_the_wrong_kind_is_refused_by_ctypes() -> None:
    wrong = h.DECLARATIONS.types["struct llama_model"]()
    with pytest.raises(ctypes.ArgumentError):
        library().llama_n_ctx(ctypes.pointer(wrong))


def test_o9_nothing_deprecated_is_declared() -> None:
    header = (library().path.parent.parent / "include" / "llama.h").read_text()
    deprecated = set(re.findall(r"DEPRECATED\([^;]*?\b(llama_\w+)\s*\(", header))
    assert "llama_load_model_from_file" in deprecated
    assert not deprecated & set(h.DECLARATIONS.prototypes)


def test_o8_there_is_one_way_to_llama_decode() -> None:
    package = Path(h.__file__).parents[1]
    callers = [path.name for path in package.rglob("*.py") if ".llama_decode(" in path.read_text()]
    assert callers == ["context.py"]
    assert (package / "bindings" / "context.py").read_text().count(".llama_decode(") == 1
