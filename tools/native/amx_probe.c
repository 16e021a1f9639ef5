/* Do Intel's matrix tiles work here, compiled by this compiler?
 *
 * CPUID is not evidence, for two reasons.  Some hypervisors list amx_* and refuse the instructions.
 * And gcc's _tile_loadconfig (12.2 and others) declares that it reads 8 bytes where LDTILECFG reads
 * 64, so the optimizer drops the rest of a configuration that stands on the stack, as ggml's does;
 * LDTILECFG then faults on what happens to lie there (llama.cpp issue 20824, pull request 26954).
 *
 * So this program does what ggml-cpu/amx/mmq.cpp does, store by store, multiplies two matrices and
 * checks the product, first in its main thread and then in a second one, as in ggml's pool.  It has
 * to be compiled with the optimization ggml is compiled with.
 *
 * Exit status 0: the tiles work.  1: the kernel refuses them, or the product is wrong.  Death by a
 * signal is an answer too, which is why build_llama.sh runs this as a child process.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define USES_TILES __attribute__((noinline, target("amx-tile,amx-int8")))

enum {
    ARCH_REQ_XCOMP_PERM = 0x1023,
    XFEATURE_XTILEDATA = 18,
    ROWS = 16,
    ROW_BYTES = 64,
};

/* The operand of LDTILECFG, as in Intel's manual. */
struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "LDTILECFG reads 64 bytes");

/* Straight-line stores into a local on purpose: a static or looped-over configuration would survive
 * the optimizer where ggml's does not. */
USES_TILES static void configure(void) {
    _Alignas(64) struct tile_config config = {0};
    config.palette = 1;
    config.rows[0] = ROWS;
    config.row_bytes[0] = ROW_BYTES;
    config.rows[1] = ROWS;
    config.row_bytes[1] = ROW_BYTES;
    config.rows[2] = ROWS;
    config.row_bytes[2] = ROW_BYTES;
    _tile_loadconfig(&config);
}

USES_TILES static bool multiply(void) {
    static const int32_t ones_times_twos = ROW_BYTES * 1 * 2;
    int8_t ones[ROWS * ROW_BYTES], twos[ROWS * ROW_BYTES];
    int32_t product[ROWS * ROWS];

    memset(ones, 1, sizeof ones);
    memset(twos, 2, sizeof twos);
    memset(product, 0, sizeof product);
    _tile_zero(0);
    _tile_loadd(1, ones, ROW_BYTES);
    _tile_loadd(2, twos, ROW_BYTES);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, product, ROW_BYTES);
    _tile_release();
    for (int i = 0; i < ROWS * ROWS; i++) {
        if (product[i] != ones_times_twos) {
            return false;
        }
    }
    return true;
}

static void *configure_and_multiply(void *is_right) {
    configure();
    *(bool *)is_right = multiply();
    return NULL;
}

int main(void) {
    pthread_t thread;
    bool right_in_main = false, right_in_thread = false;

    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) {
        return 1;
    }
    configure_and_multiply(&right_in_main);
    if (pthread_create(&thread, NULL, configure_and_multiply, &right_in_thread) != 0) {
        return 1;
    }
    pthread_join(thread, NULL);
    return right_in_main && right_in_thread ? 0 : 1;
}
