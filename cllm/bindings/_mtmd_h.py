"""mtmd.h as data: the C text of what we call of libmtmd, in the header's order.

libmtmd turns images and audio into rows of embeddings, which `llama_decode` takes in place of tokens.
The rules of `_llama_h` hold here.  Three kinds of functions are not declared: those that decode
(`mtmd_helper_*`), read untrusted files, or search a text for markers, which its author may have written
(`mtmd_tokenize`).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from cllm.bindings import _llama_h as h
from cllm.bindings._declarations import Declarations


class ChunkType(IntEnum):
    """`enum mtmd_input_chunk_type`."""

    TEXT = 0
    IMAGE = 1
    AUDIO = 2


C_PREFIX: dict[type[IntEnum] | type[IntFlag], tuple[str, str]] = {
    ChunkType: ("mtmd_input_chunk_type", "MTMD_INPUT_CHUNK_TYPE_"),
}

TYPEDEFS = """
typedef bool (*ggml_backend_sched_eval_callback)(struct ggml_tensor * t, bool ask, void * user_data);
"""

STRUCTS = """
struct mtmd_input_text {
    const char * text;
    size_t text_len;
    bool add_special;
    bool parse_special;
};
struct mtmd_input_part {
    const struct mtmd_input_text * text;
    const struct mtmd_bitmap * bitmap;
};
struct mtmd_decoder_pos {
    uint32_t t;
    uint32_t x;
    uint32_t y;
    uint32_t z;
};
struct mtmd_context_params {
    bool use_gpu;
    bool print_timings;
    int32_t n_threads;
    enum llama_flash_attn_type flash_attn_type;
    bool warmup;
    int32_t image_min_tokens;
    int32_t image_max_tokens;
    ggml_backend_sched_eval_callback cb_eval;
};
"""

PROTOTYPES = """
struct mtmd_context_params mtmd_context_params_default(void);
struct mtmd_context * mtmd_init_from_file(const char * mmproj_fname, const struct llama_model * text_model, const struct mtmd_context_params ctx_params);
void mtmd_free(struct mtmd_context * ctx);
bool mtmd_decode_use_non_causal(const struct mtmd_context * ctx, const struct mtmd_input_chunk * chunk);
bool mtmd_decode_use_mrope(const struct mtmd_context * ctx);
bool mtmd_support_vision(const struct mtmd_context * ctx);
bool mtmd_support_audio(const struct mtmd_context * ctx);
int32_t mtmd_get_audio_sample_rate(const struct mtmd_context * ctx);
struct mtmd_bitmap * mtmd_bitmap_init(uint32_t nx, uint32_t ny, const uint8_t * data);
struct mtmd_bitmap * mtmd_bitmap_init_from_audio(size_t n_samples, const float * data);
void mtmd_bitmap_free(struct mtmd_bitmap * bitmap);
struct mtmd_input_chunks * mtmd_input_chunks_init(void);
size_t mtmd_input_chunks_size(const struct mtmd_input_chunks * chunks);
const struct mtmd_input_chunk * mtmd_input_chunks_get(const struct mtmd_input_chunks * chunks, size_t idx);
void mtmd_input_chunks_free(struct mtmd_input_chunks * chunks);
enum mtmd_input_chunk_type mtmd_input_chunk_get_type(const struct mtmd_input_chunk * chunk);
const llama_token * mtmd_input_chunk_get_tokens_text(const struct mtmd_input_chunk * chunk, size_t * n_tokens_output);
const struct mtmd_image_tokens * mtmd_input_chunk_get_tokens_image(const struct mtmd_input_chunk * chunk);
size_t mtmd_input_chunk_get_n_tokens(const struct mtmd_input_chunk * chunk);
llama_pos mtmd_input_chunk_get_n_pos(const struct mtmd_input_chunk * chunk);
struct mtmd_input_chunk * mtmd_input_chunk_copy(const struct mtmd_input_chunk * chunk);
void mtmd_input_chunk_free(struct mtmd_input_chunk * chunk);
struct mtmd_decoder_pos mtmd_image_tokens_get_decoder_pos(const struct mtmd_image_tokens * image_tokens, llama_pos pos_0, size_t i);
int32_t mtmd_tokenize_from_parts(const struct mtmd_context * ctx, struct mtmd_input_chunks * output, const struct mtmd_input_part * const * parts, size_t n_parts, bool add_special);
struct mtmd_batch * mtmd_batch_init(struct mtmd_context * ctx);
void mtmd_batch_free(struct mtmd_batch * batch);
int32_t mtmd_batch_add_chunk(struct mtmd_batch * batch, const struct mtmd_input_chunk * chunk);
int32_t mtmd_batch_encode(struct mtmd_batch * batch);
float * mtmd_batch_get_output_embd(struct mtmd_batch * batch, const struct mtmd_input_chunk * chunk);
void mtmd_log_set(ggml_log_callback log_callback, void * user_data);
"""

RELEASES_GIL = frozenset({
    "mtmd_init_from_file", "mtmd_free", "mtmd_tokenize_from_parts", "mtmd_batch_encode",
    "mtmd_bitmap_init", "mtmd_bitmap_init_from_audio", "mtmd_bitmap_free", "mtmd_input_chunk_copy", "mtmd_input_chunk_free",
    "mtmd_input_chunks_free",
})  # fmt: skip

DECLARATIONS = Declarations(
    TYPEDEFS, STRUCTS, PROTOTYPES, C_PREFIX, parameters=frozenset({"mtmd_context_params"}),
    releases_gil=RELEASES_GIL, header="mtmd.h", base=h.DECLARATIONS,
)  # fmt: skip
