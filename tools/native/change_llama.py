"""Change code of llama.cpp's CPU backend; `build_llama.sh` runs this on the pinned source before it compiles.

- Attention.  In a unified KV buffer every row attends to the cells of its own sequence, and llama.cpp tests the mask of
  all others one by one, in each layer and head.  With the change it tests 16 at a time, and a tile of a prompt converts
  its mask only if one of its rows has a cell in it.  No bit of a result changes.
- Matrices of Q6_K, such as the output matrix of Q4_K_M.  llama.cpp multiplies one row of a batch after another, decodes
  the weights for each, and changes to tiles at 8 rows.  With the change, up to four rows share the decoding, and tiles
  begin at `N_TILE_ROWS` rows, where they become faster.  Fewer rows have the bits that each has alone.
- Matrices of Q4_K.  llama.cpp has tiles for the order of the file only, not for that of AVX2 (`repack`), which is faster
  for few rows.  With the change, matrices whose number of rows is a multiple of 256 are multiplied by tiles in that
  order too, from `N_TILE_ROWS` rows of a batch on.  The result has the bits of `repack=False`.

Matrices of experts are multiplied as before.

Usage: change_llama.py SOURCE

SOURCE : directory of llama.cpp's source; the exit code is 1, and nothing is changed, if it has other code
"""

from __future__ import annotations

import sys
from pathlib import Path

CPU = Path("ggml/src/ggml-cpu")
N_TILE_ROWS = 24

N_MASKED = """\
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


def ahead_of(old: str, inserted: str) -> dict[str, str]:
    """Return the edit that inserts text before another one."""
    return {old: inserted + old}


ATTENTION = {
    **ahead_of("static void ggml_compute_forward_flash_attn_ext_f16_one_chunk(\n", N_MASKED),
    **ahead_of(
        "                continue;\n            }\n\n            float s; // KQ value\n",
        """\
                ic += ggml_fa_n_masked(mp + ic + 1, ic_end - ic - 1);
""",
    ),
    **ahead_of(
        "                for (int tq = 0; tq < tile_rows; tq++) {\n"
        "                    const ggml_fp16_t * mp_row =",
        """\
                for (int tq = 0; tq < tile_rows && can_skip; tq++) {
                    const char * row = (const char *) mask->data + (iq1 + tq)*mask->nb[1]
                        + (iq2%mask->ne[2])*mask->nb[2] + (iq3%mask->ne[3])*mask->nb[3];
                    can_skip = ggml_fa_n_masked((const ggml_fp16_t *) row + ic, kv_tile) == kv_tile;
                }
                if (can_skip) {
                    continue;
                }
""",
    ),
}

Q6_K_PRODUCTS = """\
#if defined __AVX2__
// products of a row of Q6_K and n_rows (1 to 4) rows of Q8_K; a product is that of ggml_vec_dot_q6_K_q8_K to the bit
static inline __attribute__((always_inline)) void q6_K_q8_K_products(
        const int n_rows, int n, float * s, size_t bs, const block_q6_K * x, const char * vy, size_t by) {
    const __m256i m15 = _mm256_set1_epi8(15);
    __m256 acc[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };

    for (int i = 0; i < n / QK_K; ++i) {
        const __m128i scales = _mm_loadu_si128((const __m128i *) x[i].scales);
        const __m256i scales_16 = _mm256_cvtepi8_epi16(scales);
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d);
        __m256i sumi[4];
        for (int r = 0; r < n_rows; ++r) {
            sumi[r] = _mm256_setzero_si256();
        }
        for (int j = 0; j < QK_K/128; ++j) {
            const __m256i l0 = _mm256_loadu_si256((const __m256i *) (x[i].ql + 64*j));
            const __m256i l1 = _mm256_loadu_si256((const __m256i *) (x[i].ql + 64*j + 32));
            const __m256i h = _mm256_loadu_si256((const __m256i *) (x[i].qh + 32*j));
            const __m256i q[4] = {
                _mm256_or_si256(_mm256_and_si256(l0, m15),
                    _mm256_slli_epi16(_mm256_and_si256(h, _mm256_set1_epi8(3)), 4)),
                _mm256_or_si256(_mm256_and_si256(l1, m15),
                    _mm256_slli_epi16(_mm256_and_si256(h, _mm256_set1_epi8(12)), 2)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), m15),
                    _mm256_and_si256(h, _mm256_set1_epi8(48))),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), m15),
                    _mm256_srli_epi16(_mm256_and_si256(h, _mm256_set1_epi8(-64)), 2)),
            };
            for (int k = 0; k < 4; ++k) {
                const __m256i scale = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, get_scale_shuffle(4*j + k)));
                for (int r = 0; r < n_rows; ++r) {
                    const block_q8_K * y = (const block_q8_K *) (vy + r*by) + i;
                    const __m256i q8 = _mm256_loadu_si256((const __m256i *) (y->qs + 128*j + 32*k));
                    sumi[r] = _mm256_add_epi32(sumi[r], _mm256_madd_epi16(scale, _mm256_maddubs_epi16(q[k], q8)));
                }
            }
        }
        for (int r = 0; r < n_rows; ++r) {
            const block_q8_K * y = (const block_q8_K *) (vy + r*by) + i;
            const __m256i q8sums = _mm256_loadu_si256((const __m256i *) y->bsums);
            const __m256i below = _mm256_slli_epi32(_mm256_madd_epi16(q8sums, scales_16), 5);
            const __m256 sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sumi[r], below));
            acc[r] = _mm256_fmadd_ps(_mm256_set1_ps(y->d * d), sum, acc[r]);
        }
    }
    for (int r = 0; r < n_rows; ++r) {
        *(float *) ((char *) s + r*bs) = hsum_float_8(acc[r]);
    }
}

// products of a row of Q6_K and n_rows (1 to 4) rows of Q8_K, by bytes apart; results lie bs bytes apart
void ggml_rows_q6_K_q8_K(int n_rows, int n, float * s, size_t bs, const void * x, const void * y, size_t by) {
    switch (n_rows) {
        case 1: q6_K_q8_K_products(1, n, s, bs, x, y, by); break;
        case 2: q6_K_q8_K_products(2, n, s, bs, x, y, by); break;
        case 3: q6_K_q8_K_products(3, n, s, bs, x, y, by); break;
        default: q6_K_q8_K_products(4, n, s, bs, x, y, by); break;
    }
}
#endif

"""

MATRIX = {
    **ahead_of(
        "static void ggml_compute_forward_mul_mat_one_chunk(\n",
        """\
#if defined(__AVX2__)
void ggml_rows_q6_K_q8_K(int n_rows, int n, float * s, size_t bs, const void * x, const void * y, size_t by);
#endif

""",
    ),
    **ahead_of(
        "    // attempt to reduce false-sharing (does not seem to make a difference)\n",
        """\
#if defined(__AVX2__)
    if (type == GGML_TYPE_Q6_K && ir1_end - ir1_start > 1 && ne12 == 1 && ne13 == 1 && !params->use_ref) {
        for (int64_t iir0 = ir0_start; iir0 < ir0_end; iir0 += blck_0) {
            for (int64_t ir1 = ir1_start; ir1 < ir1_end; ir1 += 4) {
                for (int64_t ir0 = iir0; ir0 < MIN(iir0 + blck_0, ir0_end); ++ir0) {
                    ggml_rows_q6_K_q8_K(MIN(4, ir1_end - ir1), ne00,
                        (float *) ((char *) dst->data + ir1*nb1) + ir0, nb1, (const char *) src0->data + ir0*nb01,
                        (const char *) wdata + ir1*src1_col_stride, src1_col_stride);
                }
            }
        }
        return;
    }
#endif

""",
    ),
}

UNPACK_Q4_K = """\
// unpack groups of 8 rows of Q4_K that are interleaved, as repack.cpp has them
static void tiled_unpack_src0(const block_q4_Kx8 * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    GGML_ASSERT(n_rows <= TILED_TILE_ROWS);
    const int qk_stride = num_k * TILED_TILE_K;
    const int nb_stride = 8 * num_k;
    for (int slab = 0; slab < num_k; slab++) {
        for (int r0 = 0; r0 < n_rows; r0 += 8) {
            const block_q4_Kx8 & x = rows[r0 / 8 * row_stride + slab];
            for (int s = 0; s < 8; s++) {
                // scales and mins of sub-block s of the 8 rows, packed as those of a block of Q4_K
                uint32_t utmp[4];
                memcpy(utmp, x.scales + 12 * s, 12);
                utmp[3] = ((utmp[2] >> 4) & 0x0f0f0f0f) | (((utmp[1] >> 6) & 0x03030303) << 4);
                const uint32_t uaux = utmp[1] & 0x3f3f3f3f;
                utmp[1] = (utmp[2] & 0x0f0f0f0f) | (((utmp[0] >> 6) & 0x03030303) << 4);
                utmp[2] = uaux;
                utmp[0] &= 0x3f3f3f3f;
                for (int r = 0; r < 8; r++) {
                    tile->scales[(r0 + r) * nb_stride + slab * 8 + s] = ((const uint8_t *) utmp)[r];
                    tile->mins[(r0 + r) * nb_stride + slab * 8 + s] = ((const uint8_t *) utmp)[8 + r];
                }
            }
            for (int r = 0; r < 8; r++) {
                tile->d[slab * TILED_MICRO + r0 + r] = ggml_fp16_to_fp32(x.d[r]);
                tile->dmin[slab * TILED_MICRO + r0 + r] = ggml_fp16_to_fp32(x.dmin[r]);
                uint8_t * q = &tile->q[(r0 + r) * qk_stride + slab * TILED_TILE_K];
                for (int j = 0; j < 4; j++) {
                    uint8_t packed[32];
                    for (int c = 0; c < 4; c++) {
                        memcpy(packed + 8 * c, x.qs + 64 * (4 * j + c) + 8 * r, 8);
                    }
                    tiled_unpk_nib4(packed, q + 64 * j, q + 64 * j + 32);
                }
            }
        }
    }
}

"""

TILES = {
    '#include "tiled-kernel.h"\n': '#include "tiled-kernel.h"\n#include "repack.h"\n',
    **ahead_of("// unpack src1 tile from q8_K rows. num_k =", UNPACK_Q4_K),
    "(src0_row + ir0 * nb01 + kstart * src0_bs)": "(src0_row + ir0 * nb01 + kstart * sizeof(B))",
    "(src0_row + iir0 * nb01 + kblk * src0_bs)": "(src0_row + iir0 * nb01 + kblk * sizeof(B))",
    **ahead_of(
        "    if (!ggml_tiled_min_batch(dst->src[1]->ne[1])) {\n",
        f"""\
    if (dst->src[0]->type == GGML_TYPE_Q6_K && dst->src[1]->ne[1] < {N_TILE_ROWS} && !ggml_tiled_matmul_forced()) {{
        return false;
    }}
""",
    ),
    **ahead_of(
        "// MUL_MAT_ID (MoE), one expert; returns true if",
        f"""\
size_t ggml_tiled_q4_Kx8_wdata_size(int n_tasks) {{
    return 128 + n_tasks * ggml_tiled_ws_size(); // 64 for the end of src1, and for alignment
}}

bool ggml_compute_forward_mul_mat_tiled_q4_Kx8(const struct ggml_compute_params * params, struct ggml_tensor * dst) {{
#if defined(__AVX2__)
    // chunks of whole groups of 8 rows
    if (!params->use_ref && ggml_tiled_matmul_enabled() && dst->src[1]->ne[1] >= {N_TILE_ROWS}
            && dst->src[0]->ne[1] % TILED_TILE_ROWS == 0) {{
        ggml_compute_forward_mul_mat_tiled_driver<block_q4_Kx8, 32, true, 0, false>(params, dst);
        return true;
    }}
#endif
    return false;
}}

""",
    ),
}

TILES_H = ahead_of(
    "// MUL_MAT_ID (MoE) path, one expert;",
    """\
// the same for Q4_K whose rows are interleaved by 8 (see repack.h)
size_t ggml_tiled_q4_Kx8_wdata_size(int n_tasks);
bool ggml_compute_forward_mul_mat_tiled_q4_Kx8(const struct ggml_compute_params * params, struct ggml_tensor * dst);

""",
)

IS_Q4_KX8 = "std::is_same<BLOC_TYPE, block_q4_K>::value && INTER_SIZE == 8 && NB_COLS == 8"
REARRANGED = {
    '#include "repack.h"\n\n#if defined(__GNUC__)': (
        '#include "repack.h"\n#include "tiled/tiled.h"\n#include <type_traits>\n\n#if defined(__GNUC__)'
    ),
    "work_size(int /* n_threads */, ": "work_size(int n_threads, ",
    "                    size = ggml_row_size(PARAM_TYPE, ggml_nelements(op->src[1]));\n"
    "                    return true;\n": f"""\
                    size = ggml_row_size(PARAM_TYPE, ggml_nelements(op->src[1]));
                    if ({IS_Q4_KX8}) {{
                        size += ggml_tiled_q4_Kx8_wdata_size(n_threads);
                    }}
                    return true;
""",
    **ahead_of(
        "                forward_mul_mat(params, op);\n",
        f"""\
                if ({IS_Q4_KX8} && ggml_compute_forward_mul_mat_tiled_q4_Kx8(params, op)) {{
                    return true;
                }}
""",
    ),
}

# In each file, the text that is replaced, which occurs there once, and the new one.
EDITS = {
    CPU / "ops.cpp": ATTENTION,
    CPU / "arch/x86/quants.c": ahead_of(
        "void ggml_vec_dot_q6_K_q8_K(int n, float *", Q6_K_PRODUCTS
    ),
    CPU / "ggml-cpu.c": MATRIX,
    CPU / "tiled/tiled.cpp": TILES,
    CPU / "tiled/tiled.h": TILES_H,
    CPU / "repack.cpp": REARRANGED,
}


def main() -> int:
    """Change the source; return the exit code."""
    changed = {}
    for name, edits in EDITS.items():
        path = Path(sys.argv[1]) / name
        code = path.read_text(encoding="utf-8") if path.is_file() else ""
        for old, new in edits.items():
            if code.count(old) != 1:
                print(f"{name} does not have this once:\n{old}", file=sys.stderr)
                return 1
            code = code.replace(old, new)
        changed[path] = code
    for path, code in changed.items():
        path.write_text(code, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
