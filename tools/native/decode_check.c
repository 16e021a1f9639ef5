/* Does this libllama decode a quantized model?
 *
 *     decode_check MODEL.gguf DIRECTORY [BACKEND.so]
 *
 * The last step of build_llama.sh, run as a child process because what it looks for is a crash: a
 * library whose kernels use instructions that this machine lists but does not have dies at the
 * first matrix product of a quantized model, and not earlier.
 *
 * MODEL (float16) is quantized to Q8_0 and Q4_0 in DIRECTORY.  Each file decodes ROWS tokens in one
 * batch and then the last of them again as a batch of one row, because the two sizes take different
 * kernels.  Every logit must be finite, both sizes must agree with each other, and Q8_0 must agree
 * with the unquantized model: wrong arithmetic does not always crash.
 *
 * BACKEND.so is the code for one kind of CPU, of a library that has one for each.  Exit status 3:
 * this CPU is of another kind.
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

enum { ROWS = 48, N_CTX = 64, N_THREADS = 2, MAX_PATH = 4096 };

/* Cosine similarities of logits.  Two sizes of one batch differ by rounding (they share weights and
 * quantize activations alike); Q8_0 keeps seven bits of each weight. */
static const double SAME_MODEL = 0.99;
static const double Q8_0_TO_F16 = 0.95;

static char first_error[512];

/* The first is the one that names the cause; the later ones name the callers. */
static void keep_first_error(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR && first_error[0] == '\0') {
        snprintf(first_error, sizeof first_error, "%s", text);
        first_error[strcspn(first_error, "\n")] = '\0';
    }
}

static void fail(const char *model, const char *what) {
    fprintf(stderr, "%s: %s%s%s\n", model, what, first_error[0] ? ": " : "", first_error);
    exit(1);
}

static double similarity(const float *a, const float *b, int n) {
    double dot = 0, norm_a = 0, norm_b = 0;
    for (int i = 0; i < n; i++) {
        dot += (double)a[i] * b[i];
        norm_a += (double)a[i] * a[i];
        norm_b += (double)b[i] * b[i];
    }
    return dot / (sqrt(norm_a) * sqrt(norm_b) + 1e-30);
}

static void add_row(struct llama_batch *batch, llama_token token, llama_pos pos) {
    const int row = batch->n_tokens++;
    batch->token[row] = token;
    batch->pos[row] = pos;
    batch->n_seq_id[row] = 1;
    batch->seq_id[row][0] = 0;
    batch->logits[row] = true;
}

/* Decode `batch` and append the logits of all its rows to `logits`. */
static void decode(const char *name, struct llama_context *ctx, struct llama_batch batch,
                   int n_vocab, float *logits) {
    if (llama_decode(ctx, batch) != 0) {
        fail(name, "llama_decode failed");
    }
    for (int row = 0; row < batch.n_tokens; row++) {
        const float *row_logits = llama_get_logits_ith(ctx, row);
        if (row_logits == NULL) {
            fail(name, "a row has no logits");
        }
        for (int i = 0; i < n_vocab; i++) {
            if (!isfinite(row_logits[i])) {
                fail(name, "a logit is not finite");
            }
        }
        memcpy(logits + (size_t)row * n_vocab, row_logits, n_vocab * sizeof *logits);
    }
}

/* Logits of the ROWS rows of one batch; the caller frees them. */
static float *check_model(const char *path, int *n_vocab) {
    struct llama_model *model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == NULL) {
        fail(path, "cannot be loaded");
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = N_CTX;
    params.n_threads = N_THREADS;
    params.n_threads_batch = N_THREADS;
    struct llama_context *ctx = llama_init_from_model(model, params);
    if (ctx == NULL) {
        fail(path, "no context");
    }

    *n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    float *many = calloc((size_t)ROWS * *n_vocab, sizeof *many);
    float *one = calloc((size_t)*n_vocab, sizeof *one);
    struct llama_batch batch = llama_batch_init(ROWS, 0, 1);
    if (many == NULL || one == NULL) {
        fail(path, "out of memory");
    }
    for (int pos = 0; pos < ROWS; pos++) {
        add_row(&batch, (pos * 37 + 11) % *n_vocab, pos);
    }
    decode(path, ctx, batch, *n_vocab, many);

    const llama_token last_token = batch.token[ROWS - 1];
    llama_memory_seq_rm(llama_get_memory(ctx), 0, ROWS - 1, -1);
    batch.n_tokens = 0;
    add_row(&batch, last_token, ROWS - 1);
    decode(path, ctx, batch, *n_vocab, one);
    if (similarity(one, many + (size_t)(ROWS - 1) * *n_vocab, *n_vocab) < SAME_MODEL) {
        fail(path, "one row and many rows give different logits");
    }

    free(one);
    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    return many;
}

static float *check_quantized(const char *source, const char *directory, const char *name,
                              enum llama_ftype ftype, int *n_vocab) {
    char path[MAX_PATH];
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = ftype;
    params.nthread = N_THREADS;
    snprintf(path, sizeof path, "%s/%s.gguf", directory, name);
    if (llama_model_quantize(source, path, &params) != 0) {
        fail(name, "cannot be quantized");
    }
    float *logits = check_model(path, n_vocab);
    printf("%s: %d rows and 1 row\n", name, ROWS);
    return logits;
}

int main(int argc, char **argv) {
    int n_vocab = 0;
    if (argc != 3 && argc != 4) {
        fprintf(stderr, "usage: decode_check MODEL.gguf DIRECTORY [BACKEND.so]\n");
        return 2;
    }
    llama_log_set(keep_first_error, NULL);
    if (argc == 4 && ggml_backend_load(argv[3]) == NULL) {
        fprintf(stderr, "%s: %s\n", argv[3], first_error[0] ? first_error : "not for this CPU");
        return first_error[0] ? 1 : 3;
    }
    llama_backend_init();

    float *f16 = check_model(argv[1], &n_vocab);
    float *q8_0 = check_quantized(argv[1], argv[2], "Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0, &n_vocab);
    float *q4_0 = check_quantized(argv[1], argv[2], "Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0, &n_vocab);
    if (similarity(f16, q8_0, ROWS * n_vocab) < Q8_0_TO_F16) {
        fail("Q8_0", "its logits are not those of the unquantized model");
    }

    free(f16);
    free(q8_0);
    free(q4_0);
    llama_backend_free();
    printf("ok\n");
    return 0;
}
