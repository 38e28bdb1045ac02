/* Faults on demand, for LD_PRELOAD: calls that fail below one folder, and a clock that is wrong.
 *
 * CHAOS_WHO     words that must stand in the command line; other processes are left in peace
 * CHAOS_FAULT   "CALLS ERRNO FIRST TIMES FOLDER": of CALLS (write,fsync,...) on paths below FOLDER,
 *               the FIRST-th and those after it fail, TIMES of them (0: all from there on)
 * CHAOS_TOLD    a file that gets a line for each fault
 * CHAOS_CLOCK   a file with the number of seconds by which the time of day is off
 *
 * A program that is already running may call chaos_arm(text) with what CHAOS_FAULT would say.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static char calls[256], folder[PATH_MAX];
static int error, spared = 1;
static long first, times, seen, fired;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

void chaos_arm(const char *text) {
    calls[0] = 0;
    seen = fired = 0;
    if (text && sscanf(text, "%255s %d %ld %ld %4095s", calls, &error, &first, &times, folder) == 5)
        spared = 0;
    else
        spared = 1;
}

__attribute__((constructor)) static void begin(void) {
    const char *who = getenv("CHAOS_WHO"), *fault = getenv("CHAOS_FAULT");
    char line[8192];
    int file = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    long length = file < 0 ? 0 : syscall(SYS_read, file, line, sizeof line - 1);
    if (file >= 0) syscall(SYS_close, file);
    for (long i = 0; i < length; i++)
        if (!line[i]) line[i] = ' ';
    line[length > 0 ? length : 0] = 0;
    if (fault && (!who || strstr(line, who))) chaos_arm(fault);
}

static int listed(const char *call) {
    size_t length = strlen(call);
    for (const char *at = calls; (at = strstr(at, call)); at += length)
        if ((at == calls || at[-1] == ',') && (at[length] == ',' || !at[length])) return 1;
    return 0;
}

static void tell(const char *call, const char *path) {
    const char *told = getenv("CHAOS_TOLD");
    char line[PATH_MAX + 64];
    if (!told) return;
    int file = syscall(SYS_openat, AT_FDCWD, told, O_WRONLY | O_CREAT | O_APPEND, 0644);
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    if (file >= 0) {
        syscall(SYS_write, file, line, length);
        syscall(SYS_close, file);
    }
}

/* Whether this call is one of those that fail; errno then says how. */
static int fails(const char *call, const char *path) {
    char whole[PATH_MAX * 2];
    if (spared || !path || !listed(call)) return 0;
    if (path[0] != '/') {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", here, path);
        path = whole;
    }
    if (strncmp(path, folder, strlen(folder))) return 0;
    if (++seen < first || (times && fired >= times)) return 0;
    fired++;
    tell(call, path);
    errno = error;
    return 1;
}

static int fails_at(const char *call, int file) {
    char link[64], path[PATH_MAX];
    if (spared || !listed(call)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (fails_at("write", file)) {
        /* A disk that fills up takes the first half. */
        if (error == ENOSPC && size > 1) real(file, data, size / 2);
        errno = error;
        return -1;
    }
    return real(file, data, size);
}

#define PWRITE(name) \
    ssize_t name(int file, const void *data, size_t size, off_t at) { \
        REAL(ssize_t, #name, int, const void *, size_t, off_t); \
        return fails_at("pwrite", file) ? -1 : real(file, data, size, at); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define ON_FILE(name, call) \
    int name(int file) { \
        REAL(int, #name, int); \
        return fails_at(call, file) ? -1 : real(file); \
    }
ON_FILE(fsync, "fsync")
ON_FILE(fdatasync, "fsync")

#define FTRUNCATE(name) \
    int name(int file, off_t size) { \
        REAL(int, #name, int, off_t); \
        return fails_at("ftruncate", file) ? -1 : real(file, size); \
    }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return fails("rename", to) ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return fails("mkdir", path) ? -1 : real(path, mode);
}

int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    return fails("link", to) ? -1 : real(from, to);
}

int linkat(int at, const char *from, int to_at, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    return fails("link", to) ? -1 : real(at, from, to_at, to, flags);
}

#define SENDFILE(name) \
    ssize_t name(int to, int from, off_t *at, size_t size) { \
        REAL(ssize_t, #name, int, int, off_t *, size_t); \
        return fails_at("write", to) ? -1 : real(to, from, at, size); \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        REAL(int, #name, const char *, int, ...); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails("open", path)) return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

static long offset(void) {
    static const char *path;
    static int known;
    char text[32];
    if (!known) {
        known = 1;
        path = getenv("CHAOS_CLOCK");
    }
    if (!path) return 0;
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (file < 0) return 0;
    long length = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    text[length > 0 ? length : 0] = 0;
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
