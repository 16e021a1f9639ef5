"""Let attention on a CPU skip masked cells; `build_llama.sh` runs it on the pinned source before it compiles.

In a unified KV buffer every row attends to the cells of its own sequence, and llama.cpp tests the mask of all others
one by one, in each layer and head.  With this change it tests 16 at a time, and a tile of a prompt converts its mask
only if one of its rows has a cell in it.  The same cells are computed in the same order, so no bit of a result
changes.

Usage: skip_masked_cells.py SOURCE

SOURCE : directory of llama.cpp's source; the exit code is 1, and nothing is changed, if it has other code
"""

from __future__ import annotations

import sys
from pathlib import Path

FILE = Path("ggml/src/ggml-cpu/ops.cpp")

COUNT = """\
// number of masked cells (-inf) at the beginning of n cells
static inline int64_t ggml_fa_n_masked(const ggml_fp16_t * mp, int64_t n) {
    static const ggml_fp16_t masked[16] = {
        0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00,
        0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00,
    };
    int64_t i = 0;
    while (i + 16 <= n && memcmp(mp + i, masked, sizeof(masked)) == 0) {
        i += 16;
    }
    while (i < n && mp[i] == 0xFC00) {
        i++;
    }
    return i;
}

"""

# Each text occurs once; the second one goes before it.
INSERTIONS = {
    "static void ggml_compute_forward_flash_attn_ext_f16_one_chunk(\n": COUNT,
    "                continue;\n            }\n\n            float s; // KQ value\n": """\
                ic += ggml_fa_n_masked(mp + ic + 1, ic_end - ic - 1);
""",
    "                for (int tq = 0; tq < tile_rows; tq++) {\n"
    "                    const ggml_fp16_t * mp_row =": """\
                for (int tq = 0; tq < tile_rows && can_skip; tq++) {
                    const char * row = (const char *) mask->data + (iq1 + tq)*mask->nb[1]
                        + (iq2%mask->ne[2])*mask->nb[2] + (iq3%mask->ne[3])*mask->nb[3];
                    can_skip = ggml_fa_n_masked((const ggml_fp16_t *) row + ic, kv_tile) == kv_tile;
                }
                if (can_skip) {
                    continue;
                }
""",
}


def main() -> int:
    """Change the source; return the exit code."""
    path = Path(sys.argv[1]) / FILE
    code = path.read_text(encoding="utf-8") if path.is_file() else ""
    for before, inserted in INSERTIONS.items():
        if code.count(before) != 1:
            print(f"{FILE} does not have this once:\n{before}", file=sys.stderr)
            return 1
        code = code.replace(before, inserted + before)
    path.write_text(code, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
