/* Preloaded into every process that runs with the library with sanitizers, after their runtimes.
 *
 * It notes the process, since a report has the number of one and not its command.
 *
 * It tells UndefinedBehaviorSanitizer where to write.  gcc links two runtimes, and the dynamic linker
 * lets AddressSanitizer's __sanitizer_set_report_path stand for the other's too: `log_path` moves the
 * reports of the first, and those of the second stay on stderr, which tests read or throw away.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void note_process(const char *directory) {
    char path[4096], line[8192];
    snprintf(path, sizeof path, "%s/processes", directory);
    int n = snprintf(line, sizeof line, "%d ", (int)getpid());
    int command = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    /* One write to a file that is appended to: the lines of two processes do not mix. */
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    ssize_t read_bytes = read(command, line + n, sizeof line - (size_t)n - 1);
    int end = n + (read_bytes > 0 ? (int)read_bytes : 0);
    for (int i = n; i < end; i++) {
        if (line[i] == '\0' || line[i] == '\n') {
            line[i] = ' ';
        }
    }
    line[end] = '\n';
    if (write(file, line, (size_t)end + 1) < 0) {
        perror(path);
    }
    close(command);
    close(file);
}

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("CLLM_SANITIZER_REPORTS");
    void *runtime = dlopen("libubsan.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void (*set_path)(const char *) =
        runtime ? (void (*)(const char *))dlsym(runtime, "__sanitizer_set_report_path") : NULL;
    char path[4096];
    if (!directory || !set_path) {
        return;
    }
    note_process(directory);
    snprintf(path, sizeof path, "%s/ubsan", directory);
    set_path(path);
}
