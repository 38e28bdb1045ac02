/* A shared folder that is slow, for LD_PRELOAD: reads and writes below SLOW_FOLDER take as long as
 * SLOW_MB_S megabytes a second allow, over all threads of a process. What is read through a mapping
 * of a file into memory is not slowed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static double rate, free_at;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("SLOW_FOLDER"), *fast = getenv("SLOW_MB_S");
    if (where && fast && strlen(where) < sizeof folder) {
        strcpy(folder, where);
        rate = atof(fast) * 1e6;
    }
}

static int slow(int file) {
    char link[64], path[PATH_MAX];
    if (rate <= 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, folder, strlen(folder)) && path[strlen(folder)] == '/';
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static ssize_t wait_for(int file, ssize_t count) {
    if (count <= 0 || !slow(file)) return count;
    pthread_mutex_lock(&lock);
    double begun = now();
    if (free_at < begun) free_at = begun;
    free_at += count / rate;
    double left = free_at - begun;
    pthread_mutex_unlock(&lock);
    struct timespec pause = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
    nanosleep(&pause, NULL);
    return count;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int f, void *to, size_t n) { return wait_for(f, REAL(read)(f, to, n)); }
ssize_t write(int f, const void *of, size_t n) { return wait_for(f, REAL(write)(f, of, n)); }
ssize_t pread64(int f, void *to, size_t n, off64_t at) {
    return wait_for(f, REAL(pread64)(f, to, n, at));
}
ssize_t pwrite64(int f, const void *of, size_t n, off64_t at) {
    return wait_for(f, REAL(pwrite64)(f, of, n, at));
}
