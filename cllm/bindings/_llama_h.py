"""llama.h as data: the C text of what we call, in the header's order.

The text below is the only statement of each declaration: `_declarations` derives ctypes structures and
signatures from it, so nothing can disagree with itself.

Rules for this file: only what we call and set; never a deprecated function; opaque structs stay opaque
and typed; symbols of llama.h are cited, line numbers never are.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import cast

from cllm.bindings._declarations import Declarations

# The llama.cpp that `build_llama.sh` builds by default, and the tests run with.
LLAMA_CPP_COMMIT = "b11549"
LLAMA_CPP_VERSION = "0.6.0"

LLAMA_TOKEN_NULL = -1

# Flag: copy only states of recurrent layers and cells of a sliding window, not the whole KV cache.
LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY = 1

# LLAMA_MAX_SEQ in llama-cparams.h, which is not installed; `llama_max_parallel_sequences` returns it.
LLAMA_MAX_SEQ = 256


# --- Enums -----------------------------------------------------------------------------------
# `C_PREFIX` has the C name of each enum, for the checks against the headers.
class LogLevel(IntEnum):
    """`enum ggml_log_level`."""

    NONE = 0
    DEBUG = 1
    INFO = 2
    WARN = 3
    ERROR = 4
    CONT = 5


class GgmlType(IntEnum):
    """`enum ggml_type`: the data types that a KV cache can have here."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    IQ4_NL = 20
    BF16 = 30


class VocabType(IntEnum):
    """`enum llama_vocab_type`."""

    NONE = 0
    SPM = 1
    BPE = 2
    WPM = 3
    UGM = 4
    RWKV = 5
    PLAMO2 = 6

    @classmethod
    def _missing_(cls, value: object) -> VocabType:
        """Return a member without a name: a later llama.cpp has more kinds."""
        kind = int.__new__(cls, cast(int, value))
        kind._name_, kind._value_ = f"KIND_{value}", int(kind)
        return kind


class TokenAttr(IntFlag):
    """`enum llama_token_attr`."""

    UNDEFINED = 0
    UNKNOWN = 1 << 0
    UNUSED = 1 << 1
    NORMAL = 1 << 2
    CONTROL = 1 << 3
    USER_DEFINED = 1 << 4
    BYTE = 1 << 5
    NORMALIZED = 1 << 6
    LSTRIP = 1 << 7
    RSTRIP = 1 << 8
    SINGLE_WORD = 1 << 9


class RopeScalingType(IntEnum):
    """`enum llama_rope_scaling_type`."""

    UNSPECIFIED = -1
    NONE = 0
    LINEAR = 1
    YARN = 2
    LONGROPE = 3


class RopeType(IntEnum):
    """`enum llama_rope_type`: the types whose positions have four parts."""

    MROPE = 8
    IMROPE = 40


class PoolingType(IntEnum):
    """`enum llama_pooling_type`."""

    UNSPECIFIED = -1
    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


class FlashAttnType(IntEnum):
    """`enum llama_flash_attn_type`."""

    AUTO = -1
    DISABLED = 0
    ENABLED = 1


class LoadMode(IntEnum):
    """`enum llama_load_mode`."""

    AUTO = -1
    NONE = 0
    MMAP = 1
    MLOCK = 2
    MMAP_MLOCK = 3
    DIRECT_IO = 4


class FileType(IntEnum):
    """`enum llama_ftype`: types of file that `quantize` writes."""

    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q2_K = 10
    Q3_K_M = 12
    Q4_K_S = 14
    Q4_K_M = 15
    Q5_K_M = 17
    Q6_K = 18
    BF16 = 32


class DeviceType(IntEnum):
    """`enum ggml_backend_dev_type`."""

    CPU = 0
    GPU = 1
    IGPU = 2
    ACCEL = 3
    META = 4


class SplitMode(IntEnum):
    """`enum llama_split_mode`."""

    NONE = 0
    LAYER = 1
    ROW = 2
    TENSOR = 3


class ContextType(IntEnum):
    """`enum llama_context_type`."""

    DEFAULT = 0
    MTP = 1


class ProcessType(IntEnum):
    """`enum llama_process_type`."""

    ENCODE = 0
    DECODE = 1


class NumaStrategy(IntEnum):
    """`enum ggml_numa_strategy`."""

    DISTRIBUTE = 1
    ISOLATE = 2
    NUMACTL = 3


C_PREFIX: dict[type[IntEnum] | type[IntFlag], tuple[str, str]] = {
    LogLevel: ("ggml_log_level", "GGML_LOG_LEVEL_"),
    GgmlType: ("ggml_type", "GGML_TYPE_"),
    VocabType: ("llama_vocab_type", "LLAMA_VOCAB_TYPE_"),
    TokenAttr: ("llama_token_attr", "LLAMA_TOKEN_ATTR_"),
    RopeScalingType: ("llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
    RopeType: ("llama_rope_type", "LLAMA_ROPE_TYPE_"),
    PoolingType: ("llama_pooling_type", "LLAMA_POOLING_TYPE_"),
    FlashAttnType: ("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    LoadMode: ("llama_load_mode", "LLAMA_LOAD_MODE_"),
    FileType: ("llama_ftype", "LLAMA_FTYPE_MOSTLY_"),
    DeviceType: ("ggml_backend_dev_type", "GGML_BACKEND_DEVICE_TYPE_"),
    SplitMode: ("llama_split_mode", "LLAMA_SPLIT_MODE_"),
    ContextType: ("llama_context_type", "LLAMA_CONTEXT_TYPE_"),
    ProcessType: ("llama_process_type", "LLAMA_PROCESS_TYPE_"),
    NumaStrategy: ("ggml_numa_strategy", "GGML_NUMA_STRATEGY_"),
}

# --- Typedefs --------------------------------------------------------------------------------
TYPEDEFS = """
typedef struct llama_memory_i * llama_memory_t;
typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_reg * ggml_backend_reg_t;
typedef struct ggml_backend * ggml_backend_t;
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct ggml_threadpool * ggml_threadpool_t;
typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;
typedef uint32_t llama_state_seq_flags;
typedef bool (*llama_progress_callback)(float progress, void * user_data);
typedef bool (*ggml_abort_callback)(void * data);
typedef void (*ggml_log_callback)(enum ggml_log_level level, const char * text, void * user_data);
"""

# --- Structs ---------------------------------------------------------------------------------
# Parameter structures list only the fields that are set here; the library fills in the others.
PARAMETERS = frozenset({
    "llama_model_params", "llama_context_params", "llama_model_quantize_params", "llama_sampler_chain_params",
    "ggml_threadpool_params",
})  # fmt: skip
STRUCTS = """
struct llama_token_data {
    llama_token id;
    float logit;
    float p;
};
struct llama_token_data_array {
    struct llama_token_data * data;
    size_t size;
    int64_t selected;
    bool sorted;
};
struct llama_batch {
    int32_t n_tokens;
    llama_token * token;
    float * embd;
    llama_pos * pos;
    int32_t * n_seq_id;
    llama_seq_id ** seq_id;
    int8_t * logits;
};
struct llama_embd {
    const float * data;
    size_t n_rows;
    size_t n_embd;
};
struct llama_model_tensor_buft_override {
    const char * pattern;
    ggml_backend_buffer_type_t buft;
};
struct llama_model_params {
    ggml_backend_dev_t * devices;
    const struct llama_model_tensor_buft_override * tensor_buft_overrides;
    int32_t n_gpu_layers;
    enum llama_split_mode split_mode;
    enum llama_load_mode load_mode;
    int32_t main_gpu;
    const float * tensor_split;
    llama_progress_callback progress_callback;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_alloc;
    bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    int32_t n_threads;
    int32_t n_threads_batch;
    enum llama_context_type ctx_type;
    enum llama_rope_scaling_type rope_scaling_type;
    enum llama_pooling_type pooling_type;
    enum llama_flash_attn_type flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    enum ggml_type type_k;
    enum ggml_type type_v;
    ggml_abort_callback abort_callback;
    void * abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
};
struct llama_model_quantize_params {
    int32_t nthread;
    enum llama_ftype ftype;
};
struct llama_logit_bias {
    llama_token token;
    float bias;
};
struct llama_sampler_chain_params {
    bool no_perf;
};
struct ggml_threadpool_params {
    int32_t n_threads;
    uint32_t poll;
};
"""

# --- Prototypes ------------------------------------------------------------------------------
PROTOTYPES = """
const char * llama_version(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_sampler_chain_params llama_sampler_chain_default_params(void);
struct llama_model_quantize_params llama_model_quantize_default_params(void);
void llama_backend_init(void);
void llama_numa_init(enum ggml_numa_strategy numa);
size_t llama_max_devices(void);
struct llama_model * llama_model_load_from_file(const char * path_model, struct llama_model_params params);
void llama_model_free(struct llama_model * model);
struct llama_context * llama_init_from_model(struct llama_model * model, struct llama_context_params params);
void llama_free(struct llama_context * ctx);
size_t llama_max_parallel_sequences(void);
uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_ctx_seq(const struct llama_context * ctx);
uint32_t llama_n_batch(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
uint32_t llama_n_rs_seq(const struct llama_context * ctx);
llama_memory_t llama_get_memory(const struct llama_context * ctx);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_model_n_ctx_train(const struct llama_model * model);
int32_t llama_model_n_embd(const struct llama_model * model);
int32_t llama_model_n_embd_inp(const struct llama_model * model);
int32_t llama_model_n_embd_out(const struct llama_model * model);
uint32_t llama_model_n_cls_out(const struct llama_model * model);
const char * llama_model_cls_label(const struct llama_model * model, uint32_t i);
int32_t llama_model_n_layer(const struct llama_model * model);
int32_t llama_model_n_head(const struct llama_model * model);
int32_t llama_model_n_head_kv(const struct llama_model * model);
int32_t llama_model_n_layer_nextn(const struct llama_model * model);
int32_t llama_model_n_swa(const struct llama_model * model);
enum llama_rope_type llama_model_rope_type(const struct llama_model * model);
enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
int32_t llama_model_meta_val_str(const struct llama_model * model, const char * key, char * buf, size_t buf_size);
int32_t llama_model_meta_count(const struct llama_model * model);
int32_t llama_model_meta_key_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
int32_t llama_model_meta_val_str_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
int32_t llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
uint64_t llama_model_size(const struct llama_model * model);
const char * llama_model_chat_template(const struct llama_model * model, const char * name);
uint64_t llama_model_n_params(const struct llama_model * model);
bool llama_model_has_encoder(const struct llama_model * model);
bool llama_model_has_decoder(const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);
bool llama_model_is_hybrid(const struct llama_model * model);
bool llama_model_is_diffusion(const struct llama_model * model);
uint32_t llama_model_quantize(const char * fname_inp, const char * fname_out, const struct llama_model_quantize_params * params);
struct llama_adapter_lora * llama_adapter_lora_init(struct llama_model * model, const char * path_lora);
void llama_adapter_lora_free(struct llama_adapter_lora * adapter);
uint64_t llama_adapter_get_alora_n_invocation_tokens(const struct llama_adapter_lora * adapter);
const llama_token * llama_adapter_get_alora_invocation_tokens(const struct llama_adapter_lora * adapter);
int32_t llama_set_adapters_lora(struct llama_context * ctx, struct llama_adapter_lora ** adapters, size_t n_adapters, float * scales);
void llama_memory_clear(llama_memory_t mem, bool data);
bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
void llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta);
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
bool llama_memory_can_shift(llama_memory_t mem);
size_t llama_state_seq_get_size(struct llama_context * ctx, llama_seq_id seq_id);
size_t llama_state_seq_get_data(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id);
size_t llama_state_seq_set_data(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id dest_seq_id);
size_t llama_state_seq_get_size_ext(struct llama_context * ctx, llama_seq_id seq_id, llama_state_seq_flags flags);
size_t llama_state_seq_get_data_ext(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags);
size_t llama_state_seq_set_data_ext(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id dest_seq_id, llama_state_seq_flags flags);
int32_t llama_encode(struct llama_context * ctx, struct llama_batch batch);
int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch);
struct llama_batch_ext * llama_batch_ext_init(struct llama_context * ctx);
void llama_batch_ext_free(struct llama_batch_ext * batch);
void llama_batch_ext_clear(struct llama_batch_ext * batch);
int32_t llama_batch_ext_add_token(struct llama_batch_ext * batch, llama_seq_id seq_id, llama_token id);
bool llama_batch_ext_set_embd_state(struct llama_batch_ext * batch, int32_t idx, struct llama_embd embd);
bool llama_batch_ext_set_output_logits(struct llama_batch_ext * batch, int32_t idx, bool value);
bool llama_batch_ext_set_pos(struct llama_batch_ext * batch, int32_t idx, const llama_pos * pos);
int32_t llama_process(struct llama_context * ctx, enum llama_process_type type, struct llama_batch_ext * batch);
void llama_set_n_threads(struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
void llama_set_causal_attn(struct llama_context * ctx, bool causal_attn);
void llama_synchronize(struct llama_context * ctx);
float * llama_get_logits(struct llama_context * ctx);
float * llama_get_embeddings_seq(struct llama_context * ctx, llama_seq_id seq_id);
const char * llama_vocab_get_text(const struct llama_vocab * vocab, llama_token token);
float llama_vocab_get_score(const struct llama_vocab * vocab, llama_token token);
enum llama_token_attr llama_vocab_get_attr(const struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_eog(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_bos(const struct llama_vocab * vocab);
llama_token llama_vocab_eos(const struct llama_vocab * vocab);
llama_token llama_vocab_eot(const struct llama_vocab * vocab);
llama_token llama_vocab_nl(const struct llama_vocab * vocab);
llama_token llama_vocab_pad(const struct llama_vocab * vocab);
llama_token llama_vocab_sep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_pre(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_suf(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_mid(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_rep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_sep(const struct llama_vocab * vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab * vocab);
bool llama_vocab_get_add_eos(const struct llama_vocab * vocab);
bool llama_vocab_get_add_sep(const struct llama_vocab * vocab);
const llama_token * llama_vocab_get_suppress_tokens(const struct llama_vocab * vocab, int32_t * n_suppress_tokens);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t length, int32_t lstrip, bool special);
int32_t llama_detokenize(const struct llama_vocab * vocab, const llama_token * tokens, int32_t n_tokens, char * text, int32_t text_len_max, bool remove_special, bool unparse_special);
const char * llama_sampler_name(const struct llama_sampler * smpl);
void llama_sampler_accept(struct llama_sampler * smpl, llama_token token);
void llama_sampler_apply(struct llama_sampler * smpl, struct llama_token_data_array * cur_p);
void llama_sampler_reset(struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_clone(const struct llama_sampler * smpl);
void llama_sampler_free(struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
void llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_chain_get(struct llama_sampler * chain, int32_t i);
int32_t llama_sampler_chain_n(const struct llama_sampler * chain);
struct llama_sampler * llama_sampler_init_greedy(void);
struct llama_sampler * llama_sampler_init_dist(uint32_t seed);
struct llama_sampler * llama_sampler_init_top_k(int32_t k);
struct llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_typical(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_temp(float t);
struct llama_sampler * llama_sampler_init_temp_ext(float t, float delta, float exponent);
struct llama_sampler * llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
struct llama_sampler * llama_sampler_init_top_n_sigma(float n);
struct llama_sampler * llama_sampler_init_mirostat(int32_t n_vocab, uint32_t seed, float tau, float eta, int32_t m);
struct llama_sampler * llama_sampler_init_mirostat_v2(uint32_t seed, float tau, float eta);
struct llama_sampler * llama_sampler_init_penalties(int32_t n_vocab, int32_t penalty_last_n, float penalty_repeat, float penalty_freq, float penalty_present);
struct llama_sampler * llama_sampler_init_dry(const struct llama_vocab * vocab, float dry_multiplier, float dry_base, int32_t dry_allowed_length, int32_t dry_penalty_last_n, const char ** seq_breakers, size_t num_breakers);
struct llama_sampler * llama_sampler_init_adaptive_p(float target, float decay, uint32_t seed);
struct llama_sampler * llama_sampler_init_logit_bias(int32_t n_vocab, int32_t n_logit_bias, const struct llama_logit_bias * logit_bias);
llama_token llama_sampler_sample(struct llama_sampler * smpl, struct llama_context * ctx, int32_t idx);
const char * llama_print_system_info(void);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
const char * ggml_backend_dev_name(ggml_backend_dev_t device);
const char * ggml_backend_dev_description(ggml_backend_dev_t device);
void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params);
const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
ggml_backend_dev_t ggml_backend_reg_dev_get(ggml_backend_reg_t reg, size_t index);
void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
ggml_backend_reg_t ggml_backend_reg_by_name(const char * name);
void ggml_backend_register(ggml_backend_reg_t reg);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
void ggml_backend_load_all_from_path(const char * dir_path);
void ggml_threadpool_params_init(struct ggml_threadpool_params * p, int32_t n_threads);
void llama_attach_threadpool(struct llama_context * ctx, ggml_threadpool_t threadpool, ggml_threadpool_t threadpool_batch);
void llama_detach_threadpool(struct llama_context * ctx);
void llama_log_set(ggml_log_callback log_callback, void * user_data);
"""

# Calls that can take long.
RELEASES_GIL = frozenset({
    "ggml_backend_load_all_from_path", "ggml_backend_dev_init", "llama_backend_init", "llama_model_load_from_file",
    "llama_model_free", "llama_init_from_model", "llama_free", "llama_adapter_lora_init",
    "llama_memory_clear", "llama_state_seq_get_size", "llama_state_seq_get_data", "llama_state_seq_set_data",
    "llama_state_seq_get_size_ext", "llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext",
    "llama_model_quantize", "llama_encode", "llama_decode", "llama_process", "llama_synchronize", "llama_tokenize",
    "llama_detokenize", "llama_sampler_sample",
    "llama_sampler_init_dry", "llama_sampler_clone",
})  # fmt: skip


# A library may lack these: a call of such a function then raises `LibraryError`.
OPTIONAL = frozenset({
    "llama_max_parallel_sequences", "llama_model_quantize", "llama_model_quantize_default_params",
    "ggml_backend_dev_init", "ggml_backend_register", "llama_batch_ext_init",
    "llama_batch_ext_free", "llama_batch_ext_clear", "llama_batch_ext_add_token", "llama_batch_ext_set_embd_state",
    "llama_batch_ext_set_output_logits", "llama_batch_ext_set_pos", "llama_process",
})  # fmt: skip

DECLARATIONS = Declarations(
    TYPEDEFS, STRUCTS, PROTOTYPES, C_PREFIX,
    parameters=PARAMETERS, releases_gil=RELEASES_GIL, optional=OPTIONAL,
)  # fmt: skip
