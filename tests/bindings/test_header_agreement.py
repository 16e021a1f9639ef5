"""Two referees agree with the declarations, and each catches every kind of wrong one.

The C compiler reads every declaration beside the installed headers (`tools/native/check_headers.py`).
cffi's parser reads the same text independently, and its layouts and argument types are compared with
ours.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

import cffi
import pytest

from cllm.bindings import _llama_h as h
from cllm.bindings import library
from cllm.bindings._declarations import Declarations
from cllm.bindings._layout import layouts_of
from tools.native import check_headers

Enums = Mapping[type[IntEnum] | type[IntFlag], tuple[str, str]]
SCRIPT = Path(check_headers.__file__)


def headers() -> Path:
    """The directory of the headers of the library in use."""
    return library().path.parent.parent / "include"


def declarations(*text: str, enums: Enums = h.C_PREFIX, laid_out: bool = True) -> Declarations:
    """Declarations of this C text, with the structures as the library has them."""
    typedefs, structs, prototypes = text or h.DECLARATIONS.text
    made = Declarations(typedefs, structs, prototypes, enums, parameters=h.PARAMETERS)
    if laid_out:
        made.lay_out(layouts_of(library().path, h.DECLARATIONS))
    return made


def padded(struct: str) -> str:
    """The C text of a structure of parameters, with what is not declared as bytes."""
    layout = layouts_of(library().path, h.DECLARATIONS)[struct]
    types, text, end = h.DECLARATIONS.fields[struct], "", 0
    placed = sorted((layout["offsets"][field], field) for field in types)
    for offset, field in [*placed, (layout["size"], "")]:
        if offset > end:
            text += f"char _{end}[{offset - end}];"
        if field:
            text += f"{types[field]} {field};"
            descriptor = getattr(h.DECLARATIONS.structs[struct], field)
            end = offset + descriptor.size
    return f"struct {struct} {{ {text} }};"


def complaints_of_cffi(
    declarations: Declarations, text: tuple[str, str, str], enums: Enums = h.C_PREFIX
) -> list[str]:
    """Where cffi's reading of `text` differs from our ctypes reading."""
    ffi = cffi.FFI()
    typedefs, structs, prototypes = text
    enum_text = "".join(
        f"enum {c_name} {{ {', '.join(f'{prefix}{n} = {m.value}' for n, m in e.__members__.items())} }};"
        for e, (c_name, prefix) in enums.items()
    )
    for name in declarations.parameters & declarations.structs.keys():
        (own,) = re.findall(rf"struct {name} \{{.*?\}};", structs, re.S)
        structs = structs.replace(own, padded(name))
    ffi.cdef(f"{enum_text}\n{typedefs}\n{structs}\n{prototypes}")
    found = []
    for name, struct in declarations.structs.items():
        c_struct = ffi.typeof(f"struct {name}")
        if ffi.sizeof(c_struct) != ctypes.sizeof(struct):
            found.append(f"sizeof {name}")
        theirs = dict(c_struct.fields)
        for field, ctype, *_ in struct._fields_:
            if field.startswith("_"):
                continue
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
    assert check_headers.complaints(h.DECLARATIONS, [headers()]) == {}


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
    wrong = declarations(*WRONG[kind](), laid_out=False)
    assert check_headers.complaints(wrong, [headers()]) != {}


@pytest.mark.parametrize("kind", WRONG)
def test_cffi_catches_our_reading_differing_from_the_text(kind: str) -> None:
    """cffi reads the true text, our parser the changed one: they must disagree."""
    changed = declarations(*WRONG[kind]())
    assert complaints_of_cffi(changed, h.DECLARATIONS.text) != []


def test_the_compiler_catches_a_stale_enum_value() -> None:
    """The mistake of another binding: an old header's ERROR = 3."""
    stale = IntEnum("stale", {"ERROR": 3})
    wrong = declarations(enums={stale: ("ggml_log_level", "GGML_LOG_LEVEL_")}, laid_out=False)
    assert [*check_headers.complaints(wrong, [headers()])] == ["GGML_LOG_LEVEL_ERROR"]


# --- Other versions of llama.cpp --------------------------------------------------------------------


@pytest.fixture
def changed_headers(tmp_path: Path) -> Callable[[str, str], Path]:
    """Make a copy of the headers with something else in llama.h."""

    def make(old: str, new: str) -> Path:
        copy = tmp_path / "include"
        shutil.copytree(headers(), copy)
        text = (copy / "llama.h").read_text()
        found = re.sub(old, new, text, count=1)
        assert found != text
        (copy / "llama.h").write_text(found)
        return copy

    return make


def checked(headers: Path, records: Path) -> subprocess.CompletedProcess[str]:
    """Compare headers with the declarations as build_llama.sh does."""
    command = [sys.executable, str(SCRIPT), "llama.h", str(records), str(headers)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_fields_that_have_moved_are_laid_out_where_the_headers_have_them(
    changed_headers: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """The next release after the pin had a new field in the middle."""
    changed = changed_headers(
        r"( +)(ggml_abort_callback\s+abort_callback;)", r"\1size_t brand_new_size;\n\1\2"
    )
    assert checked(changed, tmp_path / "records").stderr == ""
    (record,) = (tmp_path / "records").iterdir()
    assert record.name == f"{h.DECLARATIONS.digest}.json"
    made = declarations(laid_out=False)
    made.lay_out(json.loads(record.read_text())["structs"])
    own, moved = (each.structs["llama_context_params"] for each in (h.DECLARATIONS, made))
    assert ctypes.sizeof(moved) == ctypes.sizeof(own) + 8
    assert moved.n_ctx.offset == own.n_ctx.offset
    for name in ("abort_callback", "abort_callback_data", "embeddings", "kv_unified"):
        assert getattr(moved, name).offset == getattr(own, name).offset + 8
    with pytest.raises(AttributeError):
        moved().brand_new_size = 1


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (r"bool offload_kqv;", "", "llama_context_params.offload_kqv"),
        (r"bool offload_kqv;", "int32_t offload_kqv;", "llama_context_params.offload_kqv"),
        (r"int32_t +llama_encode\(", "int32_t llama_encodes(", "llama_encode"),
        (r"typedef int32_t llama_pos;", "typedef int64_t llama_pos;", "llama_pos"),
        (r"LLAMA_POOLING_TYPE_RANK += 4", "LLAMA_POOLING_TYPE_RANK = 5", "LLAMA_POOLING_TYPE_RANK"),
        (r"( +)(int8_t +\* +logits;)", r"\1float * temperatures;\n\1\2", "llama_batch.logits"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_compiled(
    old: str, new: str, named: str, changed_headers: Callable[[str, str], Path], tmp_path: Path
) -> None:
    done = checked(changed_headers(old, new), tmp_path / "records")
    assert done.returncode == 1
    assert re.search(rf"^  {re.escape(named)}: ", done.stderr, re.M), done.stderr
    assert not (tmp_path / "records").exists()


def test_a_library_may_lack_the_functions_that_are_needed_now_and_then(
    changed_headers: Callable[[str, str], Path], tmp_path: Path
) -> None:
    changed = changed_headers(r"uint32_t llama_model_quantize\(", "uint32_t llama_quantize_model(")
    assert checked(changed, tmp_path / "records").stderr == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda layout: layout["offsets"].pop("n_ctx"), "llama_context_params has no n_ctx"),
        (
            lambda layout: layout["offsets"].update(n_ctx=2),
            "the fields of llama_context_params cannot",
        ),
        (lambda layout: layout.update(size=12), "the fields of llama_context_params cannot"),
    ],
)
def test_a_layout_that_cannot_be_is_rejected(change: Callable[[Any], Any], told: str) -> None:
    layouts = json.loads(json.dumps(layouts_of(library().path, h.DECLARATIONS)))
    change(layouts["llama_context_params"])
    with pytest.raises(ValueError, match=told):
        declarations(laid_out=False).lay_out(layouts)


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
