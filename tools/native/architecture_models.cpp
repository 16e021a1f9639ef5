// Write a small random model of each architecture with llama.cpp's own generator, without the rest of
// its test: architecture_models PATTERN SEED DIRECTORY.  Internal functions of libllama make the files,
// so this is compiled with the sources of the library that it is linked to.
#define main test_main
#include "test-llama-archs.cpp"
#undef main

// The log of llama.cpp's tools, which is not linked, stays empty.
int common_log_verbosity_thold = -1;
int common_log_get_verbosity(enum ggml_log_level) { return LOG_LEVEL_DEBUG; }
int common_log_get_verbosity_thold(void) { return -1; }
struct common_log * common_log_main() { return nullptr; }
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    try {
        return save_models(argv[1], std::stoull(argv[2]), 0.1f, LOG_LEVEL_ERROR, argv[3]);
    } catch (const std::exception & error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
